"""Acceptance length and speed against plain generate() on sets of prompts, measured side by side in one run."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..generation.trace import Round, acceptance_length, trace
from ..modeling_dspark import DSparkModel


@dataclass
class Comparison:
    """
    What a drafter does on one set of prompts.

    Args:
        prompts: how many there were.
        acceptance_length: tokens committed per verification.
        plain_tokens_per_second, tokens_per_second: medians over prompts, without and with the drafter.
        speedup: median over prompts of the ratio of the two, (25 %, 75 %) in `speedup_quartiles`.
        equal: on how many prompts both gave the same tokens (only telling when greedy).
    """

    prompts: int
    acceptance_length: float
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    speedup_quartiles: tuple[float, float]
    equal: int


def read_prompts(path: str | os.PathLike, limit: int | None = None) -> list[list[dict[str, str]]]:
    """
    Conversations of a jsonl file with rows `{"messages": [...]}` or `{"prompt": ...}`.

    Raises:
        ValueError: a row is neither.
    """
    conversations = []
    for number, line in enumerate(Path(path).read_text().splitlines()[:limit], 1):
        row = json.loads(line)
        if "messages" in row:
            conversations.append(row["messages"])
        elif "prompt" in row:
            conversations.append([{"role": "user", "content": row["prompt"]}])
        else:
            raise ValueError(f"{path}, line {number}: a row needs `messages` or `prompt`, it has {sorted(row)}.")
    return conversations


def compare(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkModel,
    conversations: list[list[dict[str, str]]],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
) -> Comparison:
    """Answer every conversation without and with the drafter, one right after the other, in turns of who is first."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    plain_speeds: list[float] = []
    speeds: list[float] = []
    rounds: list[Round] = []
    equal = 0
    for number, messages in enumerate(conversations):
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(target.device)
        outputs = {}
        for assistant in (None, drafter) if number % 2 else (drafter, None):
            set_seed(seed + number)
            with trace(drafter) as traced:
                begin = time.perf_counter()
                text = target.generate(**inputs, assistant_model=assistant, max_new_tokens=max_new_tokens, **sampling)
                seconds = time.perf_counter() - begin
            outputs[assistant is drafter] = text
            speed = (text.shape[1] - inputs["input_ids"].shape[1]) / seconds
            (speeds if assistant is drafter else plain_speeds).append(speed)
            rounds += traced
        equal += torch.equal(outputs[True], outputs[False])
    ratios = [drafted / plain for drafted, plain in zip(speeds, plain_speeds)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Comparison(
        prompts=len(conversations),
        acceptance_length=acceptance_length(rounds),
        plain_tokens_per_second=statistics.median(plain_speeds),
        tokens_per_second=statistics.median(speeds),
        speedup=statistics.median(ratios),
        speedup_quartiles=(quartiles[0], quartiles[2]),
        equal=equal,
    )


def compare_sets(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkModel,
    files: list[Path],
    limit: int | None = None,
    temperatures: tuple[float, ...] = (0.0, 1.0),
    max_new_tokens: int = 256,
) -> Iterator[tuple[str, float, Comparison]]:
    """[`compare`] on each file (a set, named by the file) at each temperature, as they come."""
    sets = {file.stem: read_prompts(file, limit) for file in files}
    compare(target, tokenizer, drafter, next(iter(sets.values()))[:1], max_new_tokens=16)  # warm up
    for name, conversations in sets.items():
        for temperature in temperatures:
            yield name, temperature, compare(target, tokenizer, drafter, conversations, max_new_tokens, temperature)
