"""
How fast R requests are together: plain `generate()`, drafts of fixed lengths, and the hardware-aware scheduler.

    python tests/benchmarks/batch.py TARGET DRAFTER [--requests 1,2,4,8,16,32] [--tokens 64] [--output FOLDER]

Prints a Markdown table and leaves it as `batch.md` in the folder, with `frontier.png` (tokens per second of all
requests against those of each) and `load.png` (tokens verified a request and round against R). For every R, the ways
of decoding run right after one another, in an order that changes; times are medians. Beside what was measured stands
what the same rounds take by the profile, as machines have neighbours.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib import rc_context
from matplotlib.figure import Figure
from modelled import modelled_seconds, watched_drafts
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_dspark import DSparkModel, trace
from hf_dspark.evaluation.plots import MARKERS, STYLE
from hf_dspark.generation.profiler import costs_by_rows, ensure_costs, profile
from hf_dspark.scheduling.profile import HardwareProfile

PLAIN, AWARE = "plain", "hardware-aware"
FORMS = ("Explain {} to a child.", "Write a short poem about {}.", "What should everybody know about {}?", "Why {}?")
TOPICS = ("rain", "bridges", "bread", "prime numbers", "the moon", "bicycles", "rivers", "chess")


@dataclass
class Result:
    """
    What a way of decoding does with R requests: tokens per second, measured and by the profile, and tokens verified a
    request and round.
    """

    requests: int
    variant: str
    tokens_per_second: float
    by_profile: float
    verified: float
    equal: bool

    @property
    def each(self) -> float:
        return self.tokens_per_second / self.requests


class Sweep:
    """The models, and the ways to have them answer; each is traced, which costs next to nothing."""

    def __init__(self, target: PreTrainedModel, drafter: DSparkModel, tokenizer, tokens: int):
        self.target, self.drafter, self.tokenizer, self.tokens = target, drafter, tokenizer, tokens
        self.questions = [form.format(topic) for topic, form in product(TOPICS, FORMS)]

    def prompts(self, requests: int) -> dict[str, torch.Tensor]:
        questions = [self.questions[i % len(self.questions)] for i in range(requests)]
        return self.tokenizer.apply_chat_template(
            [[{"role": "user", "content": question}] for question in questions],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        ).to(self.target.device)

    def run(self, variant: str, prompts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
        """The texts, and the seconds."""
        drafter = None if variant == PLAIN else self.drafter
        self.drafter.generation_config.num_assistant_tokens = (
            None if variant in (PLAIN, AWARE) else int(variant.split()[-1])
        )
        begin = time.perf_counter()
        texts = self.target.generate(**prompts, assistant_model=drafter, max_new_tokens=self.tokens, do_sample=False)[
            :, prompts["input_ids"].shape[1] :
        ].cpu()
        return texts, time.perf_counter() - begin

    def lengths(self, texts: torch.Tensor) -> torch.Tensor:
        """How many tokens were generated of each text, up to its end."""
        ends = torch.isin(texts, torch.tensor(self.target.generation_config.eos_token_id))
        return (ends.cumsum(1) - ends.int() == 0).sum(1)

    def compare(self, requests: int, variants: list[str], repeats: int) -> list[Result]:
        prompts, order = self.prompts(requests), list(variants)
        costs = costs_by_rows(self.drafter, prompts["input_ids"].shape[1])
        texts: dict[str, torch.Tensor] = {}
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        modelled: dict[str, list[float]] = {variant: [] for variant in variants}
        verified: dict[str, list[int]] = {variant: [] for variant in variants}
        for repeat in range(1 + repeats):
            for variant in order:
                with trace(self.drafter) as rounds, watched_drafts() as drafts:
                    texts[variant], spent = self.run(variant, prompts)
                if variant == PLAIN:
                    steps = int(self.lengths(texts[PLAIN]).max()) - 1  # the first token is the prompt's
                    modelled[PLAIN].append(steps * costs(requests).plain)
                else:
                    modelled[variant].append(modelled_seconds(drafts, rounds, costs))
                    verified[variant] += [len(one.draft) for one in rounds]
                if repeat:  # the first is to warm up
                    seconds[variant].append(spent)
            random.shuffle(order)
        results = []
        for variant in variants:
            tokens = int(self.lengths(texts[variant]).sum())
            speeds = (tokens / statistics.median(times[variant]) for times in (seconds, modelled))
            mean = statistics.fmean(verified[variant] or [0])
            results.append(Result(requests, variant, *speeds, mean, torch.equal(texts[variant], texts[PLAIN])))
        return results


def table(results: list[Result]) -> str:
    lines = [
        "| R | way | tokens/s | each | × plain | by the profile | verified | equal |",
        f"|--:|---{'|--:' * 5}|---|",
    ]
    plain = {one.requests: one for one in results if one.variant == PLAIN}
    for one in results:
        base = plain[one.requests]
        lines.append(
            f"| {one.requests} | {one.variant} | {one.tokens_per_second:.1f} | {one.each:.1f} | "
            f"{one.tokens_per_second / base.tokens_per_second:.2f} | {one.by_profile / base.by_profile:.2f} | "
            f"{one.verified:.2f} | {'yes' if one.equal else 'no'} |"
        )
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
    repeats: Annotated[int, typer.Option(help="Times that each is measured.")] = 5,
    dtype: Annotated[str, typer.Option(help="Of both models.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Of both models.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="What the profile of this machine may take, beyond its least.")] = 60,
    output: Annotated[Path, typer.Option(help="Where table and plots go.")] = Path("runs/batch"),
):
    """Compare the ways of decoding at every R."""
    random.seed(0)
    sweep = Sweep(
        AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device).eval(),
        DSparkModel.from_pretrained(drafter, dtype=dtype).to(device).eval(),
        AutoTokenizer.from_pretrained(target, padding_side="left"),
        tokens,
    )
    loads = [int(load) for load in requests.split(",")]
    prompt = sweep.prompts(1)["input_ids"]
    sweep.drafter.hardware_profile = sweep.drafter.hardware_profile or HardwareProfile()
    sweep.drafter.hardware_profile.add(
        profile(sweep.target, sweep.drafter, [prompt], rows=sorted({1, *loads}), depths=(64,), seconds=seconds)
    )
    ensure_costs(sweep.target, sweep.drafter)
    variants = [PLAIN, *(f"fixed {length}" for length in fixed.split(",")), AWARE]
    results: list[Result] = []
    for load in loads:
        results += sweep.compare(load, variants, repeats)
        print(table(results[-len(variants) :]))
    output.mkdir(parents=True, exist_ok=True)
    (output / "batch.md").write_text(table(results), encoding="utf-8")
    plots(results, variants, output)


if __name__ == "__main__":
    typer.run(main)
