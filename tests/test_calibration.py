"""Calibrations: what they do to confidences, whether fits find what is there, and whether only what helps is used."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import prompt, tiny_drafter, tiny_target
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hf_dspark import DSparkModel, HardwareProfile, Round, trace
from hf_dspark.cli import app
from hf_dspark.evaluation import calibrator, variants
from hf_dspark.evaluation.acceptance import judged
from hf_dspark.evaluation.calibrator import choose, gain, held_out, rows_of
from hf_dspark.generation.candidate_generator import scheduler_of
from hf_dspark.generation.choice import top_2_margin
from hf_dspark.scheduling.calibration import (
    TEMPERATURES,
    Calibration,
    Rows,
    fit,
    read_temperatures,
    sigmoid,
    survival_errors,
    write_temperatures,
)
from hf_dspark.scheduling.profile import Acceptance
from hf_dspark.scheduling.schedulers import ConfidenceThreshold

temperatures = st.lists(st.floats(0.05, 20), min_size=1, max_size=8).map(tuple)
logits = st.floats(-30, 30, allow_subnormal=False)  # half of the least subnormal number is 0, which has no side


# What a calibration does


@given(temperatures, logits, logits)
def test_a_temperature_keeps_the_order_and_the_side(temperatures, one, other):
    calibration = Calibration.of_temperatures(temperatures)
    low, high = sorted((one, other))
    for slot, temperature in enumerate(temperatures):
        assert calibration(slot, low) <= calibration(slot, high)
        assert calibration(slot, one) == pytest.approx(one / temperature)
        assert np.sign(calibration(slot, one)) == np.sign(one)
    assert calibration.temperatures == pytest.approx(temperatures)


@given(st.integers(1, 8), logits)
def test_the_head_as_it_is(slots, logit):
    identity = Calibration.identity(slots)
    assert all(identity(slot, logit) == logit for slot in range(slots))
    assert identity.temperatures == (1,) * slots
    assert identity.reads_logit and not identity.reads_margin


@given(st.lists(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), min_size=1, max_size=5))
def test_margin_of_the_two_largest(rows):
    expected = [sorted(row)[-1] - sorted(row)[-2] for row in rows]
    assert top_2_margin(torch.tensor(rows)).tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("logistic", (0.0,), (1.0,), (0.0,)), "one of head, temperature"),
        (("both", (0.0, 0.0), (1.0,), (0.0,)), "as many"),
        (("both", (float("nan"),), (1.0,), (0.0,)), "finite"),
        (("temperature", (0.0,), (-1.0,), (0.0,)), "positive"),
    ],
)
def test_what_is_no_calibration_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Calibration(*fields)


# Fits


def simulate(truth, rounds: int = 6000, slots: int = 3, prompts: int = 40, seed: int = 0, useful_margin=True) -> Rows:
    """Rounds whose tokens are accepted with probability σ(truth(slot, logit, margin))."""
    rng = np.random.default_rng(seed)
    logit = rng.normal(1, 2, (rounds, slots))
    margin = rng.exponential(2, (rounds, slots))
    chance = sigmoid(np.stack([truth(k, logit[:, k], margin[:, k]) for k in range(slots)], axis=1))
    accepted = (rng.random((rounds, slots)) < chance).astype(float)
    rejected_before = (accepted == 0).cumsum(axis=1) - (accepted == 0) > 0
    accepted[rejected_before] = np.nan
    return Rows(logit, margin, accepted, rng.integers(prompts, size=rounds))


def test_temperatures_are_found_left_to_right():
    true = (2.0, 0.5, 1.5)
    found = fit("temperature", simulate(Calibration.of_temperatures(true), rounds=40000))
    step = TEMPERATURES[1] / TEMPERATURES[0]
    for temperature, expected in zip(found.temperatures, true):
        assert expected / step**3 < temperature < expected * step**3


@pytest.mark.parametrize("method", ["logit", "margin", "both"])
def test_regressions_are_found(method):
    weights = {"logit": (0.6, 0.0), "margin": (0.0, 0.9), "both": (0.4, 0.7)}[method]
    true = Calibration(method, (-0.5, 0.2, -1.0), (weights[0],) * 3, (weights[1],) * 3)
    found = fit(method, simulate(true, rounds=20000))
    for name in ("bias", "logit_weight", "margin_weight"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), abs=0.15)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["temperature", "logit", "margin", "both"]), st.integers(1, 30), st.integers(0, 1000), logits)
def test_few_rounds_and_sure_ones_do_not_break_a_fit(method, rounds, seed, level):
    """Positions that nothing reached, or where everything was accepted or rejected."""
    rows = simulate(lambda k, logit, margin: np.full_like(logit, level), rounds, seed=seed)
    found = fit(method, rows)
    assert found.num_draft_tokens == 3
    assert np.isfinite(rows.confidence(found)).all()


def test_a_position_without_rounds_takes_after_the_one_before():
    rows = simulate(lambda k, logit, margin: margin - 1)
    rows.accepted[:, 2] = np.nan
    found = fit("margin", rows)
    assert found.margin_weight[2] == pytest.approx(found.margin_weight[1])
    assert found.bias[2] == pytest.approx(found.bias[1])


def test_survival_knows_what_a_rejection_means_for_later_tokens():
    accepted = np.array([[1, 0, np.nan], [1, 1, 1], [1, np.nan, np.nan]])  # the last one: the text ended
    rows = Rows(np.zeros((3, 3)), np.zeros((3, 3)), accepted, np.arange(3))
    np.testing.assert_array_equal(rows.survived, [[1, 0, 0], [1, 1, 1], [1, np.nan, np.nan]])
    assert survival_errors(np.full((3, 3), 1.0), rows.survived) == pytest.approx([0, 0.5, 0.5])


# What is used


def rounds_of(rows: Rows) -> list[list[Round]]:
    """The same rounds as a trace gives them, by prompt."""
    by_prompt: list[list[Round]] = [[] for _ in range(rows.prompt.max() + 1)]
    for logit, margin, accepted, number in zip(rows.logit, rows.margin, rows.accepted, rows.prompt):
        count = int(np.nansum(accepted))
        draft = [5] * len(logit)
        by_prompt[number].append(Round(draft, sigmoid(logit).tolist(), count, False, logit=[*logit], margin=[*margin]))
    return by_prompt


TRUTHS = {
    "head": lambda k, logit, margin: logit,
    "temperature": lambda k, logit, margin: logit / (2.5, 3, 2)[k],
    "logit": lambda k, logit, margin: logit - 2.5,
    "margin": lambda k, logit, margin: 1.5 * margin - 2,
    "both": lambda k, logit, margin: 0.7 * logit + margin - 2,
}


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(calibrator, "RESAMPLES", 100)
    monkeypatch.setattr(calibrator, "reliability", lambda *args: _reliability(*args, count=20))


_reliability = calibrator.reliability


@pytest.mark.parametrize("truth", TRUTHS)
def test_what_is_true_is_chosen_and_what_is_useless_is_not(truth):
    choice = choose(rounds_of(simulate(TRUTHS[truth], rounds=3000, seed=3)), 3, {})
    assert choice.chosen == truth
    assert (choice.calibration is None) == (truth == "head")
    assert list(choice.candidates) == ["head", "temperature", "logit", "margin", "both"]
    best = choice.candidates[truth]
    assert best.overall.log_loss.value <= min(c.overall.log_loss.value for c in choice.candidates.values()) + 0.003
    assert (best.gain.interval[0] > 0) == (truth != "head")


def test_without_head_the_margin_has_to_beat_past_acceptance():
    def hide_head(rows: Rows) -> list[list[Round]]:
        by_prompt = rounds_of(rows)
        for rounds in by_prompt:
            for a_round in rounds:
                a_round.logit = []
        return by_prompt

    useful = choose(hide_head(simulate(TRUTHS["margin"], rounds=2000)), 3, {})
    assert (useful.chosen, useful.calibration.method, useful.temperatures) == ("margin", "margin", None)
    useless = choose(hide_head(simulate(lambda k, logit, margin: logit * 0 + (1.0, 0.2, -0.5)[k], rounds=2000)), 3, {})
    assert (useless.chosen, useless.calibration) == ("mean", None)
    assert useless.candidates["mean"].overall.ece.value < 0.03


def test_one_prompt_that_is_special_proves_nothing():
    """All that there is to learn lies in one prompt: over prompts that is noise, however many its rounds are."""
    rows = simulate(TRUTHS["head"], rounds=400, prompts=4)
    strange = rows.prompt == 1
    rows.accepted[strange] = np.where(np.isnan(rows.accepted[strange]), np.nan, rows.margin[strange] > 1.5)
    before, after = (held_out(method, rows) for method in ("head", "both"))
    assert gain(rows, before, after).interval[0] < 0


def test_rows_are_whole_blocks_and_their_judged_tokens():
    known = {"logit": [1.0, 2.0, 3.0], "margin": [4.0, 5.0, 6.0]}
    rounds = [
        [Round([1, 2, 3], [0.5] * 3, 1, **known), Round([1, 2], [0.5] * 2, 1, logit=[1.0, 2.0], margin=[4.0, 5.0])],
        [Round([1, 2, 3], [0.5] * 3, 1, True, **known)],
    ]
    rows = rows_of(rounds, 3)
    np.testing.assert_array_equal(rows.accepted, [[1, 0, np.nan], [1, 1, np.nan]])
    assert judged(rounds[1][0]) == [True, True]
    assert rows.prompt.tolist() == [0, 1]
    assert rows.margin[0].tolist() == known["margin"] and rows.logit[1].tolist() == known["logit"]


# Files


def test_temperature_files_of_other_engines(tmp_path):
    file = tmp_path / "sts.json"
    calibration = Calibration.of_temperatures((2.0, 0.5))
    write_temperatures(file, calibration, "prompts", 1000, [0.1, 0.2], [0.05, 0.1])
    assert json.loads(file.read_text()) == {
        "temperatures": [2.0, 0.5],
        "dataset": "prompts",
        "num_samples": 1000,
        "ece_before": [0.1, 0.2],
        "ece_after": [0.05, 0.1],
    }
    assert read_temperatures(file, 2) == calibration
    file.write_text('{"sts_temperatures": [2.0, 0.5], "max_draft_len": 2}')
    assert read_temperatures(file, 2) == calibration
    with pytest.raises(ValueError, match="2 temperatures, this drafter drafts 5 tokens"):
        read_temperatures(file, 5)
    for content, message in (
        ('{"temperatures": [1.0, 0.0]}', "positive"),
        ('{"temperatures": ["a"]}', "could not convert"),
        ('{"T": [1.0]}', "lacks"),
        ("[1.0]", "not a temperature file"),
        ("{", "not a temperature file"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_temperatures(file, 2)
    with pytest.raises(ValueError, match="both has no temperatures"):
        write_temperatures(file, Calibration.identity(2, "both"))


CALIBRATION = Calibration("both", (0.1,) * 5, (0.5,) * 5, (0.3, 0.2, 0.1, 0.1, 0.1))
ACCEPTANCE = Acceptance(2.0, (0.5, None), (0.5, None), 10, {"prompts": "a set", "max_new_tokens": 64})


def test_a_profile_carries_the_calibration(tmp_path):
    profile = HardwareProfile(calibration={"sample": CALIBRATION}, acceptance={"sample": ACCEPTANCE})
    assert HardwareProfile.load(profile.save(tmp_path)) == profile

    drafter = tiny_drafter(tiny_target("llama"))
    drafter.hardware_profile = profile
    drafter.save_pretrained(tmp_path / "drafter")
    loaded = DSparkModel.from_pretrained(tmp_path / "drafter")
    assert loaded.calibration(True) == CALIBRATION
    assert loaded.calibration(False) == Calibration.identity(5), "greedy was not calibrated"


def test_profiles_of_version_1_are_read(tmp_path):
    file = tmp_path / "hardware_profile.json"
    file.write_text('{"schema_version": 1, "entries": []}')
    assert HardwareProfile.load(file) == HardwareProfile()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("calibration"), "lacks 'calibration'"),
        (lambda content: content["calibration"].update(beam={}), "for beam"),
        (lambda content: content["calibration"]["sample"].update(method="guess"), "guess"),
        (lambda content: content["calibration"]["sample"].update(bias=[0.0]), "as many"),
        (lambda content: content["acceptance"]["sample"].pop("rounds"), "rounds"),
    ],
)
def test_broken_calibrations_are_refused(tmp_path, change, message):
    profile = HardwareProfile(calibration={"sample": CALIBRATION}, acceptance={"sample": ACCEPTANCE})
    file = profile.save(tmp_path)
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        HardwareProfile.load(file)


def test_the_calibration_of_another_drafter_is_refused(tmp_path, monkeypatch):
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    drafter.hardware_profile = HardwareProfile(calibration={"greedy": Calibration.identity(3, "both")})
    with pytest.raises(ValueError, match=r"\(greedy\) has 3 positions, the drafter drafts 5"):
        target.generate(prompt(5), assistant_model=drafter, max_new_tokens=4, do_sample=False)
    drafter.save_pretrained(tmp_path)
    messages: list[str] = []
    monkeypatch.setattr("hf_dspark.modeling_dspark.logger.warning", messages.append)
    assert DSparkModel.from_pretrained(tmp_path).hardware_profile is None
    assert "belongs to another one" in messages[0]


# In generation


def test_confidences_are_the_calibrated_ones():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    arguments = {"inputs": prompt(5), "max_new_tokens": 30, "do_sample": False}
    plain = target.generate(**arguments)
    with trace(drafter) as before:
        target.generate(**arguments, assistant_model=drafter)
    drafter.hardware_profile = HardwareProfile(calibration={"greedy": CALIBRATION})
    with trace(drafter) as after:
        assert torch.equal(target.generate(**arguments, assistant_model=drafter), plain)
    for one, other in zip(before, after, strict=True):
        assert one.draft == other.draft and not one.logit and not one.margin
        assert sigmoid(np.array(other.logit)) == pytest.approx(one.confidence, abs=1e-6)
        expected = [CALIBRATION(k, *known) for k, known in enumerate(zip(other.logit, other.margin))]
        assert other.confidence == pytest.approx(sigmoid(np.array(expected)), abs=1e-6)
        assert len(other.margin) == len(other.draft) and min(other.margin, default=1) > 0


def test_the_margin_is_that_of_the_distribution_drafts_are_drawn_from():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    drafter.hardware_profile = HardwareProfile(calibration={"sample": CALIBRATION})
    scores = []
    from hf_dspark.generation.candidate_generator import DSparkCandidateGenerator

    class Recorder(DSparkCandidateGenerator):
        def get_candidates(self, input_ids, **kwargs):
            found = super().get_candidates(input_ids, **kwargs)
            scores.append(found[1])
            return found

    with pytest.MonkeyPatch.context() as patch, trace(drafter) as rounds:
        patch.setattr("hf_dspark.generation.decoding.DSparkCandidateGenerator", Recorder)
        target.generate(prompt(5), assistant_model=drafter, max_new_tokens=20, do_sample=True, top_k=0)
    for a_round, found in zip(rounds, scores):
        if found is not None:
            assert a_round.margin == pytest.approx(top_2_margin(found[0]).tolist(), abs=1e-5)


def test_a_drafter_without_head_gets_confidences_from_the_margin():
    target = tiny_target("llama")
    drafter = tiny_drafter(target, enable_confidence_head=False)
    drafter.generation_config.assistant_confidence_threshold = 0.5
    with pytest.raises(ValueError, match="hf-dspark calibrate"):
        scheduler_of(drafter)
    by_margin = Calibration("margin", (-0.5,) * 5, (0.0,) * 5, (3.0,) * 5)
    drafter.hardware_profile = HardwareProfile(calibration={"greedy": by_margin})
    assert scheduler_of(drafter) == ConfidenceThreshold(0.5, 5)
    arguments = {"inputs": prompt(5), "max_new_tokens": 40, "do_sample": False}
    with trace(drafter) as rounds:
        assert torch.equal(target.generate(**arguments, assistant_model=drafter), target.generate(**arguments))
    assert len({len(a_round.draft) for a_round in rounds}) > 1
    assert all(3 * margin > 0.5 for a_round in rounds for margin in a_round.margin), "what is below ends the draft"
    drafter.hardware_profile = HardwareProfile(calibration={"greedy": CALIBRATION})
    assert drafter.calibration(False) is None, "it reads a head that is not there"


def test_no_logits_are_worked_out_that_nobody_needs():
    """The sequential head's row of a slot that is not drafted is needed for its margin alone."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    drafter.generation_config.assistant_confidence_threshold = 0.999999
    rows: list[int] = []
    drafter.markov_head.markov_w2.register_forward_hook(lambda *args: rows.append(1))
    arguments = {"inputs": prompt(5), "max_new_tokens": 8, "do_sample": False, "assistant_model": drafter}
    target.generate(**arguments)
    assert not rows
    drafter.hardware_profile = HardwareProfile(calibration={"greedy": CALIBRATION})
    target.generate(**arguments)
    assert rows


