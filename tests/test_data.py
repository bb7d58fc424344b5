"""Text that a target writes for its own drafter."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from conftest import prompt, tiny_target

from hf_dspark.training.data import (
    OPENINGS,
    answer_header,
    read_conversations,
    sample_continuations,
    self_generated_conversations,
    user_turn_prompts,
    write_conversations,
)

TEMPLATE = (
    "{% for message in messages %}x{{ message['content'] }}y{% endfor %}{% if add_generation_prompt %}z{% endif %}"
)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_greedy_rows_of_a_batch_are_what_generate_writes(family):
    target = tiny_target(family)
    prompts = [prompt(length, seed=length)[0].tolist() for length in (3, 11, 7, 5, 9, 4)]
    eos = target.generate(torch.tensor(prompts[:1]), max_new_tokens=6, do_sample=False)[0, -1].item()
    greedy = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": eos}
    plain = [target.generate(torch.tensor([ids]), **greedy)[0, len(ids) :].tolist() for ids in prompts]
    written = sample_continuations(target, prompts, eos, 20, torch.zeros(len(prompts)))
    finished = [text for text in plain if text[-1] == eos]
    assert finished, "no row ends early: the shrinking of the batch is not tested"
    for ours, theirs in zip(written, plain):  # the last rows may be cut short
        assert ours == theirs[: len(ours)]
    assert sum(len(ours) == len(theirs) for ours, theirs in zip(written, plain)) >= 5


def test_sampled_rows_keep_to_their_top_k():
    target = tiny_target("llama")
    ids = prompt(5)[0].tolist()
    with torch.no_grad():
        allowed = target(prompt(5)).logits[0, -1].topk(3).indices.tolist()
    rows = sample_continuations(target, [ids] * 60, 99, 1, torch.ones(60), top_k=3)
    assert {row[0] for row in rows} == set(allowed)


def test_prompts_come_from_the_chat_template(tokenizer):
    tokenizer.chat_template = TEMPLATE
    assert tokenizer.decode(user_turn_prompts(tokenizer, ("abc",))[0]) == "xabc"
    assert tokenizer.decode(answer_header(tokenizer)) == "yz"
    assert len(set(OPENINGS)) > 50 and not any("⏎" in opening for opening in OPENINGS)


def test_conversations_are_written_and_taken_up_again(tokenizer, tmp_path):
    tokenizer.chat_template = TEMPLATE
    target = tiny_target("llama")
    with torch.no_grad():
        target.lm_head.weight[tokenizer.eos_token_id] *= 3  # let it end now and then
    rows = self_generated_conversations(target, tokenizer, batch_size=16, max_prompt_tokens=12, max_new_tokens=10)
    rows = list(itertools.islice(rows, 12))
    assert all(row["temperature"] in (0.0, 1.0) for row in rows)
    assert all(tokenizer.decode(row["input_ids"][: row["prompt_length"]]).endswith("yz") for row in rows)
    path = tmp_path / "data.jsonl"
    first = write_conversations(path, iter(rows), 40)
    with path.open("a") as file:
        file.write('{"input_ids": [1, 2')  # the machine went away here
    assert sum(len(row["input_ids"]) for row in read_conversations(path)) == first >= 40
    second = write_conversations(path, iter(rows), first + 40)
    held = read_conversations(path)
    assert sum(len(row["input_ids"]) for row in held) == second
    assert held[0] == json.loads(json.dumps(rows[0]))
