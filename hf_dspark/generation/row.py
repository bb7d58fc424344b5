"""A sequence of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList

from .outputs import GenerationRecord


@dataclass
class Row:
    """
    One sequence of a batch.

    Args:
        index: its place in the batch.
        text: what is committed (1, length), with the padding that the prompt had.
        offset: what the position of a token is beyond its place in the cache.
        logits_processor: the request's, as they are for this row.
        record: of its tokens.
        draft: what is proposed (1, ℓ).
        draft_scores: its scores (1, ℓ, V), when sampling.
        end: the length at which the stopping criteria said stop.
    """

    index: int
    text: torch.Tensor
    offset: int
    logits_processor: LogitsProcessorList
    record: GenerationRecord
    draft: torch.Tensor
    draft_scores: torch.Tensor | None = None
    end: int | None = None

    @property
    def length(self) -> int:
        return self.text.shape[1]