def test_variants_around_a_calibration():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    drafter.hardware_profile = profile = HardwareProfile(calibration={"greedy": CALIBRATION, "sample": CALIBRATION})
    arguments = {"inputs": prompt(5), "max_new_tokens": 16, "do_sample": False}
    for variant, has_confidence in ((variants.uncalibrated, True), (variants.head_off, False)):
        with variant(drafter) as way, trace(drafter) as rounds:
            target.generate(**arguments, **way)
        assert all(len(one.confidence) == len(one.draft) * has_confidence for one in rounds)
        if has_confidence:
            logits = np.array(rounds[0].logit)
            assert rounds[0].confidence == pytest.approx(sigmoid(logits), abs=1e-6)
            assert len(rounds[0].margin) == 5
        assert drafter.hardware_profile is profile


# Command line


@pytest.fixture
def command(tmp_path, tokenizer) -> list[str]:
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    (tmp_path / "some.jsonl").write_text("".join(f'{{"prompt": "abc{c}"}}\n' for c in "defghi"))
    arguments = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    return ["calibrate", *arguments, "--prompts", str(tmp_path / "some.jsonl"), "--dtype", "float32"]


def test_the_command_line_calibrates(tmp_path, command):
    old = HardwareProfile(calibration={"greedy": CALIBRATION})
    old.save(tmp_path / "drafter")
    out = ["--json", str(tmp_path / "out.json"), "--temperatures", str(tmp_path / "sts")]
    result = CliRunner().invoke(app, [*command, "--max-new-tokens", "24", "--limit", "5", *out])
    assert result.exit_code == 0, result.output
    assert "drafter with target" in result.output and "used" in result.output
    profile = HardwareProfile.load(tmp_path / "drafter")
    found = json.loads((tmp_path / "out.json").read_text())
    for regime in ("greedy", "sample"):
        acceptance = profile.acceptance[regime]
        assert acceptance.conditions["num_prompts"] == 5 and acceptance.conditions["prompts"] == "some"
        assert not any(str(tmp_path) in str(value) for value in acceptance.conditions.values())
        assert 1 <= acceptance.acceptance_length <= 6 and len(acceptance.marginal_acceptance) == 5
        assert acceptance.conditional_acceptance[0] == acceptance.marginal_acceptance[0]
        chosen = found[regime]["chosen"]
        calibration = profile.calibration.get(regime)
        assert (calibration.method if calibration else "head") == chosen
        assert read_temperatures(tmp_path / "sts" / f"{regime}.json", 5).method == "temperature"
        assert set(found[regime]["candidates"]) == {"head", "temperature", "logit", "margin", "both"}
    assert {file.name for file in tmp_path.iterdir()} == {"target", "drafter", "some.jsonl", "out.json", "sts"}


