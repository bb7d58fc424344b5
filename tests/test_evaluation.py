"""The evaluation reads prompts, compares ways of decoding side by side, and reports what it found."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial

import pytest
import torch
from conftest import prompt, scripted_drafter, tiny_drafter, tiny_target
from PIL import Image
from transformers import PreTrainedModel
from typer.testing import CliRunner

from hf_dspark import acceptance_length, trace
from hf_dspark.cli import app
from hf_dspark.evaluation import measurement, variants
from hf_dspark.evaluation.measurement import GREEDY, StepSizes, answer, evaluate, summarise
from hf_dspark.evaluation.prompts import check_text, read_prompts, read_sets
from hf_dspark.evaluation.reliability import reliability_of
from hf_dspark.evaluation.report import markdown
from hf_dspark.evaluation.variants import dflash_misfit, variants_for
from hf_dspark.scheduling.costs import RoundCosts

runner = CliRunner()


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(measurement, "reliability_of", partial(reliability_of, count=20))


@pytest.fixture
def tokenizer(tokenizer):
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


def conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# Prompts


def test_prompts_in_both_forms(tmp_path):
    file = tmp_path / "set.jsonl"
    rows = [{"messages": conversation("a")}, {"prompt": "b"}, {"prompt": "c"}]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    assert read_prompts(file) == [conversation("a"), conversation("b"), conversation("c")]
    assert read_sets([file], limit=2) == {"set": [conversation("a"), conversation("b")]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"', "line 2"),
        ('["a"]', "line 2: a row is an object"),
        ('{"text": "a"}', r"line 2: .*it has \['text'\]"),
        ('{"prompt": " "}', "line 2: .*in words"),
        ('{"messages": []}', "line 2: `messages` is a list"),
        ('{"messages": [{"role": "user", "content": null}]}', "line 2: `messages` is a list"),
        ('{"input_ids": [5, 6]}', "line 2: token ids instead of text.*says nothing about text"),
        ('{"prompt": [5, 6]}', "line 2: token ids instead of text"),
    ],
)
def test_bad_prompts_are_refused_by_line(tmp_path, line, message):
    file = tmp_path / "set.jsonl"
    file.write_text("\n" + line)
    with pytest.raises(ValueError, match=message):
        read_prompts(file)


def test_sets_of_the_same_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="same: set, set"):
        read_sets([tmp_path / "a" / "set.jsonl", tmp_path / "b" / "set.jsonl"])


ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def literate_target(tokenizer) -> PreTrainedModel:
    """A target that has learned the alphabet."""
    target = tiny_target("llama")
    ids = tokenizer(ALPHABET * 3, return_tensors="pt").input_ids
    optimizer = torch.optim.AdamW(target.parameters(), lr=1e-2)
    for _ in range(40):
        target(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return target


def test_random_tokens_are_refused_and_text_is_not(tokenizer):
    target = literate_target(tokenizer)
    check_text(target, tokenizer, {"text": [conversation(ALPHABET[3:] + ALPHABET), conversation("zzq")]})
    for seed in range(5):
        noise = tokenizer.decode(prompt(40, seed)[0])
        sets = {"text": [conversation(ALPHABET * 2)], "noise": [conversation("abc"), conversation(noise)]}
        with pytest.raises(ValueError, match=r"Prompt 2 of noise looks like random tokens.*says nothing about text"):
            check_text(target, tokenizer, sets)


# Ways of decoding


def test_variants_for_a_drafter():
    target = tiny_target("llama")
    found, reasons = variants_for(target, tiny_drafter(target))
    assert list(found) == ["plain", "drafter", "head_off", "prompt_lookup"]
    assert "already" in reasons["full_blocks"] and "anchor" in reasons["transformers_dflash"]

    drafter = tiny_drafter(target, markov_rank=0, sample_from_anchor=False, target_layer_ids=[0, 2])
    drafter.generation_config.num_assistant_tokens = 1
    found, reasons = variants_for(target, drafter)
    assert list(found) == ["plain", "drafter", "full_blocks", "prompt_lookup", "transformers_dflash"]
    assert "no sequential head" in reasons["head_off"]
    assert list(variants_for(target, drafter, baselines=False)[0]) == ["plain", "drafter", "full_blocks"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"draft_vocab_size": 12}, "draft vocabulary"),
        ({"has_lm_head": True}, "this drafter has its own"),
        ({"target_layer_ids": [-1, 2]}, "embedding output"),
        ({"target_layer_ids": [0, 3]}, "last layer"),
        ({"sample_from_anchor": True}, "anchor"),
        ({"final_logit_softcapping": 3.0}, "caps"),
        ({"input_embedding_scale": 2.0}, "scales"),
    ],
)
def test_what_transformers_dflash_cannot_run(fields, reason):
    target = tiny_target("llama")
    fields = {"sample_from_anchor": False, "target_layer_ids": [0, 2], **fields}
    assert reason in dflash_misfit(target, tiny_drafter(target, **fields))


def test_transformers_dflash_scales_the_embeddings_of_some_targets():
    target = tiny_target("gemma3_text")
    drafter = tiny_drafter(target, sample_from_anchor=False, target_layer_ids=[0, 2])
    assert "scales" in dflash_misfit(target, drafter)


def test_the_dflash_of_transformers_drafts_what_the_drafter_does_without_its_head():
    target = tiny_target("qwen3", seed=3, vocab_size=8)
    drafter = tiny_drafter(target, seed=4, sample_from_anchor=False, target_layer_ids=[0, 2])
    for parameter in drafter.parameters():
        if parameter.dim() > 1:  # else it hardly looks at the target
            torch.nn.init.normal_(parameter, std=0.3)
    arguments = {"inputs": prompt(7) % 5, "max_new_tokens": 60, "do_sample": False}

    def steps_of_transformers() -> list[int]:
        with variants.transformers_dflash(drafter) as way:
            target.generate(**arguments, **way, streamer=(streamer := StepSizes()))
        return streamer.sizes[2:]  # after the prompt, and the token that its forward pass gave

    with variants.head_off(drafter) as way, trace(drafter) as rounds:
        target.generate(**arguments, **way)
    steps = [1 + a_round.accepted for a_round in rounds]
    assert steps_of_transformers() == steps
    assert {1, 2, 3, 5} <= set(steps), "too few kinds of rounds to tell anything"
    drafter.config.target_layer_ids = [1, 2]
    assert steps_of_transformers() != steps, "the layers make no difference: this tests nothing"


def test_variants_leave_the_drafter_as_it_was():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    drafter.generation_config.num_assistant_tokens = 2
    drafter.generation_config.assistant_confidence_threshold = 0.99
    ids, arguments = prompt(5), {"max_new_tokens": 16, "do_sample": False}
    plain = target.generate(ids, **arguments)
    heads = drafter.markov_head, drafter.confidence_head
    for variant, width in ((variants.full_blocks, 5), (variants.head_off, 2)):
        with pytest.raises(KeyError), variant(drafter) as way, trace(drafter) as rounds:
            assert torch.equal(target.generate(ids, **way, **arguments), plain)
            assert len(rounds[0].draft) == width
            assert bool(rounds[0].confidence) == (variant is variants.full_blocks)
            raise KeyError
        assert (drafter.markov_head, drafter.confidence_head) == heads
        assert drafter.generation_config.num_assistant_tokens == 2
        assert drafter.generation_config.assistant_confidence_threshold == 0.99


def test_full_blocks_are_full_where_they_do_not_pay():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    drafter.round_costs = RoundCosts(draft=1.0, verify=(1.0, 9.0, 9.0, 9.0, 9.0, 9.0))
    for variant, width in ((variants.as_configured, 0), (variants.full_blocks, 5)):
        with variant(drafter) as way, trace(drafter) as rounds:
            target.generate(prompt(5), max_new_tokens=16, do_sample=False, **way)
        assert max(len(a_round.draft) for a_round in rounds) == width


# Measurement


def test_a_drafter_that_knows_the_text(tokenizer):
    target = tiny_target("llama")
    ids = tokenizer("abcdefg", return_tensors="pt").input_ids
    drafter = scripted_drafter(target, target.generate(ids, max_new_tokens=20, do_sample=False)[0])
    answers = {
        name: [
            answer(target, tokenizer, drafter, variant, conversation("abcdefg"), max_new_tokens=20, **GREEDY)
            for _ in range(3)
        ]
        for name, variant in (("plain", variants.plain), ("drafter", variants.as_configured))
    }
    found = summarise(answers, slots=5, do_sample=False)
    assert found.prompts == found.equal == 3
    rounds = [a_round for one in answers["drafter"] for a_round in one.rounds]
    assert 1.5 < found.acceptance_length == acceptance_length(rounds) <= 6
    assert found.acceptance_length == pytest.approx(3 * 19 / len(rounds))
    assert found.full_blocks.acceptance_length == found.acceptance_length
    assert found.full_blocks.conditional_acceptance[0] > 0.5
    assert found.full_blocks.confidence_overall is None and found.full_blocks.threshold_sweep == []
    assert found.variants["plain"].speedup == 1 and found.variants["plain"].acceptance_length == 1
    assert found.speedup_spread[0] <= found.speedup <= found.speedup_spread[1]


def test_steps_of_prompt_lookup_add_up(tokenizer):
    target = literate_target(tokenizer)
    drafter = tiny_drafter(target)
    found = answer(
        target, tokenizer, drafter, variants.prompt_lookup, conversation(ALPHABET * 2), max_new_tokens=30, **GREEDY
    )
    assert 30 - 6 <= sum(found.steps) <= 29  # all but what the prompt's own forward pass committed
    assert max(found.steps) > 2, "nothing was ever looked up"


def small_evaluation(tokenizer, drafter, **arguments):
    target = tiny_target("llama")
    sets = {"one": [conversation("abc"), conversation("xyzzy")], "two": [conversation("hello")]}
    return evaluate(target, tokenizer, drafter, sets, max_new_tokens=12, **arguments)


def test_evaluation_of_all_there_is(tokenizer):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, sample_from_anchor=False, target_layer_ids=[0, 2])
    drafter.generation_config.num_assistant_tokens = 1
    drafter.generation_config.assistant_confidence_threshold = 0.2
    *_, report = small_evaluation(tokenizer, drafter, target_name="T", drafter_name="D")
    assert not report.not_applicable and list(report.sets) == ["one", "two"]
    assert (report.settings.num_assistant_tokens, report.settings.assistant_confidence_threshold) == (1, 0.2)
    for prompts, results in zip((2, 1), report.sets.values()):
        assert results.greedy.equal == results.greedy.prompts == prompts and results.sample.equal is None
        for found in (results.greedy, results.sample):
            assert set(found.variants) == set(variants.VARIANTS)
            assert found.time.rounds >= found.prompts and 0 < found.time.head_share < found.time.outside_share < 1
            assert found.acceptance_length == found.variants["drafter"].acceptance_length
            assert len(found.full_blocks.conditional_acceptance) == len(found.full_blocks.confidence) == 4
            assert found.full_blocks.judged[0] == found.full_blocks.confidence[0].judged > 5
            assert len(found.full_blocks.threshold_sweep) == 20
        assert all(speed.equal == prompts for speed in results.greedy.variants.values())
    assert "at most 1 to verification, up to the first whose confidence is below 0.2" in markdown(report)


def test_sampling_is_reproducible(tokenizer):
    drafter = tiny_drafter(tiny_target("llama"))
    first, second = (next(small_evaluation(tokenizer, drafter, baselines=False, seed=3)) for _ in range(2))
    assert first.sets["one"].sample.full_blocks == second.sets["one"].sample.full_blocks


def test_a_tokenizer_without_chat_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        small_evaluation(tokenizer, tiny_drafter(tiny_target("llama")))


# Command line


@pytest.fixture
def command(tmp_path, tokenizer) -> list[str]:
    """An evaluation of a saved drafter on a set of two prompts."""
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    tiny_drafter(target, draft_vocab_size=None).save_pretrained(tmp_path / "drafter")
    prompts = tmp_path / "one.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"messages": [{"role": "user", "content": "hello"}]}\n{"prompt": "d"}\n')
    files = {"target": tmp_path / "target", "drafter": tmp_path / "drafter", "prompts": prompts}
    arguments = [argument for name, file in files.items() for argument in (f"--{name}", str(file))]
    return ["eval", *arguments, "--max-new-tokens", "8", "--dtype", "float32", "--limit", "2"]


def test_the_command_line_writes_a_report(tmp_path, command):
    result = runner.invoke(app, [*command, "--json", str(tmp_path / "a" / "b.json"), "--report", str(tmp_path / "c")])
    assert result.exit_code == 0, result.output
    assert "drafter with target" in result.output and "2/2" in result.output
    saved = json.loads((tmp_path / "a" / "b.json").read_text())
    assert saved == json.loads((tmp_path / "c" / "eval.json").read_text())
    assert saved["schema_version"] == 1
    assert (saved["target"], saved["drafter"], saved["machine"]["dtype"]) == ("target", "drafter", "float32")
    for results in saved["sets"].values():
        for decoding in ("greedy", "sample"):
            for key in ("acceptance_length", "speedup", "tokens_per_second", "plain_tokens_per_second"):
                assert isinstance(results[decoding][key], float)
    text = (tmp_path / "c" / "report.md").read_text()
    for name in ("speed", "acceptance", "reliability", "thresholds"):
        assert f"({name}.png)" in text
        with Image.open(tmp_path / "c" / f"{name}.png") as image:
            assert min(image.size) > 300
    greedy = saved["sets"]["one"]["greedy"]
    assert f"| one | 2 | greedy | {greedy['acceptance_length']:.2f} |" in text
    assert f"| {greedy['time']['outside_share']:.1%} |" in text
    assert {file.name for file in (tmp_path / "c").iterdir()} == {
        *("report.md", "eval.json"),
        *("speed.png", "acceptance.png", "reliability.png", "thresholds.png"),
    }


def test_a_set_that_was_measured_is_not_lost(tmp_path, command, monkeypatch):
    def stops_in_the_second_set(*args, **kwargs):
        if len(made) == 15:
            raise KeyboardInterrupt
        made.append(answer(*args, **kwargs))
        return made[-1]

    made: list = []  # three to warm up, and for the first set 3 ways of decoding x 2 prompts, twice
    second = tmp_path / "two.jsonl"
    second.write_text('{"prompt": "abc"}')
    monkeypatch.setattr(measurement, "answer", stops_in_the_second_set)
    command += ["--prompts", str(second), "--json", str(tmp_path / "eval.json")]
    command += ["--no-baselines", "--num-assistant-tokens", "2"]
    assert runner.invoke(app, command).exit_code != 0
    saved = json.loads((tmp_path / "eval.json").read_text())
    assert list(saved["sets"]) == ["one"] and saved["sets"]["one"]["greedy"]["prompts"] == 2


def test_a_report_of_a_drafter_without_confidence(tokenizer, tmp_path):
    from hf_dspark.evaluation.report import write_report

    drafter = tiny_drafter(tiny_target("llama"), enable_confidence_head=False)
    report = next(small_evaluation(tokenizer, drafter, baselines=False))
    json.dumps(asdict(report), allow_nan=False)
    write_report(report, tmp_path)
    assert "Confidence" not in (tmp_path / "report.md").read_text()
    assert {file.name for file in tmp_path.iterdir()} == {"report.md", "eval.json", "speed.png", "acceptance.png"}


def test_bad_requests_are_refused_at_once(tmp_path, command, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *args, **kwargs: pytest.fail())
    (tmp_path / "one.jsonl").write_text("")
    result = runner.invoke(app, command)
    assert result.exit_code == 2 and "holds no prompts" in " ".join(result.output.replace("│", "").split())
    for name in ("report", "plots"):
        monkeypatch.delitem(sys.modules, f"hf_dspark.evaluation.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = runner.invoke(app, [*command, "--report", str(tmp_path / "c")])
    assert result.exit_code == 2 and "hf-dspark[report]" in result.output


def test_settings_that_do_not_fit_the_drafter_are_refused_before_anything_is_measured(command, monkeypatch):
    monkeypatch.setattr(measurement, "answer", lambda *args, **kwargs: pytest.fail())
    for wrong, message in (
        (["--num-assistant-tokens", "9"], "drafts 0 to 5 tokens"),
        (["--dtype", "float33"], "float33 is no dtype"),
    ):
        result = runner.invoke(app, [*command, *wrong])
        assert result.exit_code == 2 and message in " ".join(result.output.replace("│", "").split())


def test_the_command_line_lists_its_commands():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(command in result.output for command in ("demo", "train", "eval"))
