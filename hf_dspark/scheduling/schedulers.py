"""Which draft tokens are worth verifying. Knows confidences, no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol


class Scheduler(Protocol):
    """
    Decides slot by slot, before the token of the slot is drawn.

    When sampling, whether x_k goes to verification may depend on what came before it and on nothing that comes later;
    asked in this order, a scheduler cannot look ahead.
    """

    reads_confidence: ClassVar[bool]

    def admits(self, slot: int, confidence: float | None) -> bool:
        """Whether to draft slot `slot` (from 0), accepted with probability `confidence` (`None`: not predicted)."""


@dataclass(frozen=True)
class FixedLength:
    """Always `length` tokens."""

    length: int
    reads_confidence: ClassVar[bool] = False

    def admits(self, slot: int, confidence: float | None) -> bool:
        return slot < self.length


@dataclass(frozen=True)
class ConfidenceThreshold:
    """At most `length` tokens, up to the first whose confidence is below `threshold`."""

    threshold: float
    length: int
    reads_confidence: ClassVar[bool] = True

    def admits(self, slot: int, confidence: float | None) -> bool:
        return slot < self.length and (confidence is None or confidence >= self.threshold)
