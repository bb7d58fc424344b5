"""
Batches of real texts without the noise of a machine: the target answers prompts, what the drafter would have drafted
at every place is worked out afterwards, and batches of these answers are played by what rounds cost according to the
drafter's profile. Tells in minutes how ways of scheduling compare, to the last digit.

    python tests/benchmarks/replay.py gsm8k.jsonl humaneval.jsonl [--requests 1,2,4,8,16,32] [--tokens 64,200]
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from acceptance import answers, blocks, load
from rich.console import Console
from rich.table import Table
from scheduling import Round, play_batch
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessorList, PreTrainedModel

from hf_dspark.evaluation.prompts import read_sets
from hf_dspark.generation.choice import choose
from hf_dspark.generation.draft_block import DraftBlock
from hf_dspark.generation.profiler import costs_by_rows, ensure_costs
from hf_dspark.scheduling.batch import BatchScheduler, EachRow, HardwareAwareBatch
from hf_dspark.scheduling.costs import RoundCosts
from hf_dspark.scheduling.experience import Experience
from hf_dspark.scheduling.schedulers import FixedLength
from hf_dspark.taps import TargetTaps
from hf_dspark.training.objective import DSparkObjective


def drafts(objective: DSparkObjective, target: PreTrainedModel, row: dict) -> list[Round]:
    """At each token of an answer but the last: a greedy block's confidences, and which of its tokens are right."""
    drafter, slots = objective.drafter, objective.drafter.config.num_draft_tokens
    calibration, ids = drafter.calibration(do_sample=False), torch.tensor([row["input_ids"]], device=target.device)
    with TargetTaps(target, drafter.config.target_layer_ids) as taps:
        target(ids, use_cache=False)
        features = taps.take(drafter.device, drafter.dtype)
    rounds: list[Round] = []
    said = torch.cat([ids[0], ids.new_full((slots,), -1)])
    for anchors, hidden in blocks(objective, ids, features, row["prompt_length"]):
        texts = [ids[0, : anchor + 1] for anchor in anchors]
        block = DraftBlock(drafter, hidden, pad_sequence(texts, True, padding_value=-1, padding_side="left"))
        token, confidences, right = ids[0, anchors], [], []
        for slot in range(slots):
            block.advance(token)
            confidences.append(calibration(slot, **block.read(calibration)).sigmoid())
            _, chosen, _ = choose(drafter, block.logits(), [LogitsProcessorList()], lambda _: ids, do_sample=False)
            token = chosen[:, 0]
            right.append(token == said[anchors + slot + 1])
        rounds += zip(torch.stack(confidences, 1).tolist(), torch.stack(right, 1).tolist())
    return rounds


def speeds(
    texts: list[list[Round]], requests: int, tokens: int, batches: int, costs: Callable[[int], RoundCosts]
) -> dict[str, float]:
    """By way of decoding, how many times as fast as plain decoding batches of so many of the texts are."""
    draw = random.Random(0)
    chosen = [draw.sample(texts, requests) for _ in range(batches)]
    plain = costs(requests).plain
    whole = sum(max(min(len(text), tokens) for text in batch) * plain for batch in chosen)
    slots = len(texts[0][0][0])

    def speed(scheduler: Callable[[], BatchScheduler]) -> float:
        return whole / sum(play_batch(scheduler(), batch, costs, tokens) for batch in chosen)

    experience = Experience(slots)
    fixed = {f"fixed {n}": speed(lambda n=n: EachRow(FixedLength(n))) for n in range(1, slots + 1)}
    ours = speed(lambda: HardwareAwareBatch(costs, slots, do_sample=False, experience=experience))
    return fixed | {"hardware-aware": ours}


@torch.no_grad()
def main(
    prompts: list[Path],
    target: str = "smollm2",
    drafter: str | None = None,
    limit: Annotated[int, typer.Option(help="Prompts of each file.")] = 32,
    requests: Annotated[str, typer.Option(help="R, separated by commas.")] = "1,2,4,8,16,32",
    tokens: Annotated[str, typer.Option(help="Lengths of answers, separated by commas.")] = "64,200",
    batches: Annotated[int, typer.Option(help="Of each size.")] = 12,
    dtype: str = "bfloat16",
) -> None:
    model, tokenizer, objective = load(target, drafter, dtype)
    if objective.drafter.calibration(do_sample=False) is None:
        raise typer.BadParameter("this drafter has no confidences to schedule by", param_hint="--drafter")
    lengths = [int(length) for length in tokens.split(",")]
    rows = answers(model, tokenizer, read_sets(prompts, limit), 0.0, max(lengths))
    texts = [text for _, row in rows if (text := drafts(objective, model, row))]
    ensure_costs(model, objective.drafter)
    console = Console(width=120)
    for length in lengths:
        table = Table(
            title=f"Times plain decoding, {length} tokens a text, by the profile", caption=f"{len(texts)} texts"
        )
        costs = costs_by_rows(objective.drafter, 64 + length // 2)
        found = {count: speeds(texts, count, length, batches, costs) for count in map(int, requests.split(","))}
        for column in ("R", *next(iter(found.values())), "… of the best"):
            table.add_column(column, justify="right")
        for count, by_way in found.items():
            *fixed, ours = by_way.values()
            table.add_row(str(count), *(f"{speed:.2f}" for speed in (*fixed, ours)), f"{ours / max(1.0, *fixed):.3f}")
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
