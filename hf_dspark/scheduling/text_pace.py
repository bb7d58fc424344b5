"""How fast the texts of a batch get on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PRIOR = 8.0  # rounds that the mean of all texts weighs


class TextPace:
    """
    How many tokens a round with drafts brings each text: its own past rounds say so, and while they are few, those of
    all.

    Args:
        texts: how many there are.
    """

    def __init__(self, texts: int):
        self._tokens, self._rounds = np.zeros(texts), 0

    def each(self) -> np.ndarray:
        """Tokens a round (R,)."""
        if not self._rounds:
            return np.ones(len(self._tokens))
        common = self._tokens.mean() / self._rounds
        return (self._tokens + PRIOR * common) / (self._rounds + PRIOR)

    def learn(self, tokens: np.ndarray) -> None:
        """Take in what a round brought (R,)."""
        self._tokens += tokens
        self._rounds += 1

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these of the texts only."""
        self._tokens = self._tokens[rows]
