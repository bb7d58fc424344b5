"""Verifying what raises the rate of tokens on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from .costs import RoundCosts
from .experience import Experience
from .schedulers import Scheduler
from .text_bias import TextBias


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
    any other round. A draft ends where stopping beats every longer draft, with c_1..c_k known and later confidences
    as past rounds let expect them; so the rule sees beyond a step in the costs, yet, sampling, depends on nothing that
    depends on x_k. Greedy, drafting on costs the time of the heads alone, for what was drafted is cut at the optimum;
    sampling, a slot that the heads have come to may still be left out for its confidence.
    Confidences are corrected by a [`TextBias`]; a drafter without confidence head has its past acceptance by slot for
    them. Time that a cut saves counts less what measured times may be off. Of the block no more rows are computed than
    were worth it, by [`BlockWidth`].

    Drafting has to pay for itself, by a [`Ledger`]; so by these times generation takes longer than plain decoding by
    its allowance at most, and a few rounds. Times are the profile's: load that slows everything alike scales λ down
    and t up and changes no decision.

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
        self.plain = costs.plain
        experience = experience or Experience(length)
        experience.begin_request()
        self._ledger, self._outlook, self._width = experience.ledger, experience.outlook, experience.width
        self._bias = TextBias(1)
        self.limit(0)

    @property
    def rate(self) -> float:
        """λ: tokens per second of past rounds, and what plain decoding has at least."""
        return self._ledger.rate / self.plain

    @property
    def price(self) -> float:
        """What a drafted round costs here and now, against the profile, if a plain round costs what it says."""
        return self._ledger.price

    def limit(self, room: int) -> int:
        most = min(self.length, room)
        width = self._width.choose(most, self.rate * self.price * self.costs.row)
        self._probabilities: list[float] = []
        self._unpredicted: list[int] = []
        self._count_costs(width)
        self._drafting = width > 0 and self._ledger.allows()
        if self._drafting:
            # At the end of the text nothing is left to learn for: what is likely has to pay, not what is possible.
            hopes = [self._outlook.mean(slot) if most < self.length else 1.0 for slot in range(width)]
            self._drafting = max(gains(hopes, self._seconds, self.rate)) > 1 - self.rate * self.plain
        return width if self._drafting else 0

    def _count_costs(self, width: int) -> None:
        """What this round takes, by the number of drafts, if its block has rows for `width` of them."""
        costs, price = self.costs, self.price
        self._head = price * costs.head
        fixed = costs.draft_without(rows=self.length - width, heads=self.length) + costs.overhead
        self._seconds = [price * (fixed + t) + self._head * n for n, t in enumerate(costs.verify[: width + 1])]
        self._cautious = costs.cautious(self._seconds).tolist()

    def goes_on(self, slot: int) -> bool:
        if not slot or not self._head or self._width.explores:
            return True
        stopping = self._values[slot] if self.do_sample else max(self._if_cut(self._values, slot))
        return max(self._values[slot + 1 :]) >= stopping

    def admits(self, slot: int, confidence: float | None) -> bool:
        if confidence is None:
            self._unpredicted.append(slot)
            probability = float(self._bias.correct(0, self._outlook.mean(slot)))
        else:
            probability = float(self._bias.correct(0, confidence))
            self._outlook.learn(slot, probability, self._probabilities[-1] if slot else None)
        self._probabilities.append(probability)
        expected = self._probabilities + self._outlook.after(slot, probability)
        self._values = gains(expected, self._cautious, self.rate)
        stopping = self._values[slot] - self.rate * self._head  # which has come to this slot
        return not self.do_sample or max(self._values[slot + 1 :]) >= stopping

    def keep(self, drafted: int) -> int:
        values = self._if_cut(gains(self._probabilities[:drafted], self._cautious, self.rate), drafted)
        return max(range(drafted + 1), key=lambda length: (values[length], length))

    def _if_cut(self, values: Sequence[float], drafted: int) -> list[float]:
        """Values by length, of a draft that the heads have come so far with."""
        return [value - self.rate * self._head * (drafted - n) for n, value in enumerate(values[: drafted + 1])]

    def observe(self, verified: int, accepted: int, seconds: float) -> None:
        for slot in range(min(verified, accepted + 1)):
            self._bias.learn(0, self._probabilities[slot], slot < accepted)
            if slot in self._unpredicted:
                self._outlook.learn(slot, slot < accepted)
        if self._drafting:
            self._learn_width(verified)
        left_out = len(self._probabilities) - verified  # slots that the heads came to for nothing
        spent = self._seconds[verified] + self._head * left_out if self._drafting else self.plain
        slowness = seconds / (spent / self.price if self._drafting else spent)
        self._ledger.book(self._drafting, 1 + accepted, spent / self.plain, slowness)

    def _learn_width(self, verified: int) -> None:
        """What slots brought; those behind the last row might have, if the draft went as far."""
        likely = self._probabilities[:verified]
        if 0 < verified == len(self._seconds) - 1:
            likely += self._outlook.after(verified - 1, likely[-1])
        seconds = [self.price * t + self._head * n for n, t in enumerate(self.costs.verify)]
        brought = np.zeros(self.length)
        brought[: len(likely)] = np.diff(np.maximum.accumulate(gains(likely, seconds, self.rate)))
        self._width.learn(brought)
