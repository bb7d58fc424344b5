"""
What schedulers make of one request, and rules for many, simulated: drafts that are right as often as their confidences
say, rounds that take what a cost curve says.

    python tests/benchmarks/scheduling.py [--rounds 4000] [--seed 0]
"""

from __future__ import annotations

import math
import random
import time
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from hf_dspark.scheduling.batch import HardwareAwareBatch
from hf_dspark.scheduling.costs import RoundCosts
from hf_dspark.scheduling.hardware_aware import HardwareAware, gains

LENGTH = 7
CURVES = {  # seconds
    "smooth": RoundCosts(draft=0.005, verify=tuple(0.0208 + 0.0006 * n for n in range(LENGTH + 1))),
    "linear": RoundCosts(draft=0.002, verify=tuple(0.010 + 0.004 * n for n in range(LENGTH + 1))),
    "cliff at two tokens": RoundCosts(draft=0.003, verify=(0.0204, *(0.0355 + 0.0003 * n for n in range(LENGTH)))),
    "steps of four": RoundCosts(draft=0.003, verify=(*[0.020] * 4, *[0.034] * 4)),
    "steps of two": RoundCosts(draft=0.002, verify=(0.015, 0.015, 0.023, 0.023, 0.031, 0.031, 0.039, 0.039)),
}
TEXTS = {  # confidence by mean and spread of its logit: between rounds, and between slots
    "mixed": (1.1, 1.3, 0.8),
    "easy": (2.5, 1.0, 0.5),
    "hard": (-0.8, 1.0, 0.8),
}
Round = tuple[list[float], list[bool]]  # by slot: confidence, and whether the token is right


def rounds_of(text: str, count: int, seed: int, bias: float = 0.0) -> list[Round]:
    """Rounds of a text that turns harder and easier; the logits that are announced exceed the true ones by `bias`."""
    mean, between, within = TEXTS[text]
    draw, mood, rounds = random.Random(seed), 0.0, []
    for _ in range(count):
        mood = 0.7 * mood + math.sqrt(1 - 0.7**2) * draw.gauss(0, 1)
        logits = [mean + between * mood + within * draw.gauss(0, 1) for _ in range(LENGTH)]
        right = [draw.random() < sigmoid(logit) for logit in logits]
        rounds.append(([sigmoid(logit + bias) for logit in logits], right))
    return rounds


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def seconds(costs: RoundCosts) -> list[float]:
    """Of a round that drafts, by the number of tokens verified."""
    return [costs.draft + t + costs.overhead for t in costs.verify]


def committed(right: list[bool], length: int) -> int:
    return 1 + next((k for k, good in enumerate(right[:length]) if not good), length)


def rate_of(lengths: list[int], rounds: list[Round], costs: RoundCosts) -> float:
    """Tokens per second if every round verifies so many tokens of its draft."""
    tokens = sum(committed(right, length) for length, (_, right) in zip(lengths, rounds, strict=True))
    return tokens / sum(seconds(costs)[length] for length in lengths)


def plain(rounds: list[Round], costs: RoundCosts) -> float:
    return 1 / (costs.verify[0] + costs.overhead)


def best_fixed(rounds: list[Round], costs: RoundCosts) -> float:
    """The fixed length that turns out best."""
    return max(rate_of([length] * len(rounds), rounds, costs) for length in range(LENGTH + 1))


def early_stop(rounds: list[Round], costs: RoundCosts) -> float:
    """The paper's algorithm 1: admit tokens while the round's own rate, E[τ] / t, rises."""

    def length(confidences: list[float]) -> int:
        rates = ratios(confidences, costs)
        return next((k for k in range(LENGTH) if rates[k + 1] <= rates[k]), LENGTH)

    return rate_of([length(confidences) for confidences, _ in rounds], rounds, costs)


def ratio_look_ahead(rounds: list[Round], costs: RoundCosts) -> float:
    """Stop where the round's own rate beats that of every longer draft, later confidences at their means."""
    means = [sum(c[k] for c, _ in rounds) / len(rounds) for k in range(LENGTH)]

    def length(confidences: list[float]) -> int:
        for k in range(LENGTH):
            rates = ratios(confidences[: k + 1] + means[k + 1 :], costs)
            if max(rates[k + 1 :]) < rates[k]:
                return k
        return LENGTH

    return rate_of([length(confidences) for confidences, _ in rounds], rounds, costs)


def ratios(confidences: list[float], costs: RoundCosts) -> list[float]:
    tokens = gains(confidences, [0.0] * (LENGTH + 1), 0.0)
    return [n / t for n, t in zip(tokens, seconds(costs), strict=True)]


