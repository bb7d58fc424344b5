"""Profiles are measured, trusted while they are true, kept, and leave everything else as it was."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import prompt, tiny_drafter, tiny_target
from huggingface_hub import constants
from PIL import Image
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from hf_dspark import DSparkModel, modeling_dspark, trace
from hf_dspark.cli import app
from hf_dspark.compat import CACHE
from hf_dspark.generation import bench, decoding, profiler
from hf_dspark.generation import trace as trace_module
from hf_dspark.generation.attention import verifying_attention
from hf_dspark.generation.candidate_generator import scheduler_of
from hf_dspark.generation.draft_block import DraftBlock
from hf_dspark.generation.profiler import ensure_costs, identity_of, quick_profile, repeat, staleness
from hf_dspark.generation.trace import Seconds
from hf_dspark.scheduling.costs import RoundCosts
from hf_dspark.scheduling.hardware_aware import HardwareAware
from hf_dspark.scheduling.profile import SCHEMA_VERSION, HardwareProfile

MS = 1e-3


class Machine:
    """
    A machine on which time passes only while models run: a target's pass takes 10 ms, and 1 ms for each token and for
    each hundred tokens of context; a drafter's takes 3 ms; asking for the time takes 1 µs.
    """

    def __init__(self, monkeypatch):
        self.now, self.speed, self.passes = 0.0, 1.0, 0
        clock = SimpleNamespace(perf_counter=self.perf_counter)
        monkeypatch.setattr(trace_module, "time", clock)
        monkeypatch.setattr(profiler, "time", clock)

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def run(self, target: PreTrainedModel, drafter: DSparkModel) -> None:
        """Have these two run on it."""
        target.model.register_forward_pre_hook(self._verify, with_kwargs=True)
        drafter.layers[0].register_forward_pre_hook(self._draft)

    def _verify(self, model, args, kwargs) -> None:
        rows, width = kwargs["input_ids"].shape
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        held = 0 if cache is None else sum(getattr(cache, "lengths", [rows * cache.get_seq_length()]))
        self.passes += 1
        self.now += (10 + rows * width + held / 100) * MS / self.speed

    def _draft(self, layer, args) -> None:
        self.now += 3 * MS / self.speed


@pytest.fixture
def machine(monkeypatch, tmp_path) -> Machine:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return Machine(monkeypatch)


@pytest.fixture
def pair(machine) -> tuple[PreTrainedModel, DSparkModel]:
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    machine.run(target, drafter)
    return target, drafter


def fresh(machine: Machine, pair) -> tuple[PreTrainedModel, DSparkModel]:
    """The same two in another process."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    drafter.hardware_profile = pair[1].hardware_profile
    machine.run(target, drafter)
    return target, drafter


def cached() -> list:
    folder = profiler.Path(constants.HF_HOME) / "hf_dspark" / "profiles"
    return sorted(folder.glob("*")) if folder.exists() else []


@pytest.fixture
def warnings_logged(monkeypatch):
    messages: list[str] = []
    monkeypatch.setattr(profiler.logger, "warning", messages.append)
    return messages


# Measuring


def test_a_full_profile_measures_what_the_machine_takes(pair):
    entry = profiler.profile(*pair, [prompt(20), prompt(30, seed=1)], rows=(2,), depths=(64, 128))
    assert len(entry.verify) == 2 * (6 + 4)
    for cell in entry.verify:
        expected = (10 + cell.tokens + cell.rows * cell.depth / 100) * MS
        assert (cell.time.median, cell.time.p90) == pytest.approx((expected, expected), rel=1e-3)
        assert cell.time.count == 7, "the spread is known, nothing is gained from more"
    assert [(cell.rows, cell.time.median) for cell in entry.draft] == [
        (1, pytest.approx(3 * MS, rel=0.01)),
        (2, pytest.approx(3 * MS, rel=0.01)),
    ]
    assert 0 < entry.overhead.median < 0.1 * MS
    assert entry.overhead.count == 2 * profiler.ROUNDS
    assert entry.draft[0].overhead is None
    assert 0 < entry.draft[1].overhead.median < 0.1 * MS and entry.draft[1].overhead.count == profiler.ROUNDS


class Forgetful(Machine):
    """Takes 2 ms to find everything anew when a pass is of another kind: a draft, its verification, or one without."""

    last = ""

    def _verify(self, model, args, kwargs) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        is_plain = kwargs["input_ids"].numel() == len(getattr(cache, "lengths", [0]))  # one token a row
        self._turn_to("plain" if is_plain else "verify")
        super()._verify(model, args, kwargs)

    def _draft(self, layer, args) -> None:
        self._turn_to("draft")
        super()._draft(layer, args)

    def _turn_to(self, kind: str) -> None:
        self.now += 2 * MS * (kind != self.last)
        self.last = kind


