"""Which draft tokens of many rows are worth verifying: one budget, given to those likeliest to be accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from .costs import RoundCosts
from .experience import Experience
from .hardware_aware import check
from .schedulers import Scheduler
from .text_bias import TextBias
from .text_pace import TextPace

SPREAD = 0.4  # of what the last row takes: so far apart, rows still count almost the same


class BatchScheduler:
    """
    A [`Scheduler`] for many rows, asked in the order of its methods, once a round and once a slot.

    When sampling, whether x_k of a row goes to verification may depend on what came before slot k in all rows, and on
    their confidences up to c_k; nothing of this depends on x_k.
    """

    reads_confidence: bool = False

    def limits(self, rooms: Sequence[int]) -> list[int]:
        """How many tokens each row may draft in the round that begins, if so many are left for it."""
        raise NotImplementedError

    def goes_on(self, slot: int) -> bool:
        """Whether the heads come to slot `slot` (from 0) of the rows that still draft."""
        return True

    def admits(self, slot: int, rows: Sequence[int], confidences: Sequence[float | None]) -> list[bool]:
        """Whether to draft slot `slot` of each of `rows`, those that still draft, given its confidence there."""
        raise NotImplementedError

    def keep(self, drafted: Sequence[int]) -> list[int]:
        """How many of each row's `drafted` tokens to verify. Asked when greedy only."""
        return list(drafted)

    def observe(self, verified: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        """Learn how the round ended, for each row and in all."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these of the rows only, by their numbers, in this order; some may have left before any draft."""


class EachRow(BatchScheduler):
    """A scheduler that decides about every row for itself and remembers nothing of it."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.reads_confidence = scheduler.reads_confidence

    def limits(self, rooms: Sequence[int]) -> list[int]:
        return [self.scheduler.limit(room) for room in rooms]

    def admits(self, slot: int, rows: Sequence[int], confidences: Sequence[float | None]) -> list[bool]:
        return [self.scheduler.admits(slot, confidence) for confidence in confidences]

    def keep(self, drafted: Sequence[int]) -> list[int]:
        return [self.scheduler.keep(count) for count in drafted]


def weights(left: np.ndarray, pace: np.ndarray) -> np.ndarray:
    """
    What a token of each row is worth, 1 on average, higher in rows that are behind: a batch takes as many rounds as
    its last row, and this is how a soft maximum of rounds falls with a row's tokens.

    Args:
        left: tokens that each row has left (R,).
        pace: tokens that a round brings it (R,).
    """
    rounds = left / pace
    slopes = np.exp((rounds - rounds.max()) / (1 + SPREAD * rounds.max())) / pace
    return slopes * len(left) / slopes.sum()


def allot(values: np.ndarray, seconds: np.ndarray, rate: float) -> np.ndarray:
    """
    The lengths (R,) of drafts that maximise Σv - λ·t, the best of all: the most valuable tokens of all rows, as long
    as they pay together. Values fall along a row, so the best are prefixes.

    Args:
        values: v (R, slots), each token's probability to be accepted with all before it, times the weight of its row;
            negative where there is no token.
        seconds: t of verifying 0, 1, … of these tokens.
        rate: λ, tokens per second.
    """
    rows, slots = values.shape
    ranked = np.argsort(-values, axis=None)[: np.count_nonzero(values >= 0)]
    gains = values.ravel()[ranked].cumsum() - rate * (seconds[1 : len(ranked) + 1] - seconds[0])
    best = len(gains) - int(gains[::-1].argmax()) if len(gains) else 0
    if best and gains[best - 1] < 0:
        best = 0
    return np.bincount(ranked[:best] // slots, minlength=rows)


class HardwareAwareBatch(BatchScheduler):
    """
    Verifies as many draft tokens of all rows as pay together, the likeliest first (design: paper, algorithm 1).

    The rule is that of [`HardwareAware`], the most of E[τ] - λ·t, where t is the time of the common round and τ the
    tokens of all rows. What a caller waits for is the last row, so tokens of rows that are behind count for more, by
    [`weights`] and each text's [`TextPace`], and the more so towards the end; λ is in tokens that count so. Each text
    has a [`TextBias`]. The heads go on to the next slot, of all rows, while that is expected to pay. Greedy, all rows
    draft as far and are cut at the optimum. Sampling, the optimum is looked for at every slot, with the confidences of
    all rows up to there and those of later slots as expected; a row drafts on if its token is part of it. Blocks are
    as wide as their rows were worth it, by [`BlockWidth`]. As rows compete for the same time, the more there are, the
    less of each is verified.

    Args:
        costs: what the parts of a round take, by the number of rows.
        length: at most so many tokens a row and round.
        do_sample: whether draft tokens are drawn, so that the causal rule binds.
        experience: of earlier batches, which this one adds to.

    Raises:
        ValueError: the costs do not reach as far as `length`, or are no times.
    """

    reads_confidence = True

    def __init__(
        self,
        costs: Callable[[int], RoundCosts],
        length: int,
        do_sample: bool,
        experience: Experience | None = None,
    ):
        check(costs(1), length)
        self.costs = cache(costs)
        self._verify = cache(lambda rows: np.array(costs(rows).verify))
        self.length = length
        self.do_sample = do_sample
        experience = experience or Experience(length)
        experience.begin_request()
        self._ledger, self._outlook, self._width = experience.ledger, experience.outlook, experience.width
        self._bias: TextBias | None = None  # the rows are not known yet

    def limits(self, rooms: Sequence[int]) -> list[int]:
        rows, costs = len(rooms), self.costs(len(rooms))
        most = np.minimum(rooms, self.length)
        if self._bias is None:
            self._bias, self._pace = TextBias(rows), TextPace(rows)
        self._left = np.array(rooms) + 1.0
        self._weights = weights(self._left, self._pace.each())
        self._plain = costs.plain
        self._rate = self._ledger.rate * rows / self._plain
        cost = self._rate * self._ledger.price * (costs.row + costs.head) / rows
        width = self._width.choose(int(most.max()), cost)
        self._begin(np.minimum(most, width))
        self._drafting = width > 0 and self._ledger.allows()
        if self._drafting:
            # At the end of a text nothing is left to learn for: what is likely has to pay, not what is possible.
            likely = np.array([self._outlook.mean(slot) for slot in range(self.length)])
            hopes = np.where((most < self.length)[:, None], likely, 1.0).cumprod(1) * self._weights[:, None]
            hopes[self._beyond] = -1.0
            lengths = allot(hopes, self._seconds, self._rate)
            tokens = hopes[np.arange(self.length) < lengths[:, None]].sum()
            self._drafting = bool(tokens > self._rate * (self._spent(lengths.sum(), lengths.max()) - self._plain))
        return np.minimum(most, width).tolist() if self._drafting else [0] * rows

    def _begin(self, most: np.ndarray) -> None:
        """A round with blocks of which so many slots (R,) can be drafted."""
        costs, price = self.costs(len(most)), self._ledger.price
        fixed = costs.draft_without(rows=self.length - int(most.max()), heads=self.length) + costs.overhead
        self._head = price * costs.head
        self._seconds = price * (fixed + self._verify(len(most))[: most.sum() + 1])  # but for the heads
        self._cautious = costs.cautious(self._seconds)
        self._beyond = np.arange(self.length) >= most[:, None]
        self._values = np.where(self._beyond, -1.0, 0.0)  # of tokens: survivals by the weights of rows
        self._likely = np.zeros(self._values.shape)  # to be accepted, if those before it are
        self._unpredicted: list[int] = []
        self._admitted = self._heads = 0

    def _spent(self, verified: int, heads: int) -> float:
        """What the round takes, with so many drafts verified and so many slots that the heads came to."""
        return self._seconds[verified] + self._head * heads

    def goes_on(self, slot: int) -> bool:
        if not slot or not self._head or self._width.explores:
            return True
        more = len(self._cautious) - 1 - self._admitted
        price = (self._cautious[-1] - self._cautious[self._admitted]) / max(more, 1)  # of a token, about
        brought = np.maximum(self._later - self._rate * price, 0.0).sum(0) - self._rate * self._head
        return bool(brought.cumsum().max() > 0)

    def admits(self, slot: int, rows: Sequence[int], confidences: Sequence[float | None]) -> list[bool]:
        index = np.array(rows)
        if confidences[0] is None:
            self._unpredicted.append(slot)
            values = self._bias.correct(index, [self._outlook.mean(slot)] * len(index))
        else:
            values = self._bias.correct(index, confidences)
            self._outlook.learn(slot, values, self._likely[index, slot - 1] if slot else None)
        self._likely[index, slot] = values
        here = values * (self._values[index, slot - 1] if slot else self._weights[index])
        self._values[index, slot] = here
        self._heads = slot + 1
        later = self._outlook.after_each(slot, values)
        expected = np.concatenate([here[:, None], later], 1).cumprod(1)
        expected[self._beyond[index, slot:]] = -1.0
        admitted = np.full(len(index), True)
        if self.do_sample:
            admitted = allot(expected, self._cautious[self._admitted :], self._rate) > 0
        self._admitted += int(admitted.sum())
        self._later = expected[admitted, 1:]
        return admitted.tolist()

    def keep(self, drafted: Sequence[int]) -> list[int]:
        self._values[np.arange(self.length) >= np.array(drafted)[:, None]] = -1.0
        return allot(self._values, self._cautious, self._rate).tolist()

    def observe(self, verified: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        lengths, right = np.array(verified), np.array(accepted)
        for slot in range(lengths.max()):
            reached = np.flatnonzero((lengths > slot) & (right >= slot))
            if not len(reached):
                break
            good = (right[reached] > slot).astype(float)
            self._bias.learn(reached, self._likely[reached, slot], good)
            if slot in self._unpredicted:
                self._outlook.learn(slot, good)
        if self._drafting:
            self._learn_width(lengths, right)
            self._pace.learn(1 + right)
        spent = self._spent(lengths.sum(), self._heads) if self._drafting else self._plain
        progress = self._left.max() - (self._left - 1 - right).max()  # 1 without drafts, and so is that of all rows
        worth = float(self._weights @ (1 + right)) / len(right)
        slowness = seconds / (spent / self._ledger.price if self._drafting else spent)
        self._ledger.book(self._drafting, progress, spent / self._plain, slowness, worth)

    def select(self, rows: Sequence[int]) -> None:
        if self._bias is not None:
            self._bias.select(rows)
            self._pace.select(rows)

    def _learn_width(self, lengths: np.ndarray, right: np.ndarray) -> None:
        """What slots brought, where tokens share the time that all took; those behind the last row might have."""
        slots, width, total = np.arange(self.length), int((~self._beyond).sum(1).max()), int(lengths.sum())
        price = self._rate * (self._seconds[total] - self._seconds[0]) / max(total, 1)
        accepted = np.where(slots < right[:, None], self._weights[:, None], 0.0)
        brought = np.where(slots < lengths[:, None], accepted - price, 0.0)
        if width < self.length and (whole := lengths == width).any():
            later = self._outlook.after_each(width - 1, self._likely[whole, width - 1]).cumprod(1)
            brought[whole, width:] = np.maximum(later * self._values[whole, width - 1 : width] - price, 0.0)
        self._width.learn(brought.mean(0))
