"""Training text that the target writes itself: sampled user turns, then the answers to them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer

from ..compat import CACHE

# Beginnings of user turns, one a line (⏎ is a line break). A small target left to itself always asks for the same few
# things; an opening moves it to code, mathematics or conversation, and it finishes the request in its own words.
OPENINGS = (
    *[""] * 12,
    *(
        line.replace("⏎", "\n")
        for line in """\
Write a Python function that
Write a Python function to
Complete the following Python function.⏎⏎```python⏎def
def
from typing import List⏎⏎⏎def
import math⏎⏎def
Fix the bug in this code:⏎⏎
Explain what this code does:
Write a function in JavaScript
Write a SQL query
Write a program
Implement a class
What does the Python
A baker
A farmer has
Tom has
Maria buys
John and his friends
A train travels
In a class of
Every day,
Sarah earns $
There are
A store sells
If a car
Calculate the total
How many
A rectangle has
Last week,
Solve for x:
Let $x$ be
Find the value of $
What is the sum of
Compute $\\frac
Simplify
Evaluate
Suppose $f(x)
The roots of
A triangle has sides
Find the number of
What is the probability that
Prove that
Two dice
Explain
What is the difference between
How do I
How does
Why do
What are the main
Can you
Who was
Write a short story about
Write an email to
Compose a
Summarize the
Rewrite the following sentence
Imagine you are
Give me a list of
Describe
Pretend to be
Write a blog post about
Write a poem
Translate
Compare
Suggest
I need advice
Help me
Tell me about
What should I
Create a plan
Design a
Classify
Extract
Discuss""".splitlines()
    ),
)
MARKER = "\u241f"  # stands where the user's words go in a rendered chat template


def user_turn_prompts(tokenizer: PreTrainedTokenizerBase, openings: tuple[str, ...] = OPENINGS) -> list[list[int]]:
    """Token ids of the chat template up to the start of the user's words, followed by each opening."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARKER}], tokenize=False)
    head = text[: text.index(MARKER)]
    return [tokenizer(head + opening, add_special_tokens=False).input_ids for opening in openings]


def answer_header(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that close a user turn and open the answer."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARKER}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text[text.index(MARKER) + len(MARKER) :], add_special_tokens=False).input_ids


class GrowingLayer(DynamicLayer):
    """A cache layer that grows by doubling: a step of a large batch writes one column instead of copying them all."""

    def update(self, key_states, value_states, *args, **kwargs):
        held = self.get_seq_length()
        end = held + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [key_states[..., :0, :], value_states[..., :0, :]]
        for i, states in enumerate((key_states, value_states)):
            if self.buffers[i].shape[-2] < end:
                grown = states.new_empty(*states.shape[:2], 2 * end, states.shape[-1])
                grown[..., :held, :] = self.buffers[i][..., :held, :]
                self.buffers[i] = grown
            self.buffers[i][..., held:end, :] = states
        self.keys, self.values = (buffer[..., :end, :] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        held = self.get_seq_length()
        self.buffers = [buffer[indices] for buffer in self.buffers]
        self.keys, self.values = (buffer[..., :held, :] for buffer in self.buffers)


@torch.inference_mode()
def sample_continuations(
    target: PreTrainedModel,
    prompts: list[list[int]],
    eos_token_id: int,
    max_new_tokens: int,
    temperature: torch.Tensor,
    top_k: int = 50,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """
    Continue every prompt until its EOS token (included) or `max_new_tokens`; a finished row leaves the batch.

    `temperature` has one value a row; 0 means greedy. When five rows in six have finished, the rest is cut short: a
    batch of a few rows costs almost as much a step as a full one.
    """
    device = target.device
    width = max(map(len, prompts))
    input_ids = torch.full((len(prompts), width), eos_token_id, device=device)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):  # left-padded
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
        mask[row, width - len(prompt) :] = 1
    cache = Cache(layer_class_to_replicate=GrowingLayer)
    alive = torch.arange(len(prompts), device=device)
    temperature = temperature.to(device)
    written: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        logits = target(
            input_ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, use_cache=True, **{CACHE: cache}
        ).logits[:, -1]
        best = logits.float().topk(min(top_k, logits.shape[-1]))
        warm = temperature[alive].unsqueeze(-1)
        probabilities = (best.values / warm.clamp(min=1e-3)).softmax(-1)
        choice = torch.multinomial(probabilities, 1, generator=generator)
        tokens = best.indices.gather(-1, torch.where(warm > 0, choice, 0))
        for row, token in zip(alive.tolist(), tokens[:, 0].tolist()):
            if not written[row] or written[row][-1] != eos_token_id:
                written[row].append(token)
        unfinished = torch.tensor([written[row][-1] != eos_token_id for row in alive.tolist()], device=device)
        if 6 * unfinished.sum() < len(prompts):
            break
        if 8 * unfinished.sum() < 7 * len(alive):  # dropping a row copies the cache, so a few leave together
            keep = unfinished.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            alive, mask, tokens = alive[keep], mask[keep], tokens[keep]
        input_ids = tokens
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
    return written


def self_generated_conversations(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int = 128,
    max_prompt_tokens: int = 128,
    max_new_tokens: int = 256,
    seed: int = 0,
) -> Iterator[dict]:
    """
    Conversations in the target's own words, for ever: `{"input_ids": [...], "prompt_length": n, "temperature": t}`.

    Half of the answers are greedy, half sampled: a drafter is used for both.
    """
    generator = torch.Generator(target.device).manual_seed(seed)
    prompts, header = user_turn_prompts(tokenizer), answer_header(tokenizer)
    eos = tokenizer.eos_token_id
    while True:
        choice = torch.randint(len(prompts), (batch_size,), generator=generator, device=target.device).tolist()
        heads = [prompts[i] for i in choice]
        turns = sample_continuations(
            target, heads, eos, max_prompt_tokens, torch.ones(batch_size), generator=generator
        )
        questions = [
            head + turn[:-1] + header for head, turn in zip(heads, turns) if turn[-1] == eos and len(turn) > 4
        ]
        temperature = torch.where(torch.arange(len(questions)) % 2 == 0, 0.0, 1.0)
        answers = sample_continuations(target, questions, eos, max_new_tokens, temperature, generator=generator)
        for question, answer, warm in zip(questions, answers, temperature.tolist()):
            yield {"input_ids": question + answer, "prompt_length": len(question), "temperature": warm}


def write_conversations(path: str | os.PathLike, rows: Iterator[dict], tokens: int) -> int:
    """Append rows to a jsonl file until it holds `tokens` token ids; returns how many it holds."""
    path = Path(path)
    held = sum(len(row["input_ids"]) for row in read_conversations(path)) if path.exists() else 0
    with path.open("a") as file, tqdm(desc=f"Writing {path}", total=tokens, initial=held, unit=" tokens") as progress:
        if held and not path.read_text().endswith("\n"):  # a line that was cut short
            file.write("\n")
        while held < tokens:
            row = next(rows)
            file.write(json.dumps(row) + "\n")
            file.flush()
            held += len(row["input_ids"])
            progress.update(len(row["input_ids"]))
    return held


def read_conversations(path: str | os.PathLike) -> list[dict]:
    """The rows of a jsonl file; a last line that was cut short is dropped."""
    rows = []
    for line in Path(path).read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