def test_passes_are_timed_behind_what_comes_before_them_in_generation(monkeypatch):
    """Rounds without drafts follow each other; drafts follow verifications, and those drafts."""
    machine, target = Forgetful(monkeypatch), tiny_target("llama")
    drafter = tiny_drafter(target)
    machine.run(target, drafter)
    entry = profiler.profile(target, drafter, [prompt(20)], rows=(1, 2), depths=(64,))
    for cell in entry.verify:
        expected = 10 + cell.tokens + cell.rows * 0.64 + 2 * (cell.tokens > cell.rows)
        assert cell.time.median == pytest.approx(expected * MS, rel=1e-3)
    assert [cell.time.median for cell in entry.draft] == pytest.approx([5 * MS] * 2, rel=0.01)


def test_what_drafts_add_to_the_rest_of_a_round_is_counted_with_them(pair, monkeypatch):
    """Some of it they add for being there, and 0.1 ms with each token, which is the verification's."""
    rest = {0: 1.0 * MS, 1: 1.6 * MS, 5: 2.0 * MS}
    monkeypatch.setattr(profiler, "real_rounds", lambda *arguments: [Seconds(rest=rest[arguments[-1]])] * 3)
    entry = profiler.profile(*pair, [prompt(20)], rows=(1, 2), depths=(64,))
    assert entry.overhead.median == entry.draft[1].overhead.median == 1.0 * MS
    for cell in entry.draft:
        assert (cell.time.median, cell.first.median) == pytest.approx((3.5 * MS, 3.5 * MS), rel=0.01)
    for cell in entry.verify:
        expected = 10 + cell.tokens + cell.rows * 0.64 + 0.1 * (cell.tokens / cell.rows - 1)
        assert cell.time.median == pytest.approx(expected * MS, rel=1e-3)


@pytest.mark.parametrize("rows", [1, 2])
def test_hopeless_drafts_are_measured_to_their_end(pair, rows, monkeypatch):
    target, drafter = pair
    torch.nn.init.constant_(drafter.confidence_head.proj.bias, -30.0)
    slots, advance = [], DraftBlock.advance
    monkeypatch.setattr(DraftBlock, "advance", lambda block, token: (slots.append(block), advance(block, token)))
    with torch.no_grad(), verifying_attention(target):
        kind = bench.SingleBench if rows == 1 else bench.BatchBench
        kind(target, drafter, prompt(20).repeat(rows, 1)).draft(5)
    assert len(slots) == 5


def test_batches_are_measured_only_where_they_can_be_decoded(monkeypatch):
    monkeypatch.setattr(profiler.Entry, "check", lambda entry: None)  # real times on a busy machine
    for family, rows in (("gemma3_text", {1, 3}), ("lfm2", {1})):
        target = tiny_target(family)
        entry = profiler.profile(target, tiny_drafter(target), [prompt(20)], rows=(1, 3), depths=(16,), seconds=0)
        assert {cell.rows for cell in entry.verify} == rows == {cell.rows for cell in entry.draft}


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt2", "lfm2"])
def test_targets_of_other_kinds_are_measured(family, monkeypatch):
    monkeypatch.setattr(profiler.Entry, "check", lambda entry: None)  # real times on a busy machine
    target = tiny_target(family)
    entry = quick_profile(target, tiny_drafter(target))
    assert [cell.tokens for cell in entry.verify] == [1, 2, 3, 4, 5, 6]
    assert all(cell.time.median > 0 for cell in entry.verify)


@pytest.mark.parametrize(
    "fields",
    [
        {"markov_head_type": "rnn", "sample_from_anchor": False},
        {"markov_rank": 0, "enable_confidence_head": False},
        {"draft_vocab_size": 16},
    ],
)
def test_drafters_of_all_kinds_are_measured(machine, fields):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, **fields)
    machine.run(target, drafter)
    entry = quick_profile(target, drafter)
    assert entry.widest == drafter.config.num_draft_tokens + 1
    assert entry.draft_seconds() == pytest.approx(3 * MS, rel=0.01)


def test_a_depth_beyond_the_target_is_cut(pair):
    entry = profiler.profile(*pair, [prompt(20)], rows=(1,), depths=(64, 100_000))
    assert entry.depths == [64, 250]


