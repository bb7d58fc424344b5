"""A hardware profile tells what verification and drafting cost, and refuses to tell what cannot be."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dspark.scheduling.estimate import estimate
from hf_dspark.scheduling.profile import DraftCell, Entry, HardwareProfile, Identity, Timing, VerifyCell

IDENTITY = Identity("a machine", "2.0", 1, "float32", "sdpa", "target", "drafter")
WIDTHS, ROWS, DEPTHS = range(1, 5), (1, 2, 4), (64, 1024)


def timing(seconds: float) -> Timing:
    return Timing(seconds, 0.95 * seconds, 1.05 * seconds, 5)


def verify_cell(rows: int, tokens: int, depth: int, seconds: float | None = None) -> VerifyCell:
    """As on a machine that takes 10 ms, 1 ms more for each token and 1 ms more for each 1000 tokens of context."""
    if seconds is None:
        seconds = (10 + tokens + rows * depth / 1000) / 1000
    return VerifyCell(rows, tokens, depth, timing(seconds))


def grid(rows=ROWS, widths=WIDTHS, depths=DEPTHS) -> list[VerifyCell]:
    return [verify_cell(r, r * w, d) for r in rows for w in widths for d in depths]


def entry(verify: list[VerifyCell] | None = None, **fields) -> Entry:
    verify = grid() if verify is None else verify
    draft = [DraftCell(1, timing(0.002)), DraftCell(4, timing(0.005))]
    return Entry(**{"identity": IDENTITY, "verify": verify, "draft": draft, "overhead": timing(0.001), **fields})


# Lookup

times = st.floats(1e-4, 1.0)
places = st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(0, 5000))


@given(st.lists(times, min_size=24, max_size=24), places, places)
def test_more_work_never_takes_less_time(seconds, one, other):
    noisy = entry([replace(cell, time=timing(found)) for cell, found in zip(grid(), seconds)])
    more = tuple(map(max, one, other))
    (width, rows, depth), (more_width, more_rows, more_depth) = one, more
    less_time = noisy.verify_seconds(width * rows, rows, depth)
    assert less_time <= noisy.verify_seconds(more_width * more_rows, more_rows, more_depth) * (1 + 1e-9)
    assert less_time <= noisy.verify_seconds(width * rows + 1, rows, depth) * (1 + 1e-9)
    assert noisy.draft_seconds(one[1]) <= noisy.draft_seconds(more[1])
    costs = noisy.round_costs(20, one[2])
    assert list(costs.verify) == sorted(costs.verify) and len(costs.verify) == 21


def test_measured_times_are_returned_and_others_lie_on_lines_between():
    found = entry()
    for cell in found.verify:
        assert found.verify_seconds(cell.tokens, cell.rows, cell.depth) == pytest.approx(cell.time.median)
    assert found.verify_seconds(3, 1, 544) == pytest.approx(0.013544)
    assert found.verify_seconds(6, 3, 64) == pytest.approx(0.016192)
    assert found.draft_seconds(2) == pytest.approx(0.003)


def test_what_rows_and_heads_of_a_draft_take():
    """A block of five takes 6 ms, of which its heads 1 ms, a block of one 2 ms; of four requests twice as long."""
    cells = [DraftCell(rows, *(timing(s * (1 + (rows == 4))) for s in (0.006, 0.002, 0.001))) for rows in (1, 4)]
    costs = entry(draft=cells).round_costs(5)
    assert (costs.draft, costs.row, costs.head) == pytest.approx((0.006, 0.0008, 0.0002))
    assert costs.draft - 4 * (costs.row + costs.head) == pytest.approx(0.002)
    four = entry(draft=cells).round_costs(5, rows=4)
    assert (four.draft, four.row, four.head) == pytest.approx((0.012, 0.0016, 0.0004))
    unknown = entry().round_costs(5)
    assert (unknown.row, unknown.head) == (0, 0)


def test_what_rounds_of_several_requests_take_beside_the_passes():
    """In proportion to what one takes, where that is all that is known."""
    assert entry().round_costs(5, rows=4).overhead == pytest.approx(0.004)
    found = entry(draft=[DraftCell(1, timing(0.002)), DraftCell(4, timing(0.005), overhead=timing(0.007))])
    assert [found.round_costs(5, rows=rows).overhead for rows in (1, 2, 4, 8)] == pytest.approx(
        [0.001, 0.003, 0.007, 0.014]
    )


def test_lookup_beyond_what_was_measured():
    found = entry()
    assert found.verify_seconds(1, 1, 0) == found.verify_seconds(1, 1, 64), "never below the least"
    assert found.verify_seconds(1, 1, 2048) == pytest.approx(0.013048)
    assert found.verify_seconds(40, 1, 64) == pytest.approx(0.140640)
    assert found.draft_seconds(7) == pytest.approx(0.00875)


def test_a_dip_is_levelled():
    dipped = [verify_cell(1, tokens, 0, seconds) for tokens, seconds in enumerate((0.010, 0.020, 0.016, 0.030), 1)]
    found = entry(dipped)
    found.check()
    assert found.round_costs(3).verify == pytest.approx((0.010, 0.018, 0.018, 0.030))


def test_round_costs():
    costs = entry().round_costs(num_draft_tokens=3, depth=1024)
    assert costs.verify == pytest.approx((0.012024, 0.013024, 0.014024, 0.015024))
    assert (costs.draft, costs.overhead) == pytest.approx((0.002, 0.001))
    assert costs.error == pytest.approx(0.1 / 2.56 * 1.25 / 5**0.5)


def test_round_costs_of_several_rows():
    found = entry()
    costs = found.round_costs(num_draft_tokens=3, depth=64, rows=2)
    seconds = [found.verify_seconds(2 + drafts, 2, 64) for drafts in range(2 * 3 + 1)]
    assert costs.verify == pytest.approx(seconds)
    assert costs.draft == found.draft_seconds(2) > found.draft_seconds(1)


# Refusals


def changed(place: tuple[int, int, int], time: Timing | None) -> list[VerifyCell]:
    """The grid with another time in one place, or without it."""
    cells = grid()
    at = next(i for i, cell in enumerate(cells) if (cell.rows, cell.tokens, cell.depth) == place)
    return cells[:at] + ([] if time is None else [replace(cells[at], time=time)]) + cells[at + 1 :]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"verify": changed((1, 4, 64), timing(0.005))},
            "inconsistent: verifying 4 tokens at depth 64 takes 5 ms, 1 t",
        ),
        (
            {"verify": changed((4, 16, 1024), timing(0.009))},
            "inconsistent: verifying 16 tokens in 4 rows at depth 1024",
        ),
        ({"verify": changed((1, 1, 1024), timing(0.001))}, "inconsistent: .*while the machine has nothing else to do"),
        ({"verify": [verify_cell(1, w, 0, 0.01) for w in WIDTHS]}, "flat: whatever is verified takes 10 ms"),
        ({"verify": changed((1, 2, 64), timing(0.0))}, "verifying 2 tokens at depth 64 has the times .*positive"),
        ({"verify": changed((1, 2, 64), timing(-1.0))}, "positive"),
        ({"verify": changed((1, 2, 64), timing(float("nan")))}, "positive"),
        ({"verify": changed((1, 2, 64), timing(float("inf")))}, "positive"),
        ({"verify": changed((1, 2, 64), Timing(0.01, 0.02, 0.03, 5))}, "in order"),
        ({"verify": changed((1, 2, 64), Timing(0.012, 0.012, 0.012, 0))}, "never measured"),
        ({"verify": changed((1, 1, 64), None)}, "the time of 1 tokens in 1 rows at depth 64 is missing"),
        ({"verify": changed((4, 16, 1024), None)}, "the time of 16 tokens in 4 rows at depth 1024 is missing"),
        ({"verify": [*grid(), verify_cell(1, 1, 64)]}, "twice"),
        ({"verify": [*grid(), verify_cell(4, 3, 64)]}, "3 tokens in 4 rows"),
        ({"verify": grid(rows=(2,))}, "single row"),
        ({"verify": []}, "single row"),
        ({"draft": []}, "single row"),
        ({"draft": [DraftCell(1, timing(0.0))]}, "drafting for 1 rows"),
        ({"draft": [DraftCell(1, timing(0.1), overhead=timing(-0.1))]}, "overhead"),
        ({"overhead": timing(-1.0)}, "overhead"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(fields, message):
    with pytest.raises(ValueError, match=message):
        HardwareProfile().add(entry(**fields))


def test_noise_is_no_reason_to_refuse():
    wide = Timing(0.006, 0.004, 0.02, 5)
    HardwareProfile().add(entry(changed((1, 4, 64), wide)))


# Files


def test_round_trip_with_several_devices(tmp_path):
    profile = HardwareProfile()
    others = [replace(IDENTITY, device="another"), replace(IDENTITY, device="a GPU", threads=None)]
    for identity in (IDENTITY, *others):
        profile.add(entry(identity=identity))
    file = profile.save(tmp_path / "folder")
    assert file == tmp_path / "folder" / "hardware_profile.json"
    assert HardwareProfile.load(file) == HardwareProfile.load(tmp_path / "folder") == profile
    assert HardwareProfile.from_pretrained(tmp_path / "folder") == profile
    assert [found.name for found in file.parent.iterdir()] == [file.name]


def test_an_entry_is_for_its_identity_alone():
    profile = HardwareProfile()
    profile.add(entry())
    assert profile.entry(IDENTITY) == entry()
    for name, value in vars(IDENTITY).items():
        assert profile.entry(replace(IDENTITY, **{name: f"{value}0"})) is None


def test_a_new_measurement_replaces_the_old_one():
    profile = HardwareProfile()
    other = entry(identity=replace(IDENTITY, device="another"))
    for one in (entry(), other, entry(overhead=timing(0.003))):
        profile.add(one)
    assert len(profile.entries) == 2
    assert profile.entry(IDENTITY).overhead == timing(0.003)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(schema_version=5), "schema_version is 5, this package reads up to 4"),
        (lambda content: content.pop("entries"), "lacks 'entries'"),
        (lambda content: content["entries"][0].pop("draft"), "lacks 'draft'"),
        (lambda content: content["entries"][0]["identity"].pop("threads"), "threads"),
        (lambda content: content["entries"][0]["verify"].pop(0), "missing"),
        (lambda content: content["entries"][0]["overhead"].update(median="1"), "not supported"),
        (lambda content: content["entries"].append(1), "subscriptable"),
    ],
)
def test_other_files_are_refused(tmp_path, change, message):
    profile = HardwareProfile()
    profile.add(entry())
    file = profile.save(tmp_path)
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"hardware_profile.json is not a hardware profile: .*{message}"):
        HardwareProfile.load(file)


def test_a_file_cut_short_is_refused(tmp_path):
    (tmp_path / "hardware_profile.json").write_text('{"schema_version": 1')
    with pytest.raises(ValueError, match="not a hardware profile"):
        HardwareProfile.load(tmp_path)
    with pytest.raises(OSError):
        HardwareProfile.load(tmp_path / "elsewhere")


# Estimates


def test_an_estimate_follows_from_the_public_figures_and_says_so(tmp_path):
    identity = replace(IDENTITY, device="NVIDIA H200", threads=None, dtype="bfloat16")
    found = estimate(identity, target_bytes=8_000_000_000, drafter_bytes=400_000_000, num_draft_tokens=7)
    assert found.estimated
    assert found.round_costs(7).verify[0] == pytest.approx(8e9 / 4.8e12), "bound by the memory"
    assert found.verify_seconds(8) == pytest.approx(8e9 / 4.8e12)
    profile = HardwareProfile()
    profile.add(found)
    assert json.loads(profile.save(tmp_path).read_text())["entries"][0]["estimated"] is True


def test_no_estimate_without_figures():
    assert estimate(IDENTITY, 1, 1, 7) is None
    assert estimate(replace(IDENTITY, device="NVIDIA H200"), 1, 1, 7) is None, "none for float32"
