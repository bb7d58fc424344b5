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
from acceptance import CHUNK, answers
from rich.console import Console
from rich.table import Table
from scheduling import LENGTH, Round, play_batch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_dspark import DSparkModel
from hf_dspark.cli import load_both, named_dtype
from hf_dspark.demo import DRAFTER
from hf_dspark.evaluation.prompts import read_sets
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
    drafter = objective.drafter
    calibration, ids = drafter.calibration(do_sample=False), torch.tensor([row["input_ids"]], device=target.device)
    with TargetTaps(target, drafter.config.target_layer_ids) as taps:
        target(ids, use_cache=False)
        features = taps.take(drafter.device, drafter.dtype)
    rounds: list[Round] = []
    said = torch.cat([ids[0], ids.new_full((LENGTH,), -1)])
    for anchors in torch.arange(row["prompt_length"], ids.shape[1] - 1, device=ids.device).split(CHUNK):
        texts = [ids[0, : anchor + 1] for anchor in anchors]
        block = DraftBlock(
            drafter,
            objective._block_hidden(ids, features, anchors[None])[0],
            pad_sequence(texts, batch_first=True, padding_value=-1, padding_side="left"),
        )
        token, confidences, right = ids[0, anchors], [], []
        for slot in range(LENGTH):
            block.advance(token)
            confidences.append(calibration(slot, **block.read(calibration)).sigmoid())
            token = block.logits().argmax(-1)
            if (kept := drafter.draft_token_ids) is not None:
                token = kept[token]
            right.append(token == said[anchors + slot + 1])
        rounds += zip(torch.stack(confidences, 1).tolist(), torch.stack(right, 1).tolist())
    return rounds


def speeds(
    texts: list[list[Round]], requests: int, tokens: int, batches: int, costs: Callable[[int], RoundCosts]
) -> dict[str, float]:
    """By way of decoding, how many times as fast as plain decoding batches of so many of the texts are."""
    draw = random.Random(0)
    chosen = [draw.sample(texts, requests) for _ in range(batches)]
    plain = costs(requests).overhead + costs(requests).verify[0]
    whole = sum(max(min(len(text), tokens) for text in batch) * plain for batch in chosen)

    def speed(scheduler: Callable[[], BatchScheduler]) -> float:
        return whole / sum(play_batch(scheduler(), batch, costs, tokens) for batch in chosen)

    experience = Experience(LENGTH)
    fixed = {f"fixed {n}": speed(lambda n=n: EachRow(FixedLength(n))) for n in range(1, LENGTH + 1)}
    ours = speed(lambda: HardwareAwareBatch(costs, LENGTH, do_sample=False, experience=experience))
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
    model, tokenizer, draft_model = load_both(target, drafter or DRAFTER, named_dtype(dtype))
    draft_model: DSparkModel
    draft_model.bind(model)
    objective, sets = DSparkObjective(draft_model).eval(), read_sets(prompts, limit)
    lengths = [int(length) for length in tokens.split(",")]
    found = answers(model, tokenizer, sets, 0.0, max(lengths))
    texts = [text for _, row in found if (text := drafts(objective, model, row))]
    ensure_costs(model, draft_model)
    console = Console(width=120)
    for length in lengths:
        table = Table(
            title=f"Times plain decoding, {length} tokens a text, by the profile", caption=f"{len(texts)} texts"
        )
        for column in ("R", *(f"fixed {n}" for n in range(1, LENGTH + 1)), "hardware-aware", "… of the best"):
            table.add_column(column, justify="right")
        for count in map(int, requests.split(",")):
            found_speeds = speeds(texts, count, length, batches, costs_by_rows(draft_model, 64 + length // 2))
            *fixed, ours = found_speeds.values()
            best = max(1.0, *fixed)
            table.add_row(str(count), *(f"{speed:.2f}" for speed in (*fixed, ours)), f"{ours / best:.3f}")
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