def test_bad_requests_are_refused(tmp_path, command):
    for wrong, message in (
        (["--limit", "3"], "3 prompts are too few"),
        (["--prompts", str(tmp_path / "none.jsonl")], "No such file"),
        (["--max-new-tokens", "2"], "No block of 5 tokens was drafted"),
    ):
        result = CliRunner().invoke(app, [*command, *wrong])
        assert result.exit_code == 2 and message in " ".join(result.output.replace("│", "").split())
    assert not (tmp_path / "drafter" / "hardware_profile.json").exists()


def test_a_report_shows_confidences_before_and_after(tokenizer, tmp_path):
    from hf_dspark.evaluation.measurement import evaluate
    from hf_dspark.evaluation.plots import reliability
    from hf_dspark.evaluation.report import markdown

    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    drafter.hardware_profile = HardwareProfile(calibration={"greedy": CALIBRATION})
    sets = {"one": [[{"role": "user", "content": text}] for text in ("abc", "xyz")]}
    report = next(evaluate(target, tokenizer, drafter, sets, max_new_tokens=12, baselines=False))
    greedy, sample = report.sets["one"].greedy.full_blocks, report.sets["one"].sample.full_blocks
    assert len(greedy.confidence_before) == 5 and sample.confidence_before == []
    assert greedy.confidence_before[0].bins != greedy.confidence[0].bins
    assert "the head, before calibration" in markdown(report)
    labels = [text.get_text() for text in reliability(report).legends[0].get_texts()]
    assert labels == ["greedy, before calibration", "greedy", "temperature 1"]