def hardware_aware(
    rounds: list[Round], costs: RoundCosts, do_sample: bool = True, told: RoundCosts | None = None
) -> float:
    """The package's own, on a machine of such `costs`, with a profile that says what is `told`."""
    scheduler = HardwareAware(told or costs, LENGTH, do_sample)
    tokens = spent = 0.0
    for confidences, right in rounds:
        limit = count = scheduler.limit(LENGTH)
        for k in range(limit):
            if not scheduler.admits(k, confidences[k]):
                count = k
                break
        if limit and not do_sample:
            count = scheduler.keep(count)
        new = committed(right, count)
        took = seconds(costs)[count] if limit else costs.verify[0] + costs.overhead
        scheduler.observe(count, new - 1, took)
        tokens, spent = tokens + new, spent + took
    return tokens / spent


def greedy_optimum(rounds: list[Round], costs: RoundCosts) -> float:
    """The best that may be done with all confidences of a draft known: λ such that it is the rate that it leads to."""
    rate = 1 / costs.verify[0]
    for _ in range(20):
        values = [gains(confidences, seconds(costs), rate) for confidences, _ in rounds]
        rate = rate_of([max(range(LENGTH + 1), key=v.__getitem__) for v in values], rounds, costs)
    return max(rate, plain(rounds, costs))


def hardware_aware_greedy(rounds: list[Round], costs: RoundCosts) -> float:
    return hardware_aware(rounds, costs, do_sample=False)


POLICIES = {
    "plain": plain,
    "best fixed": best_fixed,
    "early stop": early_stop,
    "ratio look-ahead": ratio_look_ahead,
    "hardware-aware": hardware_aware,
    "… greedy": hardware_aware_greedy,
    "greedy optimum": greedy_optimum,
}


def scheduling_seconds(rounds: list[Round], costs: RoundCosts) -> float:
    """What the scheduler itself takes a round."""
    begin = time.perf_counter()
    hardware_aware(rounds, costs)
    return (time.perf_counter() - begin) / len(rounds)


# Many requests share one verification. Seconds of a round by its requests and by the tokens verified in all, one a
# request without drafts; survivals are a = c_1·…·c_k, (rounds, requests, slots).

BATCH_CURVES = {
    "smooth": lambda requests, tokens: 0.020 + 0.0001 * requests + 0.0002 * tokens,
    "linear": lambda requests, tokens: 0.004 + 0.0015 * tokens,
    "steps of sixteen": lambda requests, tokens: 0.016 + 0.004 * np.ceil(tokens / 16),
}
DRAFTING = 0.003  # seconds, and for each request a hundredth of it
BATCHES = (1, 4, 16, 64)


def batched_survivals(requests: int, rounds: int, seed: int) -> np.ndarray:
    played = [rounds_of("mixed", rounds, 1000 * seed + request) for request in range(requests)]
    return np.cumprod([[confidences for confidences, _ in request] for request in played], axis=2).transpose(1, 0, 2)


def batch_seconds(curve, requests: int) -> np.ndarray:
    """Of a drafted round, by the number of draft tokens verified in all."""
    tokens = requests + np.arange(requests * LENGTH + 1)
    return DRAFTING * (1 + requests / 100) + curve(requests, tokens)


def ranked(survivals: np.ndarray) -> np.ndarray:
    """E[τ] of a round by the number of tokens verified in all, likeliest first, so each after those it rests on."""
    best = -np.sort(-survivals.reshape(len(survivals), -1), axis=1)
    return survivals.shape[1] + np.pad(np.cumsum(best, axis=1), ((0, 0), (1, 0)))


def batch_rate(budgets: np.ndarray, expected: np.ndarray, seconds: np.ndarray) -> float:
    return np.take_along_axis(expected, budgets[:, None], 1).sum() / seconds[budgets].sum()


def batch_early_stop(expected: np.ndarray, seconds: np.ndarray) -> float:
    falls = np.diff(expected / seconds, axis=1) <= 0
    return batch_rate(np.where(falls.any(1), falls.argmax(1), falls.shape[1]), expected, seconds)