def test_passes_are_repeated_until_their_spread_is_known(machine):
    noise = torch.Generator().manual_seed(0)
    order = []

    def work(name: str, spread: float):
        def run() -> float:
            order.append(name)
            return 1 + spread * torch.randn((), generator=noise).item()

        return run

    timings = repeat({"a": work("a", 0.1), "b": work("b", 0.001)}, fewest=5, most=500, seconds=1e9)
    assert 20 < timings["a"].count < 300
    assert timings["a"].count == timings["b"].count
    assert timings["a"].median == pytest.approx(1, abs=0.06)
    sweeps = [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert set(sweeps) == {("a", "b"), ("b", "a")}
    assert len(sweeps) == timings["a"].count + 1, "one to warm up"
    assert repeat({"a": work("a", 0.5)}, fewest=5, most=500, seconds=0.0)["a"].count == 5
    assert repeat({"a": work("a", 0.5)}, fewest=5, most=8, seconds=1e9)["a"].count == 8


def test_a_clock_that_sees_nothing_is_refused(pair):
    for module in (pair[0].model, pair[1].layers[0]):
        module._forward_pre_hooks.clear()
    with pytest.raises(ValueError, match="flat"):
        quick_profile(*pair)


# First use


def test_the_first_use_measures_and_caches(machine, pair):
    target, drafter = pair
    ensure_costs(target, drafter)
    costs = drafter.round_costs
    assert costs.verify == pytest.approx([(11.64 + drafts) * MS for drafts in range(6)], rel=1e-3)
    assert costs.draft == pytest.approx(3 * MS, rel=0.01)
    (file,) = cached()
    assert HardwareProfile.load(file).entry(identity_of(target, drafter)) is not None

    passes = machine.passes
    ensure_costs(target, drafter)
    assert machine.passes == passes, "done before"

    again = fresh(machine, pair)
    passes = machine.passes
    ensure_costs(*again)
    assert again[1].round_costs == costs
    assert machine.passes - passes < 6, "one cell is timed again"


def test_another_target_or_thread_count_is_measured_anew(machine, pair, monkeypatch):
    target, drafter = pair
    ensure_costs(target, drafter)
    drafter.round_costs = None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ensure_costs(target, drafter)
    assert drafter.round_costs is not None and len(cached()) == 2
    other = tiny_target("llama", intermediate_size=64)
    machine.run(other, tiny_drafter(other))
    machine.speed = 0.5
    ensure_costs(other, drafter)
    assert len(cached()) == 3
    assert drafter.round_costs.verify[0] == pytest.approx(2 * 11.64 * MS, rel=1e-3)


def test_costs_follow_the_depth_of_the_context(pair):
    target, drafter = pair
    drafter.hardware_profile = HardwareProfile()
    drafter.hardware_profile.add(profiler.profile(target, drafter, [prompt(20)], rows=(1,), depths=(64, 164)))
    for depth in (64, 114, 164, 200):
        ensure_costs(target, drafter, depth)
        assert drafter.round_costs.verify[0] == pytest.approx((11 + depth / 100) * MS, rel=1e-3)
    assert not cached(), "the drafter's own profile is used"


def test_a_foreign_entry_is_not_used(machine, pair):
    target, drafter = pair
    entry = quick_profile(target, drafter)
    drafter.hardware_profile = HardwareProfile()
    drafter.hardware_profile.add(replace(entry, identity=replace(entry.identity, device="another")))
    machine.speed = 2.0
    ensure_costs(target, drafter)
    assert drafter.round_costs.verify[0] == pytest.approx(11.64 / 2 * MS, rel=1e-3)


@pytest.mark.parametrize("speed", [0.4, 3.0])
def test_a_stale_entry_is_measured_anew_and_said_to_be(machine, pair, warnings_logged, speed):
    target, drafter = pair
    drafter.hardware_profile = HardwareProfile()
    drafter.hardware_profile.add(quick_profile(target, drafter))
    machine.speed = speed
    ensure_costs(target, drafter)
    assert drafter.round_costs.verify[0] == pytest.approx(11.64 / speed * MS, rel=1e-3)
    (message,) = warnings_logged
    assert "drafter's hardware profile is stale: verifying 6 tokens at depth 64 takes" in message
    assert len(cached()) == 1
    again = fresh(machine, pair)
    ensure_costs(*again)
    assert again[1].round_costs == drafter.round_costs, "from the cache"


def test_a_little_slower_is_not_stale(machine, pair):
    entry = quick_profile(*pair)
    machine.speed = 0.8
    assert staleness(entry, *pair) is None


def test_costs_set_by_hand_stay(machine, pair):
    target, drafter = pair
    drafter.round_costs = RoundCosts(1.0, (1.0,) * 6)
    ensure_costs(target, drafter)
    assert drafter.round_costs.draft == 1.0 and not machine.passes


def test_a_cache_that_cannot_be_written(pair, tmp_path):
    (tmp_path / "home").write_text("a file where a folder should be")
    ensure_costs(*pair)
    assert pair[1].round_costs is not None


def test_a_cache_that_cannot_be_read(machine, pair, warnings_logged):
    ensure_costs(*pair)
    (file,) = cached()
    file.write_text(file.read_text()[:100])
    again = fresh(machine, pair)
    ensure_costs(*again)
    assert again[1].round_costs.verify == pytest.approx(pair[1].round_costs.verify)
    assert "is not a hardware profile" in warnings_logged[0]
    assert HardwareProfile.load(file).entries, "written anew"


def test_without_a_measurement_there_are_no_costs_and_no_error(pair, warnings_logged):
    for module in (pair[0].model, pair[1].layers[0]):
        module._forward_pre_hooks.clear()
    ensure_costs(*pair)
    assert pair[1].round_costs is None and not cached()
    assert "flat" in warnings_logged[0] and "without a hardware profile" in warnings_logged[0]


def test_an_estimate_is_the_last_resort_and_said_to_be(pair, warnings_logged, monkeypatch):
    target, drafter = (model.to(torch.bfloat16) for model in pair)
    monkeypatch.setattr(profiler, "device_name", lambda device: "NVIDIA L4")
    monkeypatch.setattr(profiler, "quick_profile", lambda *pair: (_ for _ in ()).throw(RuntimeError("no memory")))
    ensure_costs(target, drafter)
    assert drafter.round_costs.verify[0] == pytest.approx(sum(p.nbytes for p in target.parameters()) / 0.3e12)
    assert "estimated from public figures" in warnings_logged[0] and "no memory" in warnings_logged[0]
    assert not cached()


def test_generate_measures_and_schedules_unless_settings_say_how_long_drafts_are(machine, monkeypatch):
    monkeypatch.setattr(decoding, "ensure_costs", ensure_costs)
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    machine.run(target, drafter)
    greedy = {"max_new_tokens": 30, "do_sample": False}
    plain = target.generate(prompt(12), **greedy)
    drafter.generation_config.num_assistant_tokens = 2
    assert torch.equal(target.generate(prompt(12), assistant_model=drafter, **greedy), plain)
    assert drafter.round_costs is None
    drafter.generation_config.num_assistant_tokens = None
    assert torch.equal(target.generate(prompt(12), assistant_model=drafter, **greedy), plain)
    assert len(drafter.round_costs.verify) == drafter.config.num_draft_tokens + 1
    assert isinstance(scheduler_of(drafter), HardwareAware)


# Nobody notices


@pytest.mark.parametrize("do_sample", [False, True])
def test_measuring_changes_nothing_for_the_generate_that_it_happens_in(machine, monkeypatch, do_sample):
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    settings = target.generation_config.to_dict(), drafter.generation_config.to_dict()
    weights = {name: tensor.clone() for name, tensor in target.state_dict().items()}

    def text() -> torch.Tensor:
        torch.manual_seed(3)
        return target.generate(prompt(12), assistant_model=drafter, max_new_tokens=40, do_sample=do_sample)

    costs = []

    def measure_only(target, drafter, depth):
        ensure_costs(target, drafter, depth)
        if drafter.round_costs is not None:  # as while rounds are measured
            costs.append(drafter.round_costs)
        drafter.round_costs = None  # the same schedule, so that the same random numbers say the same

    expected = text()
    machine.run(target, drafter)
    monkeypatch.setattr(decoding, "ensure_costs", measure_only)
    with trace(drafter) as rounds:
        assert torch.equal(text(), expected)
    assert len(costs) == 1
    assert sum(1 + a_round.accepted for a_round in rounds) == 39, "none but those of this text"
    assert settings == (target.generation_config.to_dict(), drafter.generation_config.to_dict())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in target.state_dict().items())
    assert not any(layer._forward_hooks for layer in target.model.layers)


