"""Text that a target writes for its own drafter."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from conftest import prompt, tiny_target

from hf_dspark.training import data
from hf_dspark.training.continuations import Continuation, continuations
from hf_dspark.training.conversations import answer_header, answered_anew, self_written, user_turn_prompts
from hf_dspark.training.data import conversations_of, load_data, write_data
from hf_dspark.training.openings import OPENINGS

TEMPLATE = (
    "{% for message in messages %}{{ 'x' if message['role'] == 'user' else 'w' }}{{ message['content'] }}y"
    "{% endfor %}{% if add_generation_prompt %}z{% if enable_thinking %}t{% endif %}{% endif %}"
)
FEW = {"batch_size": 8, "max_prompt_tokens": 12, "max_new_tokens": 10}


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def target(chat_tokenizer):
    target = tiny_target("llama")
    with torch.no_grad():
        target.lm_head.weight[chat_tokenizer.eos_token_id] *= 3  # let it end now and then
    return target


def written(target, prompts, eos, **arguments):
    return list(continuations(target, iter(prompts + [None] * 1000).__next__, eos, **arguments))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_rows_that_come_and_go_are_what_generate_writes(family):
    """Rows of many lengths, replaced while others are under way, beyond the sliding window of those that have one."""
    target = tiny_target(family)
    prompts = [prompt(length, seed=length)[0].tolist() for length in (3, 11, 7, 5, 17, 4, 9, 6, 12, 8)]
    eos = target.generate(torch.tensor(prompts[:1]), max_new_tokens=6, do_sample=False)[0, -1].item()
    requests = [Continuation(ids, 6 + 7 * i % 25, about=i) for i, ids in enumerate(prompts)]
    rows = written(target, requests, {eos}, batch_size=4)
    assert sorted(row.about for row in rows) == list(range(len(prompts)))
    assert [row.about for row in rows] != list(range(len(prompts))), "all rows end in the order they came"
    for row in rows:
        plain = target.generate(
            torch.tensor([row.input_ids]), max_new_tokens=row.max_new_tokens, do_sample=False, eos_token_id=eos
        )
        assert row.tokens == plain[0, len(row.input_ids) :].tolist()
    assert {row.tokens[-1] == eos for row in rows} == {True, False}


def test_sampled_rows_follow_the_distribution_of_their_top_k():
    target = tiny_target("llama")
    with torch.no_grad():
        best = target(prompt(5)).logits[0, -1].topk(3)
    rows = written(target, [Continuation(prompt(5)[0].tolist(), 1, 0.5) for _ in range(1200)], {99}, top_k=3)
    counts = torch.tensor([sum(row.tokens[0] == token for row in rows) for token in best.indices.tolist()])
    assert counts.sum() == 1200
    expected = 1200 * (best.values / 0.5).softmax(-1)
    assert ((counts - expected) ** 2 / expected).sum() < 13.8, "chi-square with 2 degrees of freedom, 99.9 %"


def test_prompts_come_from_the_chat_template(chat_tokenizer):
    assert chat_tokenizer.decode(user_turn_prompts(chat_tokenizer, ("abc",))[0]) == "xabc"
    assert chat_tokenizer.decode(answer_header(chat_tokenizer)) == "yz"
    assert chat_tokenizer.decode(answer_header(chat_tokenizer, enable_thinking=True)) == "yzt"
    assert len(set(OPENINGS)) > 50 and not any("⏎" in opening for opening in OPENINGS)


def test_self_written_conversations(target, chat_tokenizer):
    rows = list(itertools.islice(self_written(target, chat_tokenizer, seed=1, **FEW), 40))
    prompts = [tuple(row["input_ids"][: row["prompt_length"]]) for row in rows]
    assert all(
        chat_tokenizer.decode(ids).startswith("x") and chat_tokenizer.decode(ids).endswith("yz") for ids in prompts
    )
    assert len(set(prompts)) == len(prompts)
    assert {row["temperature"] for row in rows} == {0.0, 1.0}
    for row in rows:
        if not row["temperature"]:
            plain = target.generate(
                torch.tensor([row["input_ids"][: row["prompt_length"]]]),
                max_new_tokens=10,
                do_sample=False,
                eos_token_id=chat_tokenizer.eos_token_id,
            )
            assert plain[0].tolist() == row["input_ids"]
    known = self_written(target, chat_tokenizer, seed=1, known=prompts[:5], **FEW)
    again = {tuple(row["input_ids"][: row["prompt_length"]]) for row in itertools.islice(known, 40)}
    assert not again & set(prompts[:5]), "known questions are not answered again"


def test_given_conversations_are_answered_turn_by_turn(target, chat_tokenizer):
    user, assistant = ({"role": role, "content": word} for role, word in (("user", "abc"), ("assistant", "q")))
    given = [[user], [user, assistant], [user, assistant, user, assistant], [{"role": "user", "content": "a" * 20}]]
    rows = {row["conversation"]: row for row in answered_anew(target, chat_tokenizer, enumerate(given), (0.0,), **FEW)}
    assert sorted(rows) == [0, 1, 2], "the one with too long a prompt is left out"
    first = target.generate(
        torch.tensor([chat_tokenizer("xabcyz").input_ids]),
        max_new_tokens=10,
        do_sample=False,
        eos_token_id=chat_tokenizer.eos_token_id,
    )[0].tolist()
    assert rows[0]["input_ids"] == rows[1]["input_ids"] == first
    room = {**FEW, "max_prompt_tokens": 40}
    (long,) = answered_anew(target, chat_tokenizer, [(7, given[2])], (0.0,), **room)
    answer = chat_tokenizer.decode(first[6:], skip_special_tokens=True)
    said = chat_tokenizer.decode(long["input_ids"][: long["prompt_length"]])
    assert said == f"xabcyw{answer}yxabcyz" and long["conversation"] == 7


def test_data_is_taken_up_where_it_was_left(target, chat_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SHARD_ROWS", 5)
    first = write_data(target, chat_tokenizer, tmp_path, tokens=100, **FEW)
    files = sorted(tmp_path.glob("shard-*.jsonl"))
    assert len(files) > 1 and 100 <= first == sum(map(len, load_data(tmp_path)["input_ids"]))
    with files[-1].open("a") as file:
        file.write('{"input_ids": [1, 2')  # the machine went away here
    left = files[-1].read_text()
    assert sum(map(len, load_data(tmp_path)["input_ids"])) == first
    assert files[-1].read_text() == left, "reading changes nothing: somebody may be writing"
    held = files[0].read_text()
    second = write_data(target, chat_tokenizer, tmp_path, tokens=300, **FEW)
    assert files[0].read_text() == held and second >= 300
    rows = load_data(tmp_path)
    assert sum(map(len, rows["input_ids"])) == second
    assert len({tuple(row["input_ids"][: row["prompt_length"]]) for row in rows}) == len(rows)
    with pytest.raises(ValueError, match="max_new_tokens was 10, not 11"):
        write_data(target, chat_tokenizer, tmp_path, tokens=300, **{**FEW, "max_new_tokens": 11})
    with pytest.raises(ValueError, match="tokens"):
        write_data(target, chat_tokenizer, tmp_path / "other", **FEW)


def test_answers_to_a_file_are_taken_up_where_they_were_left(target, chat_tokenizer, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    words = ["abc", "bcd", "abc", "cde", "def", "efg"]  # one of them twice
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    out = tmp_path / "data"
    write_data(target, chat_tokenizer, out, prompts, tokens=20, **FEW)
    (file,) = out.glob("shard-*.jsonl")
    assert 0 < len(file.read_text().splitlines()) < 5
    write_data(target, chat_tokenizer, out, prompts, **FEW)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(row["conversation"] for row in rows) == [0, 1, 2, 3, 4]
    assert json.loads((out / "settings.json").read_text())["prompts"] == "prompts.jsonl"


def test_conversations_in_the_common_forms(tmp_path):
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    forms = {
        "messages": [user, assistant],
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
    }
    for name, value in forms.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({name: value, "id": 1}) + "\n")
        assert list(conversations_of(tmp_path / f"{name}.jsonl")) == [[user, assistant]]
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    with pytest.raises(ValueError, match=r"\['text'\].*messages"):
        list(conversations_of(tmp_path / "text.jsonl"))
    with pytest.raises(ValueError, match="shard"):
        load_data(tmp_path / "nothing")
