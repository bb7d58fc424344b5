"""How far the drafts of a text are better, or worse, than their confidences say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PRIOR = 8.0  # of the information that a text's bias is none
SURE = 1e-6  # confidences are no closer to 0 and 1


class TextBias:
    """
    Shifts the logits of a text's confidences by what its own past rounds say. Confidences are right on average over
    texts; in hard ones they are too high, in every slot, and in easy ones too low.

    It is a logistic regression with the shift for its only parameter and a normal prior around none, updated with one
    Newton step for each verdict; the information of all verdicts so far says how long the step is.

    Args:
        texts: how many there are.
    """

    def __init__(self, texts: int):
        self._shift, self._information = np.zeros(texts), np.full(texts, PRIOR)

    def correct(self, rows: int | np.ndarray, confidences: float | Sequence[float]) -> np.ndarray:
        """The probabilities that drafts of these `rows`, one of each, are accepted."""
        sure = np.minimum(np.maximum(confidences, SURE), 1 - SURE)
        return 1 / (1 + (1 / sure - 1) * np.exp(-self._shift[rows]))

    def learn(self, rows: int | np.ndarray, probabilities: float | np.ndarray, accepted: bool | np.ndarray) -> None:
        """Take in whether drafts that were given these, corrected, probabilities were accepted, one a row."""
        self._information[rows] += probabilities * (1 - probabilities)
        self._shift[rows] += (accepted - probabilities) / self._information[rows]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these of the texts only."""
        self._shift, self._information = self._shift[rows], self._information[rows]
