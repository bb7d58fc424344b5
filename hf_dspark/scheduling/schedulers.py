"""Which draft tokens are worth verifying. Knows confidences, no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class Scheduler:
    """
    Asked in the order of its methods, once a round and once a slot, before the token of the slot is drawn.

    When sampling, whether x_k goes to verification may depend on what came before it and on nothing that comes later;
    asked in this order, a scheduler cannot look ahead. Rounds that are over are free to use.
    """

    length: int  # at most so many tokens a round
    reads_confidence: ClassVar[bool] = False

    def limit(self, room: int) -> int:
        """How many tokens the round that begins may draft, if `room` are left for it; 0 decodes plainly."""
        return min(self.length, room)

    def goes_on(self, slot: int) -> bool:
        """Whether the heads come to slot `slot` (from 0), now that those before it are drafted."""
        return True

    def admits(self, slot: int, confidence: float | None) -> bool:
        """Whether to draft slot `slot` (from 0), accepted with probability `confidence` (`None`: not predicted)."""
        return True

    def keep(self, drafted: int) -> int:
        """How many of the `drafted` tokens to verify. Asked when greedy only, where any truncation is lossless."""
        return drafted

    def observe(self, verified: int, accepted: int, seconds: float) -> None:
        """Learn how the round ended: `accepted` of `verified` draft tokens, `seconds` after it began."""


@dataclass(frozen=True)
class FixedLength(Scheduler):
    """Always `length` tokens."""

    length: int


@dataclass(frozen=True)
class ConfidenceThreshold(Scheduler):
    """At most `length` tokens, up to the first whose confidence is below `threshold`."""

    threshold: float
    length: int
    reads_confidence: ClassVar[bool] = True

    def admits(self, slot: int, confidence: float | None) -> bool:
        return confidence is None or confidence >= self.threshold
