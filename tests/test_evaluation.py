"""The evaluation reads prompts, compares side by side, and refuses what it cannot read."""

from __future__ import annotations

import json

import pytest
from conftest import scripted_drafter, tiny_target
from typer.testing import CliRunner

from hf_dspark import acceptance_length
from hf_dspark.cli import app
from hf_dspark.evaluation.speed import compare, read_prompts
from hf_dspark.generation.trace import Round


def test_acceptance_length_counts_the_targets_own_token():
    assert acceptance_length([Round([1, 2, 3], [], 3), Round([1, 2, 3], [], 0)]) == 2.5


def test_prompts_in_both_forms(tmp_path):
    file = tmp_path / "set.jsonl"
    messages = [{"role": "user", "content": "a"}]
    file.write_text("\n".join(map(json.dumps, [{"messages": messages}, {"prompt": "b"}, {"prompt": "c"}])))
    assert read_prompts(file, limit=2) == [messages, [{"role": "user", "content": "b"}]]
    file.write_text('{"text": "a"}')
    with pytest.raises(ValueError, match=r"line 1.*text"):
        read_prompts(file)


def test_comparison(tokenizer):
    target = tiny_target("llama")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    conversation = [{"role": "user", "content": "abcdefg"}]
    ids = tokenizer("abcdefg", return_tensors="pt").input_ids
    text = target.generate(ids, max_new_tokens=20, do_sample=False)
    result = compare(target, tokenizer, scripted_drafter(target, text[0]), [conversation] * 3, max_new_tokens=20)
    assert result.prompts == result.equal == 3
    assert 1.5 < result.acceptance_length <= 6
    assert result.plain_tokens_per_second > 0 and result.tokens_per_second > 0


def test_the_command_line_lists_its_commands():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(command in result.output for command in ("demo", "train", "eval"))
