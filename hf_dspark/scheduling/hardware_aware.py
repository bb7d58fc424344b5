"""Verifying what raises the rate of tokens on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from .costs import RoundCosts
from .experience import Experience
from .schedulers import Scheduler


def gains(probabilities: Sequence[float], seconds: Sequence[float], rate: float) -> list[float]:
    """
    E[τ] - λ·t of a round, by the number of draft tokens that are verified.

    Args:
        probabilities: c_1, c_2, …, of each draft token to be accepted if those before it are.
        seconds: t of a round that verifies 0, 1, … draft tokens.
        rate: λ, tokens per second.
    """
    survival, tokens, values = 1.0, 1.0, [1.0 - rate * seconds[0]]
    for probability, t in zip(probabilities, seconds[1:], strict=False):
        survival *= probability
        tokens += survival
        values.append(tokens - rate * t)
    return values


def check(costs: RoundCosts, most: int) -> None:
    """
    Raises:
        ValueError: the costs do not reach as far as `most` draft tokens, or are no times.
    """
    if len(costs.verify) <= most:
        raise ValueError(
            f"The costs tell how long it takes to verify up to {len(costs.verify) - 1} draft tokens, this drafter "
            f"drafts {most}. Measure them again with this drafter."
        )
    if not all(0 < t < math.inf for t in costs.verify) or not 0 <= costs.draft + costs.overhead < math.inf:
        raise ValueError(f"The costs hold times that are none: {costs}. Measure them again.")


class HardwareAware(Scheduler):
    """
    Verifies as many draft tokens as pay, given what a round costs here (design: paper section 3.3).

    What counts is the rate in the long run, so the length ℓ of a draft maximises E[τ] - λ·t(ℓ), where λ is the rate of
    past rounds, at least that of plain decoding: a second spent on one more token has to bring as much as it would in
    any other round. Greedy, the whole block is drafted and cut at the optimum. Sampling, a draft ends where stopping
    beats every longer draft, with c_1..c_k known and later confidences as past rounds let expect them; so the rule
    sees beyond a step in the costs, yet depends on nothing that depends on x_k. A drafter without confidence head has
    its past acceptance by slot for confidences. Time that a cut saves counts less the spread of measured times.

    Drafting has to pay for itself, by a [`Ledger`]; so by these times generation takes longer than plain decoding by
    its allowance at most, and two rounds. Times are the profile's: load that slows everything alike scales λ down and
    t up and changes no decision.

    Args:
        costs: what the parts of a round take.
        length: at most so many tokens a round.
        do_sample: whether draft tokens are drawn, so that the causal rule binds.
        experience: of earlier requests, which this one adds to.

    Raises:
        ValueError: `costs` do not reach as far as `length`, or are no times.
    """

    reads_confidence: ClassVar[bool] = True

    def __init__(self, costs: RoundCosts, length: int, do_sample: bool, experience: Experience | None = None):
        check(costs, length)
        self.length = length
        self.costs = costs
        self.do_sample = do_sample
        self.plain = costs.overhead + costs.verify[0]  # seconds of a round without draft
        experience = experience or Experience(length)
        experience.begin_request()
        self._ledger, self._outlook = experience.ledger, experience.outlook
        self.limit(0)

    @property
    def rate(self) -> float:
        """λ: tokens per second of past rounds, and what plain decoding has at least."""
        return self._ledger.speedup / self.plain

    @property
    def price(self) -> float:
        """What a drafted round costs here and now, against the profile, if a plain round costs what it says."""
        return self._ledger.price

    def limit(self, room: int) -> int:
        most = min(self.length, room)
        self._probabilities: list[float] = []
        self._unpredicted: list[int] = []
        price, spread = self.price, min(self.costs.spread, 1.0)
        self._seconds = [price * (self.costs.draft + t + self.costs.overhead) for t in self.costs.verify[: most + 1]]
        self._cautious = [(1 - spread) * t + spread * self._seconds[-1] for t in self._seconds]
        self._drafting = most > 0 and self._ledger.allows()
        if self._drafting:
            # At the end of the text nothing is left to learn for: what is likely has to pay, not what is possible.
            hopes = [self._outlook.mean(slot) if most < self.length else 1.0 for slot in range(most)]
            self._drafting = max(gains(hopes, self._seconds, self.rate)) > 1 - self.rate * self.plain
        return most if self._drafting else 0

    def admits(self, slot: int, confidence: float | None) -> bool:
        if confidence is None:
            self._unpredicted.append(slot)
            confidence = self._outlook.mean(slot)
        else:
            self._outlook.learn(slot, confidence, self._probabilities[-1] if slot else None)
        self._probabilities.append(confidence)
        if not self.do_sample:
            return True
        expected = self._probabilities + self._outlook.after(slot, confidence)
        values = gains(expected, self._cautious, self.rate)
        return max(values[slot + 1 :]) >= values[slot]

    def keep(self, drafted: int) -> int:
        values = gains(self._probabilities[:drafted], self._cautious, self.rate)
        return max(range(drafted + 1), key=lambda length: (values[length], length))

    def observe(self, verified: int, accepted: int, seconds: float) -> None:
        for slot in self._unpredicted[: min(verified, accepted + 1)]:
            self._outlook.learn(slot, slot < accepted)
        spent = self._seconds[verified] if self._drafting else self.plain
        slowness = seconds / (spent / self.price if self._drafting else spent)
        self._ledger.book(self._drafting, 1 + accepted, spent / self.plain, slowness)
