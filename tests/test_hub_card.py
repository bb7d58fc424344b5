"""Model cards: what they say comes from the records, and what a user wrote stays."""

from __future__ import annotations

import json

import pytest
from conftest import tiny_drafter, tiny_target
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from hf_dspark import DSparkModel, hub
from hf_dspark.cli import app

GREEDY = {
    "prompts": 80,
    "acceptance_length": 3.512,
    "tokens_per_second": 20.04,
    "plain_tokens_per_second": 10.0,
    "speedup": 2.004,
    "acceptance_by_position": [0.8, 0.7],
}
REPORT = {
    "schema_version": 1,
    "target": "/home/somebody/models/target",
    "drafter": "/home/somebody/runs/drafter",
    "machine": {"device": "cpu", "threads": 2, "dtype": "bfloat16", "torch": "2.13.0", "transformers": "5.24.0"},
    "settings": {"max_new_tokens": 256, "prompts": ["/home/somebody/prompts/gsm8k.jsonl"]},
    "sets": {
        "gsm8k": {"greedy": GREEDY, "sample": {"prompts": 80, "acceptance_length": 3.0}},
        "mt-bench": {"sample": {**GREEDY, "speedup": float("nan"), "acceptance_length": 2.5}},
    },
}
TRAINING = {
    "target": "/home/somebody/models/target",
    "tokens": 1234567,
    "steps": 800,
    "learning_rate": 1e-3,
    "command": "hf-dspark train --target /home/somebody/models/target --output=~/runs/a --data https://a.org/b/c",
    "curve": [{"step": k, "tokens": 1000 * k, "acceptance_length": 1 + k / 100} for k in range(1, 101)],
}


@pytest.fixture
def drafter():
    return tiny_drafter(tiny_target("llama"), base_model="org/target")


@pytest.fixture
def report(tmp_path):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(REPORT))
    return file


def card_of(folder) -> ModelCard:
    return ModelCard.load(folder / "README.md")


def table(card: ModelCard, header: str) -> list[list[str]]:
    """The rows of the table whose first row starts with these cells."""
    lines = card.text[card.text.index(f"| {header}") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_report_and_the_training_are_in_the_card(drafter, report, tmp_path):
    folder = tmp_path / "my-drafter"
    folder.mkdir()
    (folder / "training.json").write_text(json.dumps(TRAINING))
    drafter.save_pretrained(folder, report=report, license="apache-2.0")
    card = card_of(folder)

    data = card.data
    assert (data.base_model, data.library_name, data.pipeline_tag) == ("org/target", "hf_dspark", "text-generation")
    assert data.license == "apache-2.0"
    assert {"dspark", "speculative-decoding"} <= set(data.tags)
    assert data.model_name == "my-drafter"
    assert {(r.dataset_name, r.metric_name, r.metric_value) for r in data.eval_results} == {
        ("gsm8k", "acceptance length, greedy", 3.512),
        ("gsm8k", "speedup, greedy", 2.004),
        ("gsm8k", "acceptance length, sampled", 3.0),
        ("mt-bench", "acceptance length, sampled", 2.5),
    }
    assert table(card, "set ") == [
        ["gsm8k", "greedy", "80", "3.51", "20.0", "10.0", "2.00"],
        ["gsm8k", "sampled", "80", "3.00", "–", "–", "–"],
        ["mt-bench", "sampled", "80", "2.50", "20.0", "10.0", "–"],
    ]
    assert "max new tokens 256, prompts gsm8k.jsonl, device cpu, threads 2, dtype bfloat16" in card.text

    curve = table(card, "step ")
    assert len(curve) <= 20
    assert curve[-1] == ["100", "100,000", "2.00"]
    assert "| tokens | 1,234,567 |" in card.text and "| learning rate | 0.001 |" in card.text
    assert "hf-dspark train --target target --output=a --data https://a.org/b/c\n" in card.text
    parameters = sum(tensor.numel() for tensor in drafter.state_dict().values())
    assert f"| parameters | {parameters:,} |" in card.text


def test_no_path_of_this_machine_leaves_it(drafter, report, tmp_path):
    (tmp_path / "training.json").write_text(json.dumps(TRAINING))
    drafter.save_pretrained(tmp_path, report=report)
    for file in ("README.md", "config.json", "generation_config.json", "eval.json"):
        assert "somebody" not in (tmp_path / file).read_text(), file
        assert str(tmp_path) not in (tmp_path / file).read_text(), file


def test_without_records_the_card_speaks_of_the_drafter_alone(tmp_path):
    tiny_drafter(tiny_target("llama")).save_pretrained(tmp_path)
    card = card_of(tmp_path)
    assert card.data.base_model is None and card.data.license is None and card.data.eval_results is None
    assert "Measured" not in card.text and "How it was made" not in card.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": 2}, "schema_version is 2"),
        ({"schema_version": None}, "schema_version is None"),
        ({"sets": None}, "NoneType"),
        ({"sets": {}}, "no set"),
        ({"sets": {"gsm8k": {"warm": GREEDY}}}, "no set"),
        ({"sets": {"gsm8k": 3}}, "int"),
        ({"sets": {"gsm8k": {"greedy": {"prompts": 80}}}}, "acceptance_length"),
        ({"sets": {"gsm8k": {"greedy": {"acceptance_length": "high"}}}}, "'high'"),
    ],
)
def test_a_file_that_is_no_report_is_refused_before_anything_is_written(drafter, report, tmp_path, change, reason):
    report.write_text(json.dumps({**REPORT, **change}))
    with pytest.raises(ValueError, match=rf"report\.json is not a report of `hf-dspark eval --json`.*{reason}"):
        drafter.save_pretrained(tmp_path / "drafter", report=report)
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize("content", ["", "acceptance 3.5", "[1, 2]", b"\xff\xfe"])
def test_a_file_that_is_no_json_object_is_refused(drafter, report, tmp_path, content):
    report.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"report\.json"):
        drafter.save_pretrained(tmp_path / "drafter", report=report)


