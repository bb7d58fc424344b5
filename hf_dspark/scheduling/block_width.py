"""How many rows of a draft block are worth computing, which has to be settled before anything is drafted."""

from __future__ import annotations

import numpy as np

from .outlook import Average

WHOLE_AT_FIRST = 8  # drafted rounds with whole blocks before any other
WHOLE_AGAIN = 32  # drafted rounds from one whole block to the next


class BlockWidth:
    """
    Knows what each slot brought in past rounds, in tokens and beyond what it cost to verify; a slot is worth its row
    while it brings more than the row's time would elsewhere. What it goes by are rounds that are over, so it is
    lossless when sampling, too.

    Args:
        length: slots of a whole block.
    """

    def __init__(self, length: int):
        self._gains = Average(np.zeros(length), weight=0.01)
        self._rounds = 0

    @property
    def explores(self) -> bool:
        """Whether the round is one of those that show what late slots are like by now."""
        return self._rounds < WHOLE_AT_FIRST or self._rounds % WHOLE_AGAIN == 0

    def choose(self, most: int, cost: float) -> int:
        """
        How many slots the round that begins should have rows for, 1 to `most`.

        Args:
            cost: of a row, in tokens of that time.
        """
        if not most or not cost or self.explores:
            return most
        net = np.cumsum(self._gains.value[:most] - cost)
        return most - int(net[::-1].argmax())

    def learn(self, gains: np.ndarray) -> None:
        """Take in what each slot (γ,) of a drafted round brought, a request."""
        self._gains.add(gains)
        self._rounds += 1
