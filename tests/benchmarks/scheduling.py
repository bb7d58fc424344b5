"""
What schedulers make of one request, and rules for many, simulated: drafts that are right as often as their confidences
say, rounds that take what a cost curve says.

    python tests/benchmarks/scheduling.py [--rounds 4000] [--seed 0]
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from hf_dspark.scheduling.batch import BatchScheduler, EachRow, HardwareAwareBatch, allot
from hf_dspark.scheduling.costs import RoundCosts
from hf_dspark.scheduling.experience import Experience
from hf_dspark.scheduling.hardware_aware import HardwareAware, gains
from hf_dspark.scheduling.schedulers import FixedLength

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
    return 1 / costs.plain


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
            if not scheduler.goes_on(k) or not scheduler.admits(k, confidences[k]):
                count = k
                break
        if limit and not do_sample:
            count = scheduler.keep(count)
        new = committed(right, count)
        took = seconds(costs)[count] if limit else costs.plain
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


# Many requests in one batch, which has ended when the last of its texts has. Seconds of a verification by the requests
# and by the tokens of all of them, one a request without drafts.

BATCH_CURVES = {
    "smooth": lambda requests, tokens: 0.020 + 0.0001 * requests + 0.0002 * tokens,
    "linear": lambda requests, tokens: 0.004 + 0.0015 * tokens,
    "steps of sixteen": lambda requests, tokens: 0.016 + 0.004 * math.ceil(tokens / 16),
}
DRAFTING = 0.003  # seconds, and for each request a hundredth of it
BATCHES = (1, 4, 16, 64)
TOKENS = 200  # that each request asks for
REPEATS = 3


@cache
def batch_costs(curve: str, requests: int) -> RoundCosts:
    verify = tuple(BATCH_CURVES[curve](requests, requests + drafts) for drafts in range(requests * LENGTH + 1))
    return RoundCosts(DRAFTING * (1 + requests / 100), verify)


class Ranked(BatchScheduler):
    """Verifies what a rule allots to the rows, given survivals (R, slots) and seconds by the number of tokens."""

    reads_confidence = True

    def __init__(self, costs: Callable[[int], RoundCosts], rule: Callable[[np.ndarray, np.ndarray], np.ndarray]):
        self.costs, self.rule = costs, rule

    def limits(self, rooms: Sequence[int]) -> list[int]:
        self._survivals = np.full((len(rooms), LENGTH), -1.0)
        return [min(room, LENGTH) for room in rooms]

    def admits(self, slot: int, rows: Sequence[int], confidences: Sequence[float | None]) -> list[bool]:
        before = self._survivals[rows, slot - 1] if slot else 1.0
        self._survivals[rows, slot] = before * np.array(confidences)
        return [True] * len(rows)

    def keep(self, drafted: Sequence[int]) -> list[int]:
        costs = self.costs(len(drafted))
        return self.rule(self._survivals, costs.draft + np.array(costs.verify)).tolist()


def until_it_falls(survivals: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The early stop of the paper's algorithm 1."""
    rows, slots = survivals.shape
    ranked = np.argsort(-survivals, axis=None)[: np.count_nonzero(survivals >= 0)]
    tokens = rows + np.append(0.0, survivals.ravel()[ranked].cumsum())
    falls = np.diff(tokens / seconds[: len(tokens)]) <= 0
    budget = int(falls.argmax()) if falls.any() else len(falls)
    return np.bincount(ranked[:budget] // slots, minlength=rows)


def play_batch(
    scheduler: BatchScheduler, texts: Sequence[list[Round]], costs: Callable[[int], RoundCosts], tokens: int = TOKENS
) -> float:
    """
    Greedily decode texts side by side, each of which says what would be drafted at every place; seconds until the last
    has so many tokens, or has ended.
    """
    rows, places, seconds = list(range(len(texts))), [0] * len(texts), 0.0
    ends = [min(len(text), tokens) for text in texts]
    while rows:
        confidences, right = zip(*(texts[row][places[row]] for row in rows))
        limits = scheduler.limits([tokens - places[row] - 1 for row in rows])
        width, heads, counts = max(limits), 0, [0] * len(rows)
        for slot in range(width):
            if not scheduler.goes_on(slot):
                break
            going = [i for i, limit in enumerate(limits) if slot < limit]
            scheduler.admits(slot, going, [confidences[i][slot] for i in going])
            heads = slot + 1
            counts = [min(limit, heads) for limit in limits]
        counts = scheduler.keep(counts) if width else counts
        accepted = [
            min([*right[i], False].index(False), count, ends[row] - places[row] - 1)
            for i, (row, count) in enumerate(zip(rows, counts))
        ]
        here = costs(len(rows))
        slots = len(right[0])
        drafting = here.draft_without(rows=slots - width, heads=slots - heads) if width else 0.0
        took = drafting + here.verify[sum(counts)] + here.overhead
        scheduler.observe(counts, accepted, took)
        seconds += took
        for row, count in zip(rows, accepted):
            places[row] += 1 + count
        staying = [i for i, row in enumerate(rows) if places[row] < ends[row]]
        if len(staying) < len(rows):
            scheduler.select(staying)
            rows = [rows[i] for i in staying]
    return seconds


def batch_rates(curve: str, requests: int, seed: int) -> dict[str, float]:
    """Tokens per second of all requests together, by rule."""
    costs, experience = partial(batch_costs, curve), Experience(LENGTH)
    batches = [
        [rounds_of("mixed", TOKENS, 1000 * (REPEATS * seed + batch) + request) for request in range(requests)]
        for batch in range(REPEATS)
    ]

    def rate(scheduler: Callable[[], BatchScheduler]) -> float:
        return REPEATS * requests * TOKENS / sum(play_batch(scheduler(), texts, costs) for texts in batches)

    best = rate(lambda: EachRow(FixedLength(0)))
    rates = {"plain": best}
    rates["uniform length"] = max(rate(partial(EachRow, FixedLength(n))) for n in range(1, LENGTH + 1))
    rates["early stop"] = rate(lambda: Ranked(costs, until_it_falls))
    rates["hardware-aware"] = rate(lambda: HardwareAwareBatch(costs, LENGTH, do_sample=False, experience=experience))
    for _ in range(5):  # the λ that this leads to
        best = max(best, rate(partial(Ranked, costs, partial(allot, rate=best))))
    return rates | {"best budget": best}


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

    table = Table(title="Tokens per second, many requests", caption="best budget: for E[τ] - λ·t, told its own rate λ")
    for column in ("costs", "requests", "plain", "uniform length", "early stop", "hardware-aware", "best budget"):
        table.add_column(column, justify="left" if column == "costs" else "right")
    for curve in BATCH_CURVES:
        for requests in BATCHES:
            rates = batch_rates(curve, requests, seed)
            table.add_row(curve, str(requests), *(f"{rate:.0f}" for rate in rates.values()))
    console.print(table)
    spent = scheduling_seconds(rounds_of("mixed", rounds, seed), CURVES["smooth"])
    console.print(f"Scheduling takes {1e6 * spent:.0f} µs a round.")


if __name__ == "__main__":
    typer.run(main)