def test_measuring_leaves_a_running_cache_alone(pair):
    target, drafter = pair
    ids = prompt(12)
    out = target.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    cache = out[CACHE]
    before = cache.get_seq_length(), cache.layers[0].keys.clone()
    ensure_costs(target, drafter)
    assert before[0] == cache.get_seq_length() and torch.equal(before[1], cache.layers[0].keys)


def test_a_drafter_that_ends_early_is_measured_all_the_same(machine):
    target = tiny_target("llama")
    target.generation_config.eos_token_id = list(range(40))
    drafter = tiny_drafter(target)
    machine.run(target, drafter)
    assert quick_profile(target, drafter).overhead.count == profiler.QUICK_ROUNDS
    assert target.generation_config.eos_token_id == list(range(40))


def test_first_uses_in_several_threads(pair, monkeypatch):
    measured = []
    monkeypatch.setattr(profiler, "quick_profile", lambda *pair: measured.append(quick_profile(*pair)) or measured[-1])
    threads = [threading.Thread(target=ensure_costs, args=pair) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pair[1].round_costs is not None and len(measured) == 1


# With the drafter


def test_a_profile_travels_with_its_drafter(machine, pair, tmp_path):
    target, drafter = pair
    drafter.hardware_profile = HardwareProfile()
    drafter.hardware_profile.add(quick_profile(target, drafter))
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    loaded = DSparkModel.from_pretrained(tmp_path / "drafter", dtype=torch.float32)
    assert loaded.hardware_profile == drafter.hardware_profile
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    assert identity_of(target, loaded) == identity_of(*pair)
    machine.run(target, loaded)
    ensure_costs(target, loaded)
    assert loaded.round_costs == drafter.hardware_profile.entries[0].round_costs(5)
    assert not cached()


def test_a_drafter_without_profile_and_one_with_a_broken_one(pair, tmp_path, monkeypatch):
    messages: list[str] = []
    monkeypatch.setattr(modeling_dspark.logger, "warning", messages.append)
    pair[1].save_pretrained(tmp_path)
    assert DSparkModel.from_pretrained(tmp_path).hardware_profile is None and not messages
    (tmp_path / "hardware_profile.json").write_text("{")
    assert DSparkModel.from_pretrained(tmp_path).hardware_profile is None
    assert "is not a hardware profile" in messages[0]


def test_other_sizes_have_other_identities(pair):
    target, drafter = pair
    ours = identity_of(target, drafter)
    assert identity_of(tiny_target("llama", seed=1), tiny_drafter(target, seed=2)) == ours, "weights take no time"
    assert identity_of(tiny_target("llama", intermediate_size=64), drafter).target != ours.target
    assert identity_of(target, tiny_drafter(target, block_size=4)).drafter != ours.drafter
    assert identity_of(target.to(torch.bfloat16), drafter).dtype == "bfloat16 with float32"


# Command line


def test_the_command_line(machine, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.Bench, "_seconds", virtual_seconds)
    monkeypatch.setattr(profiler, "FULL_SWEEPS", (2, 2))
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    command = ["profile", "--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    command += ["--dtype", "float32"]
    result = CliRunner().invoke(app, [*command, "--plot", str(tmp_path / "plot.png")])
    assert result.exit_code == 0, result.output
    assert "verify" in result.output and "overhead" in result.output
    content = json.loads((tmp_path / "drafter" / "hardware_profile.json").read_text())
    (entry,) = content["entries"]
    assert content["schema_version"] == SCHEMA_VERSION and entry["identity"]["dtype"] == "float32"
    assert {(cell["rows"], cell["depth"]) for cell in entry["verify"]} == {
        (r, d) for r in (1, 2, 4) for d in (64, 250)
    }
    with Image.open(tmp_path / "plot.png") as image:
        assert min(image.size) > 300
    loaded = DSparkModel.from_pretrained(tmp_path / "drafter", dtype=torch.float32)
    assert loaded.hardware_profile.entry(identity_of(target, loaded)) is not None

    elsewhere = tmp_path / "new" / "own.json"
    assert CliRunner().invoke(app, [*command, "--output", str(elsewhere), "--rows", "3"]).exit_code == 0
    (entry,) = HardwareProfile.load(elsewhere).entries
    assert {cell.rows for cell in entry.verify} == {1, 3}
    elsewhere.write_text("{")
    result = CliRunner().invoke(app, [*command, "--output", str(elsewhere)])
    assert result.exit_code != 0 and elsewhere.read_text() == "{"


def virtual_seconds(bench, work) -> float:
    """Runs the pass; takes time as a function of what it works on."""
    work()
    return (10 + bench.tokens.numel() / 100 + bench.cache.get_seq_length() * bench.tokens.shape[0] / 50) * MS


def test_a_dtype_that_is_none_is_refused():
    result = CliRunner().invoke(app, ["profile", "--target", "nowhere", "--dtype", "float31"])
    assert result.exit_code != 0 and "float31" in result.output
