"""What past rounds say of the slots to come."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

Value = TypeVar("Value", float, np.ndarray)  # of one row, or of each of several

MEMORY = 64  # rounds that averages reach back
PRIOR = 4  # rounds that what is assumed at first weighs
UNSEEN = 0.7  # acceptance assumed of a slot that no round has reached


class Average(Generic[Value]):
    """A weighted mean in which older entries fade; `start` counts like an entry of the past with weight `weight`."""

    def __init__(self, start: Value, weight: float = PRIOR):
        self._sum: Value = start * weight
        self._weight = weight

    def add(self, value: Value, weight: float = 1.0) -> None:
        self._sum = value * weight + (1 - 1 / MEMORY) * self._sum
        self._weight = weight + (1 - 1 / MEMORY) * self._weight

    @property
    def value(self) -> Value:
        return self._sum / self._weight


class Outlook:
    """
    Expects of a later slot what it had in past rounds, and more if the slot at hand is better than it was in those.

    It is a regression: E[c_j | c_k] = mean_j + β·(c_k - mean_k), with one slope β, learned from neighbouring slots.
    Its means are of rounds that went beyond slot k, which they do because c_k is high; so mean_k is theirs, too.
    """

    def __init__(self, length: int):
        self._reached = [Average(UNSEEN) for _ in range(length)]  # of a slot, in rounds that reached it
        self._passed = [Average(UNSEEN) for _ in range(length)]  # of a slot, in rounds that went beyond it
        self._covariance, self._variance = Average(0.0), Average(0.05)

    def mean(self, slot: int) -> float:
        return self._reached[slot].value

    def learn(self, slot: int, value: Value, before: Value | None = None) -> None:
        """Take in the `value` of a slot, with that of the slot `before` in that round; several rows are one entry."""
        if before is not None:
            passed = self._passed[slot - 1]
            deviation = before - passed.value
            self._covariance.add(_mean(deviation * (value - self.mean(slot))))
            self._variance.add(_mean(deviation**2))
            passed.add(_mean(before))
        self._reached[slot].add(_mean(value))

    def after(self, slot: int, value: float) -> list[float]:
        """Values expected of the slots after `slot`, in a round where it has `value`."""
        shift = self._slope * (value - self._passed[slot].value)
        return [min(max(later.value + shift, 0.0), 1.0) for later in self._reached[slot + 1 :]]

    def after_each(self, slot: int, values: np.ndarray) -> np.ndarray:
        """The same for each of several rows: (rows, slots after)."""
        later = np.array([average.value for average in self._reached[slot + 1 :]])
        shift = self._slope * (values - self._passed[slot].value)
        return np.minimum(np.maximum(later + shift[:, None], 0.0), 1.0)  # faster than `clip`

    @property
    def _slope(self) -> float:
        return self._covariance.value / self._variance.value


def _mean(value: Value) -> float:
    return float(np.add.reduce(value)) / len(value) if isinstance(value, np.ndarray) else value  # faster than `mean`
