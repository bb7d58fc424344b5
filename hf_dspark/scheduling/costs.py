"""What a round costs on this machine, as a scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundCosts:
    """
    Seconds that the parts of a round take for one request.

    Args:
        draft: the draft of a block, with its heads.
        verify: by the number of draft tokens, 0 to γ, the target's forward pass over the anchor and so many drafts;
            never falling.
        overhead: what a round spends outside the two.
        spread: how far measured times of the same work lie apart, (p90 - p10) / median.
    """

    draft: float
    verify: tuple[float, ...]
    overhead: float = 0.0
    spread: float = 0.0
