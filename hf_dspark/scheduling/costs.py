"""What a round costs on this machine, as a scheduler sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class RoundCosts:
    """
    Seconds that the parts of a round take, for one request or for R together.

    Args:
        draft: the draft of a block for each request, with its heads.
        verify: by the number of draft tokens of all requests, 0 to R·γ, the target's forward pass over the anchors
            and so many drafts; never falling.
        overhead: what a round spends outside the two.
        row: what a draft takes less for each row of the blocks that is not computed, without heads.
        head: what it takes less for each slot of the blocks that the heads do not come to.
        error: how far these may be off, relative to them.
    """

    draft: float
    verify: tuple[float, ...]
    overhead: float = 0.0
    error: float = 0.0
    row: float = 0.0
    head: float = 0.0

    @property
    def plain(self) -> float:
        """What a round without a draft takes."""
        return self.overhead + self.verify[0]

    def draft_without(self, rows: int, heads: int) -> float:
        """What a draft takes whose blocks lack so many rows, and whose heads so many slots."""
        return max(self.draft - rows * self.row - heads * self.head, 0.0)

    def cautious(self, seconds: Sequence[float] | np.ndarray) -> np.ndarray:
        """Times by length as far as they are certain: what a shorter draft saves counts less what these may be off."""
        error = min(self.error, 1.0)
        return (1 - error) * np.asarray(seconds) + error * seconds[-1]

    def in_proportion(self, rows: int) -> RoundCosts:
        """The costs for so many requests, where those for one are all that is known: each costs what one does."""
        drafts = np.arange(rows * (len(self.verify) - 1) + 1)
        verify = rows * np.interp(drafts / rows, np.arange(len(self.verify)), self.verify)
        scaled = {name: rows * getattr(self, name) for name in ("draft", "overhead", "row", "head")}
        return replace(self, verify=tuple(verify.tolist()), **scaled)
