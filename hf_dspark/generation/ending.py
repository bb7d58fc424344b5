"""Where a text ends."""

from __future__ import annotations

import math

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


class Ending:
    """
    What a request's stopping criteria say about one text, token by token. The usual two, of length and of tokens that
    end a text, are answered without their tensor operations, which take longer than the rest of committing a token.
    """

    def __init__(self, stopping_criteria: StoppingCriteriaList):
        self._others = StoppingCriteriaList()
        self._max_length, self._last_tokens = math.inf, set()
        for criterion in stopping_criteria:
            if type(criterion) is EosTokenCriteria:
                self._last_tokens.update(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxLengthCriteria and not _warns(criterion):
                self._max_length = min(self._max_length, criterion.max_length)
            else:
                self._others.append(criterion)

    def __call__(self, text: torch.Tensor, scores: tuple | None) -> bool:
        """Whether the text (1, length) ends here."""
        stops = bool(self._others) and bool(self._others(text, scores).all())
        too_long = text.shape[1] >= self._max_length
        return stops or too_long or (bool(self._last_tokens) and int(text[0, -1]) in self._last_tokens)


def _warns(criterion: MaxLengthCriteria) -> bool:
    """Whether it may tell the user that a text is longer than the model was made for."""
    return (criterion.max_position_embeddings or math.inf) < criterion.max_length
