"""A record of what a drafter did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..modeling_dspark import DSparkModel


@dataclass
class Round:
    """
    One draft and its verification.

    Args:
        draft: the token ids sent to verification.
        confidence: the predicted probability of each to be accepted given that those before it were; empty without a
            confidence head.
        accepted: how many were accepted.
    """

    draft: list[int]
    confidence: list[float] = field(default_factory=list)
    accepted: int = 0


@contextmanager
def trace(drafter: DSparkModel) -> Iterator[list[Round]]:
    """Collect every round of the `generate()` calls made inside the `with` block; yields the list they go to."""
    outer, drafter.rounds = drafter.rounds, []
    try:
        yield drafter.rounds
    finally:
        drafter.rounds = outer


def acceptance_length(rounds: list[Round]) -> float:
    """Mean number of tokens that a verification commits: the accepted drafts and the target's own token."""
    return sum(1 + a_round.accepted for a_round in rounds) / max(len(rounds), 1)