def best_budgets(expected: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The optimum over all budgets, with the λ that it leads to."""
    rate = expected[0, 0] / seconds[0]
    for _ in range(20):
        budgets = (expected - rate * seconds).argmax(1)
        rate = batch_rate(budgets, expected, seconds)
    return budgets


def hardware_aware_batch(survivals: np.ndarray, curve, seed: int = 0) -> float:
    """The package's own for sampling, which learns from what is accepted, and may not draft."""
    _, requests, slots = survivals.shape
    seconds, plain = batch_seconds(curve, requests), curve(requests, requests)
    costs = RoundCosts(DRAFTING * (1 + requests / 100), tuple(seconds - DRAFTING * (1 + requests / 100)))
    scheduler, draw = HardwareAwareBatch(lambda rows: costs, LENGTH, do_sample=True), np.random.default_rng(seed)
    tokens = spent = 0.0
    for survival in survivals:
        confidences = survival / np.pad(survival[:, :-1], ((0, 0), (1, 0)), constant_values=1.0)
        counts, going = np.zeros(requests, dtype=int), list(range(requests))
        drafting = any(scheduler.limits([LENGTH] * requests))
        for slot in range(slots if drafting else 0):
            admitted = scheduler.admits(slot, going, confidences[going, slot].tolist())
            going = [row for row, yes in zip(going, admitted) if yes]
            if not going:
                break
            counts[going] += 1
        wrong = draw.random(survival.shape) >= confidences
        accepted = np.minimum(np.where(wrong.any(1), wrong.argmax(1), slots), counts)
        took = seconds[counts.sum()] if drafting else plain
        scheduler.observe(counts.tolist(), accepted.tolist(), took)
        tokens += requests + survival[np.arange(slots) < counts[:, None]].sum()
        spent += took
    return tokens / spent


def batch_rates(survivals: np.ndarray, curve) -> dict[str, float]:
    """Expected tokens per second of the rules. "optimum" looks ahead and is for greedy decoding only."""
    rounds, requests, _ = survivals.shape
    seconds, expected = batch_seconds(curve, requests), ranked(survivals)
    uniform = requests + np.pad(np.cumsum(survivals.sum(1), axis=1), ((0, 0), (1, 0)))
    per_length = uniform.mean(0) / seconds[::requests]
    budgets = best_budgets(expected, seconds)
    stale = np.concatenate([budgets[:2], budgets[:-2]])
    return {
        "plain": requests / curve(requests, requests),
        "uniform length": per_length.max(),
        "early stop": batch_early_stop(expected, seconds),
        "stale budget": batch_rate(stale, expected, seconds),
        "hardware-aware": hardware_aware_batch(survivals, curve),
        "optimum": batch_rate(budgets, expected, seconds),
    }


def main(
    rounds: Annotated[int, typer.Option(help="Rounds to simulate.")] = 4000,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
) -> None:
    console = Console()
    table = Table(title="Tokens per second, one request", caption="hardware-aware: what `generate()` uses")
    for column in ("text", "costs", *POLICIES):
        table.add_column(column, justify="left" if column in ("text", "costs") else "right")
    for text in TEXTS:
        played = rounds_of(text, rounds, seed)
        for name, costs in CURVES.items():
            table.add_row(text, name, *(f"{policy(played, costs):.1f}" for policy in POLICIES.values()))
    console.print(table)

    table = Table(title="… told wrong things, against plain decoding")
    for column in ("text", "costs", "early stop", "hardware-aware"):
        table.add_column(column, justify="left" if column in ("text", "costs") else "right")
    costs = CURVES["smooth"]
    slow = RoundCosts(3 * costs.draft, costs.verify, costs.overhead)
    for text, what, played, here in (
        ("hard", "as told", rounds_of("hard", rounds, seed), costs),
        ("hard", "drafts three times as slow as told", rounds_of("hard", rounds, seed), slow),
        ("mixed", "drafts three times as slow as told", rounds_of("mixed", rounds, seed), slow),
        ("hard", "as told, confidence far too high", rounds_of("hard", rounds, seed, bias=2.0), costs),
        ("mixed", "as told, confidence far too high", rounds_of("mixed", rounds, seed, bias=2.0), costs),
        ("mixed", "as told, confidence far too low", rounds_of("mixed", rounds, seed, bias=-2.0), costs),
    ):
        base = plain(played, here)
        ours = hardware_aware(played, here, told=costs) / base
        table.add_row(text, what, f"{early_stop(played, here) / base:.3f}", f"{ours:.3f}")
    console.print(table)

    table = Table(
        title="Tokens per second, many requests", caption="expected; all but plain and hardware-aware always draft"
    )
    rules = ("plain", "uniform length", "early stop", "stale budget", "hardware-aware", "optimum")
    for column in ("costs", "requests", *rules):
        table.add_column(column, justify="left" if column == "costs" else "right")
    for name, curve in BATCH_CURVES.items():
        for requests in BATCHES:
            rates = batch_rates(batched_survivals(requests, 300, seed), curve)
            table.add_row(name, str(requests), *(f"{rate:.0f}" for rate in rates.values()))
    console.print(table)
    spent = scheduling_seconds(rounds_of("mixed", rounds, seed), CURVES["smooth"])
    console.print(f"Scheduling takes {1e6 * spent:.0f} µs a round.")


if __name__ == "__main__":
    typer.run(main)
