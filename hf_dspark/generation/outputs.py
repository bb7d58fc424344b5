"""What `return_dict_in_generate` returns: one entry per token, as in the other generation methods."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from ..compat import CACHE


class GenerationRecord:
    """Collects scores, logits, attentions and hidden states of committed tokens, as far as they were asked for."""

    def __init__(self, generation_config: GenerationConfig):
        wanted = generation_config.return_dict_in_generate
        self._return_dict = wanted
        self.scores: tuple | None = () if wanted and generation_config.output_scores else None
        self.logits: tuple | None = () if wanted and generation_config.output_logits else None
        self.attentions: tuple | None = () if wanted and generation_config.output_attentions else None
        self.hidden_states: tuple | None = () if wanted and generation_config.output_hidden_states else None
        self._prefill: ModelOutput | None = None

    def add(self, outputs: ModelOutput | None, scores: torch.Tensor, logits: torch.Tensor, row: int) -> None:
        """
        Add a token chosen with `scores` (1, V) from row `row` of `logits` (1, rows, V).

        The first token's attentions and hidden states are the whole prompt's, a later one's are its row of the
        verification forward, of which it could see all but the drafts behind it.
        """
        if not self._return_dict:
            return
        if self._prefill is None:
            self._prefill = outputs
        rows = logits.shape[1]
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits[:, row],)
        if self.hidden_states is not None:
            states = outputs.hidden_states
            if outputs is not self._prefill:
                states = tuple(layer[:, row : row + 1] for layer in states)
            self.hidden_states += (states,)
        if self.attentions is not None:
            attentions = outputs.attentions
            if outputs is not self._prefill:
                behind = rows - 1 - row
                attentions = tuple(layer[:, :, row : row + 1, : layer.shape[-1] - behind] for layer in attentions)
            self.attentions += (attentions,)

    @classmethod
    def of_batch(
        cls, generation_config: GenerationConfig, records: Sequence[GenerationRecord], length: int
    ) -> GenerationRecord:
        """The scores and logits (R, V) of `length` tokens of many rows; zeros where a row had ended before."""
        record = cls(generation_config)
        for name in ("scores", "logits"):
            rows = [getattr(one, name) for one in records]
            if rows[0] is not None:
                nothing = torch.zeros_like(rows[0][0])
                steps = ([row[step] if step < len(row) else nothing for row in rows] for step in range(length))
                setattr(record, name, tuple(torch.cat(step) for step in steps))
        return record

    def result(self, input_ids: torch.Tensor, cache: Cache | None) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """The sequence, or the output object with everything that was collected."""
        if not self._return_dict:
            return input_ids
        return GenerateDecoderOnlyOutput(
            sequences=input_ids,
            scores=self.scores,
            logits=self.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            **{CACHE: cache},
        )