def test_a_broken_training_record_costs_the_card_and_not_the_weights(drafter, tmp_path):
    (tmp_path / "training.json").write_text("{")
    with pytest.raises(ValueError, match=r"training\.json"):
        drafter.save_pretrained(tmp_path)
    DSparkModel.from_pretrained(tmp_path)


def test_a_card_that_was_edited_stays(drafter, report, tmp_path):
    drafter.save_pretrained(tmp_path, license="mit")
    drafter.save_pretrained(tmp_path, report=report)
    assert card_of(tmp_path).data.eval_results, "the card of before was this package's own"
    assert card_of(tmp_path).data.license == "mit", "what it said stays"
    drafter.config.base_model = "org/other"
    drafter.save_pretrained(tmp_path, report=report)
    assert card_of(tmp_path).data.base_model == "org/other"
    edited = (tmp_path / "README.md").read_text().replace("# A DSpark drafter", "# My drafter")
    (tmp_path / "README.md").write_text(edited)
    drafter.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == edited
    (tmp_path / "README.md").write_text("Mine.")
    drafter.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "Mine."


def test_a_report_on_other_weights_is_set_aside(drafter, report, tmp_path):
    drafter.save_pretrained(tmp_path, report=report)
    drafter.norm.weight.data.add_(1)
    drafter.save_pretrained(tmp_path)
    assert card_of(tmp_path).data.eval_results is None
    assert not (tmp_path / "eval.json").exists() and (tmp_path / "eval.previous.json").exists()


def test_saving_works_without_jinja(drafter, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "is_jinja_available", lambda: False)
    drafter.save_pretrained(tmp_path)
    assert not (tmp_path / "README.md").exists()
    DSparkModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["/home/somebody/target", "./target", "C:\\models\\target", "a/b/c"])
def test_a_base_model_is_a_repository(name):
    with pytest.raises(Exception, match="`base_model` is the target's repository"):
        tiny_drafter(tiny_target("llama"), base_model=name)


def test_where_a_target_came_from(tmp_path, monkeypatch):
    target = tiny_target("llama")
    assert hub.repository_of(target) is None
    target.name_or_path = str(tmp_path)
    assert hub.repository_of(target) is None
    target.name_or_path = "org/target"
    assert hub.repository_of(target) == "org/target"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "target").mkdir(parents=True)
    assert hub.repository_of(target) is None, "a folder of that name"


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, "deepspec"),
        ({"sample_from_anchor": False}, "deepspec"),
        ({"causal_in_block": True}, "deepspec"),
        ({"draft_vocab_size": 10}, "speculators"),
        ({"draft_vocab_size": 10, "has_lm_head": True, "attention_bias": True}, "speculators"),
    ],
    ids=str,
)
def test_other_engines_are_told_of_an_export_that_can_be_made(fields, form, tmp_path):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, base_model="org/target", **fields)
    drafter.save_pretrained(tmp_path / "native")
    text = card_of(tmp_path / "native").text
    assert f"hf-dspark convert native drafter --to {form} --target org/target\n" in text
    assert 'vllm serve org/target --speculative-config \\\n  \'{"method": "dspark"' in text
    assert f'"num_speculative_tokens": {drafter.config.num_draft_tokens}}}' in text
    assert ("--speculative-algorithm DSPARK" in text) == (form == "deepspec")
    drafter.bind(target)
    drafter.save_pretrained(tmp_path / "export", format=form)
    assert DSparkModel.from_pretrained(tmp_path / "export").config.num_draft_tokens == drafter.config.num_draft_tokens


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "causal_in_block": False}


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({"markov_rank": 0}, "with a sequential head"),
        ({"markov_head_type": "rnn"}, "vanilla"),
        ({"output_multiplier": 2.0}, "output_multiplier"),
        ({"causal_in_block": [True, False]}, "causal_in_block"),
        ({"draft_vocab_size": 10, "sliding_window_from": "anchor", **SLIDING}, "for causal"),
    ],
    ids=str,
)
def test_what_keeps_other_engines_from_a_drafter_is_said(fields, obstacle, tmp_path):
    tiny_drafter(tiny_target("llama"), base_model="org/target", **fields).save_pretrained(tmp_path)
    text = card_of(tmp_path).text
    assert obstacle in text and "vllm serve" not in text and "sglang" not in text


def test_the_command_line_writes_a_card(drafter, report, tmp_path):
    folder = tmp_path / "drafter"
    drafter.config.base_model = None
    drafter.save_pretrained(folder)
    arguments = ["card", str(folder), "--report", str(report), "--license", "mit", "--base-model", "org/other"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert (card_of(folder).data.base_model, card_of(folder).data.license) == ("org/other", "mit")
    assert card_of(folder).data.eval_results

    report.write_text("{}")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    result = CliRunner().invoke(app, ["card", str(folder), "--report", str(report)])
    assert result.exit_code == 1 and "is not a report" in result.output
    result = CliRunner().invoke(app, ["card", str(folder), "--base-model", "/home/somebody/target"])
    assert result.exit_code == 1 and "repository on the Hub" in result.output
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    result = CliRunner().invoke(app, ["card", str(tmp_path / "nowhere")])
    assert result.exit_code == 1 and "nowhere" in result.output
