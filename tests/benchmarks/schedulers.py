"""
Ways of deciding how much of a draft is verified, side by side in real generation: every prompt is answered by each in
turn. The best fixed length and the best threshold are found afterwards (nobody could have known), hardware-aware was
told nothing. Beside what was measured stands what the same rounds take by the profile, as machines have neighbours.

    python tests/benchmarks/schedulers.py gsm8k.jsonl humaneval.jsonl [--target FOLDER] [--limit 4] [--load]

With `--load`, set OMP_WAIT_POLICY=passive: threads that spin while they wait keep each other from work.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import torch
import typer
from modelled import watched
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_dspark import DSparkModel
from hf_dspark.cli import load_both, named_dtype
from hf_dspark.demo import DRAFTER
from hf_dspark.evaluation.measurement import GREEDY, SAMPLE, Answer, answer, side_by_side, speed
from hf_dspark.evaluation.prompts import Conversation, read_sets
from hf_dspark.evaluation.variants import VARIANTS, Variant
from hf_dspark.generation import decoding
from hf_dspark.generation.profiler import ensure_costs
from hf_dspark.scheduling.costs import RoundCosts
from hf_dspark.scheduling.hardware_aware import gains
from hf_dspark.scheduling.schedulers import Scheduler

THRESHOLDS = (0.2, 0.4, 0.6, 0.8)
BUSY = "import torch; a = torch.randn(1024, 1024)\nwhile True: a @ a"


class EarlyStop(Scheduler):
    """The paper's algorithm 1 for one request: admit tokens while the round's own rate, E[τ] / t, rises."""

    reads_confidence = True

    def __init__(self, costs: RoundCosts, length: int):
        self.costs, self.length = costs, length

    def limit(self, room: int) -> int:
        self._confidences: list[float] = []
        return super().limit(room)

    def admits(self, slot: int, confidence: float | None) -> bool:
        self._confidences.append(0.0 if confidence is None else confidence)
        tokens = gains(self._confidences, [0.0] * (slot + 2), 0.0)
        before, after = (
            count / (self.costs.draft + self.costs.verify[n] + self.costs.overhead)
            for n, count in ((slot, tokens[slot]), (slot + 1, tokens[slot + 1]))
        )
        return after > before


@contextmanager
def configured(drafter: DSparkModel, **settings) -> Iterator[dict]:
    config = drafter.generation_config
    before = {name: getattr(config, name) for name in settings}
    config.update(**settings)
    try:
        yield {"assistant_model": drafter}
    finally:
        config.update(**before)


@contextmanager
def early_stop(drafter: DSparkModel) -> Iterator[dict]:
    scheduler = EarlyStop(drafter.round_costs, drafter.config.num_draft_tokens)
    with patch.object(decoding, "scheduler_of", lambda *_: scheduler):
        yield {"assistant_model": drafter}


def ways(drafter: DSparkModel) -> dict[str, Variant]:
    lengths = range(1, drafter.config.num_draft_tokens + 1)
    fixed = {f"fixed {n}": partial(configured, num_assistant_tokens=n) for n in lengths}
    thresholds = {f"threshold {t}": partial(configured, assistant_confidence_threshold=t) for t in THRESHOLDS}
    if drafter.confidence_head is None:
        thresholds = {}
    return {
        "plain": VARIANTS["plain"],
        **fixed,
        **thresholds,
        "early stop": early_stop,
        "hardware-aware": VARIANTS["drafter"],
    }


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Other work on the cores, as long as the block lasts."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


@dataclass
class Modelled(Answer):
    """An answer, and how long its rounds take by the profile."""

    modelled: float = 0.0


def respond(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkModel,
    variant: Variant,
    messages: Conversation,
    **arguments,
) -> Modelled:
    with watched() as work:
        found = answer(target, tokenizer, drafter, variant, messages, **arguments)
    costs = drafter.round_costs
    if found.rounds:
        return Modelled(**vars(found), modelled=work.seconds(lambda _: costs))
    return Modelled(**vars(found), modelled=(len(found.tokens) - 1) * costs.plain)


def modelled_speed(answers: list[Modelled]) -> float:
    """Tokens per second by the profile."""
    return sum(len(one.tokens) for one in answers) / sum(one.modelled for one in answers)


def rates(answers: dict[str, list[Modelled]], do_sample: bool) -> dict[str, tuple[float, ...]]:
    """By way of decoding: tokens per second; that, and that by the profile, times plain decoding's."""
    found = {}
    for name, of_way in answers.items():
        measured = speed(of_way, answers["plain"], do_sample)
        modelled = modelled_speed(of_way) / modelled_speed(answers["plain"])
        found[name] = measured.tokens_per_second, measured.speedup, modelled
    for oracle in ("fixed", "threshold"):
        if candidates := {name: rate for name, rate in found.items() if name.startswith(f"{oracle} ")}:
            best = max(candidates, key=lambda name: candidates[name][-1])
            found[f"best {oracle}, {best.removeprefix(oracle).strip()}"] = candidates[best]
    return {name: rate for name, rate in found.items() if name.split()[0] not in ("fixed", "threshold")} | {
        "whole blocks": found[max(name for name in found if name.startswith("fixed"))]
    }


def main(
    prompts: list[Path],
    target: str = "smollm2",
    drafter: str | None = None,
    limit: int = 4,
    max_new_tokens: int = 64,
    dtype: str = "float32",
    load: Annotated[bool, typer.Option(help="Keep one core busy with other work meanwhile.")] = False,
) -> None:
    loaded_target, tokenizer, loaded_drafter = load_both(target, drafter or DRAFTER, named_dtype(dtype))
    ensure_costs(loaded_target, loaded_drafter)
    variants = ways(loaded_drafter)
    ask = partial(respond, loaded_target, tokenizer, loaded_drafter, max_new_tokens=max_new_tokens)
    for variant in variants.values():
        ask(variant, [{"role": "user", "content": "Hello!"}], **GREEDY)  # warm up
    console = Console()
    with busy(max(torch.get_num_threads() // 2, 1)) if load else nullcontext():
        for name, conversations in read_sets(prompts, limit).items():
            for regime, sampling in (("greedy", GREEDY), ("sampled", SAMPLE)):
                answers = side_by_side(partial(ask, **sampling), variants, conversations, 0, lambda: None)
                title = f"{name}, {regime}{', loaded' if load else ''}"
                table = Table("way", "tokens/s", "× plain", "by the profile", title=title)
                for way, found in rates(answers, sampling["do_sample"]).items():
                    table.add_row(way, f"{found[0]:.1f}", *(f"{times:.2f}" for times in found[1:]))
                console.print(table)


if __name__ == "__main__":
    typer.run(main)
