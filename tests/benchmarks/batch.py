"""
How fast R requests are together: plain `generate()`, drafts of fixed lengths, and the hardware-aware scheduler.

    python tests/benchmarks/batch.py TARGET DRAFTER [--requests 1,2,4,8,16,32] [--tokens 64] [--prompts gsm8k.jsonl]

Prints a Markdown table and leaves it as `batch.md` in the folder of `--output`, with `frontier.png` (tokens per second
of all requests against those of each) and `load.png` (tokens verified a request and round against R). The ways of
decoding run right after one another, in an order that changes, on one batch of questions after the other, own ones or
those of `--prompts`; figures are of all batches together, as texts have luck of their own, and of more batches where
they have fewer than four requests. Beside what was measured stands what the same rounds take by the profile, as
machines have neighbours.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib import rc_context
from matplotlib.figure import Figure
from modelled import watched
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_dspark import DSparkModel
from hf_dspark.evaluation.plots import MARKERS, STYLE
from hf_dspark.evaluation.prompts import read_sets
from hf_dspark.generation.profiler import costs_by_rows, ensure_costs, profile
from hf_dspark.scheduling.profile import HardwareProfile

PLAIN, AWARE = "plain", "hardware-aware"
FORMS = ("Explain {} to a child.", "Write a short poem about {}.", "What should everybody know about {}?", "Why {}?")
TOPICS = (
    *("rain", "bridges", "bread", "prime numbers", "the moon", "bicycles", "rivers", "chess"),
    *("glass", "bees", "maps", "volcanoes", "the violin", "clocks", "salt", "sailing ships"),
)


@dataclass
class Result:
    """
    What a way of decoding does with R requests: tokens per second, how many times plain `generate()` that is, measured
    and by the profile, tokens verified a request and round, and how many of so many batches got the same texts.
    """

    requests: int
    variant: str
    tokens_per_second: float
    speedup: float
    by_profile: float
    verified: float
    equal: str

    @property
    def each(self) -> float:
        return self.tokens_per_second / self.requests


@dataclass
class Run:
    """A way of decoding with one batch: its texts, seconds by the clock and by the profile, and tokens verified."""

    texts: torch.Tensor
    seconds: float
    modelled: float
    verified: list[int]


class Sweep:
    """The models, the questions, and the ways to have them answered."""

    def __init__(self, target: PreTrainedModel, drafter: DSparkModel, tokenizer, tokens: int, questions: list):
        self.target, self.drafter, self.tokenizer, self.tokens = target, drafter, tokenizer, tokens
        self.questions = questions
        random.Random(0).shuffle(self.questions)

    def prompts(self, requests: int, batch: int = 0) -> dict[str, torch.Tensor]:
        questions = [self.questions[i % len(self.questions)] for i in range(batch * requests, (batch + 1) * requests)]
        return self.tokenizer.apply_chat_template(
            questions,
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        ).to(self.target.device)

    def run(self, variant: str, prompts: dict[str, torch.Tensor]) -> Run:
        requests, length = prompts["input_ids"].shape
        costs = costs_by_rows(self.drafter, length)
        self.drafter.generation_config.num_assistant_tokens = (
            None if variant in (PLAIN, AWARE) else int(variant.split()[-1])
        )
        with watched() as work:
            begin = time.perf_counter()
            texts = self.target.generate(
                **prompts,
                assistant_model=None if variant == PLAIN else self.drafter,
                max_new_tokens=self.tokens,
                do_sample=False,
            )[:, length:].cpu()
            seconds = time.perf_counter() - begin
        if variant == PLAIN:
            steps = int(self.lengths(texts).max()) - 1  # the first token is the prompt's
            return Run(texts, seconds, steps * costs(requests).plain, [])
        return Run(texts, seconds, work.seconds(costs), list(chain.from_iterable(work.verified)))

    def lengths(self, texts: torch.Tensor) -> torch.Tensor:
        """How many tokens were generated of each text, up to its end."""
        ends = torch.isin(texts, torch.tensor(self.target.generation_config.eos_token_id))
        return (ends.cumsum(1) - ends.int() == 0).sum(1)

    def compare(self, requests: int, variants: list[str], batches: int) -> list[Result]:
        for variant in variants:  # to warm up
            self.run(variant, self.prompts(requests))
        order = list(variants)
        runs: dict[str, list[Run]] = {variant: [] for variant in variants}
        for batch in range(batches):
            random.shuffle(order)
            for variant in order:
                runs[variant].append(self.run(variant, self.prompts(requests, batch)))
        return [self.result(requests, variant, runs[variant], runs[PLAIN]) for variant in variants]

    def result(self, requests: int, variant: str, runs: list[Run], plain: list[Run]) -> Result:
        tokens = sum(int(self.lengths(run.texts).sum()) for run in runs)
        seconds, modelled = (sum(getattr(run, name) for run in runs) for name in ("seconds", "modelled"))
        verified = [count for run in runs for count in run.verified]
        equal = sum(torch.equal(run.texts, base.texts) for run, base in zip(runs, plain, strict=True))
        return Result(
            requests,
            variant,
            tokens / seconds,
            sum(run.seconds for run in plain) / seconds,
            sum(run.modelled for run in plain) / modelled,
            statistics.fmean(verified or [0]),
            f"{equal} of {len(runs)}",
        )


def table(results: list[Result]) -> str:
    lines = [
        "| R | way | tokens/s | each | × plain | by the profile | verified | equal |",
        f"|--:|---{'|--:' * 5}|---|",
    ]
    lines += [
        f"| {one.requests} | {one.variant} | {one.tokens_per_second:.1f} | {one.each:.1f} | {one.speedup:.2f} | "
        f"{one.by_profile:.2f} | {one.verified:.2f} | {one.equal} |"
        for one in results
    ]
    return "\n".join(lines) + "\n"


def plots(results: list[Result], variants: list[str], folder: Path) -> None:
    with rc_context(STYLE):
        frontier, load = (Figure(figsize=(6, 4), layout="constrained") for _ in range(2))
        one, other = frontier.subplots(), load.subplots()
        for number, variant in enumerate(variants):
            mine = [result for result in results if result.variant == variant]
            style = {"marker": MARKERS[number % len(MARKERS)], "label": variant}
            one.plot([r.each for r in mine], [r.tokens_per_second for r in mine], **style)
            if variant != PLAIN:
                other.plot([r.requests for r in mine], [r.verified for r in mine], **style)
        one.set(xlabel="tokens per second of each request", ylabel="tokens per second of all", yscale="log")
        other.set(xlabel="requests", ylabel="drafts verified a request and round", xscale="log", ylim=(0, None))
        for figure, axes, name in ((frontier, one, "frontier"), (load, other, "load")):
            axes.legend()
            figure.savefig(folder / f"{name}.png", dpi=150)


def main(
    target: Annotated[str, typer.Argument(help="Folder or Hub repository of the target.")],
    drafter: Annotated[str, typer.Argument(help="Folder or Hub repository of the drafter.")],
    requests: Annotated[str, typer.Option(help="R, separated by commas.")] = "1,2,4,8,16,32",
    fixed: Annotated[str, typer.Option(help="Fixed lengths of drafts, separated by commas.")] = "1,2,4",
    tokens: Annotated[int, typer.Option(help="The most a request generates.")] = 64,
    batches: Annotated[int, typer.Option(help="Of every size, with other questions each.")] = 6,
    prompts: Annotated[list[Path] | None, typer.Option(help="Files with rows of `messages` or `prompt`.")] = None,
    dtype: Annotated[str, typer.Option(help="Of both models.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Of both models.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="What the profile of this machine may take, beyond its least.")] = 60,
    output: Annotated[Path, typer.Option(help="Where table and plots go.")] = Path("runs/batch"),
):
    """Compare the ways of decoding at every R."""
    random.seed(0)
    own = [[{"role": "user", "content": form.format(topic)}] for topic, form in product(TOPICS, FORMS)]
    sweep = Sweep(
        AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device).eval(),
        DSparkModel.from_pretrained(drafter, dtype=dtype).to(device).eval(),
        AutoTokenizer.from_pretrained(target, padding_side="left"),
        tokens,
        list(chain.from_iterable(read_sets(prompts).values())) if prompts else own,
    )
    loads = [int(load) for load in requests.split(",")]
    prompt = sweep.prompts(1)["input_ids"]
    sweep.drafter.hardware_profile = sweep.drafter.hardware_profile or HardwareProfile()
    sweep.drafter.hardware_profile.add(
        profile(sweep.target, sweep.drafter, [prompt], rows=loads, depths=(64,), seconds=seconds)
    )
    ensure_costs(sweep.target, sweep.drafter)
    variants = [PLAIN, *(f"fixed {length}" for length in fixed.split(",")), AWARE]
    results: list[Result] = []
    for load in loads:
        results += sweep.compare(load, variants, batches * max(4 // load, 1))
        print(table(results[-len(variants) :]))
    output.mkdir(parents=True, exist_ok=True)
    (output / "batch.md").write_text(table(results), encoding="utf-8")
    plots(results, variants, output)


if __name__ == "__main__":
    typer.run(main)
