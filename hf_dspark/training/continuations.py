"""Many prompts continued at once: a batch whose finished rows make room for the next prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from ..compat import CACHE


@dataclass
class Continuation:
    """
    A prompt and what the target writes behind it.

    Args:
        input_ids: token ids of the prompt.
        max_new_tokens: where the text is cut if no EOS token ends it.
        temperature: 0 is greedy.
        about: whatever the caller wants to find again.
        tokens: the token ids written so far, with the EOS token.
        finished: whether that is all.
    """

    input_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    about: Any = None
    tokens: list[int] = field(default_factory=list)
    finished: bool = False


class GrowingLayer(DynamicLayer):
    """A cache layer with room to grow: a step writes one column of a large batch instead of copying them all."""

    ROOM = 64

    def update(self, key_states, value_states, *args, **kwargs):
        held = self.get_seq_length()
        end = held + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [key_states[..., :0, :], value_states[..., :0, :]]
        for i, states in enumerate((key_states, value_states)):
            if self.buffers[i].shape[-2] < end:
                grown = states.new_empty(*states.shape[:2], end + self.ROOM, states.shape[-1])
                grown[..., :held, :] = self.buffers[i][..., :held, :]
                self.buffers[i] = grown
            self.buffers[i][..., held:end, :] = states
        self.keys, self.values = (buffer[..., :end, :] for buffer in self.buffers)
        return self.keys, self.values

    def replace(self, keep: torch.Tensor, first: int, newcomers: DynamicLayer | None) -> None:
        """Keep the rows `keep` from column `first` on, and add the rows of `newcomers`, aligned to the right."""
        self.buffers = [self.keys[keep, :, first:], self.values[keep, :, first:]]
        if newcomers is not None:
            self.buffers = [right_aligned(pair) for pair in zip(self.buffers, (newcomers.keys, newcomers.values))]
        self.keys, self.values = self.buffers


def right_aligned(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Tensors (rows, heads, columns, size) on top of one another, the narrower ones with zeros on the left."""
    width = max(part.shape[-2] for part in parts)
    return torch.cat([F.pad(part, (0, 0, width - part.shape[-2], 0)) for part in parts if len(part)])


def left_padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`input_ids` and `attention_mask` (R, T) of prompts."""
    width = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return input_ids, mask


@torch.no_grad()
def continuations(
    target: PreTrainedModel,
    next_prompt: Callable[[], Continuation | None],
    eos_token_ids: set[int],
    batch_size: int = 128,
    top_k: int = 50,
    generator: torch.Generator | None = None,
) -> Iterator[Continuation]:
    """
    Continue prompts until an EOS token or `max_new_tokens`; yields them as they finish, in no particular order.

    `next_prompt` is asked whenever rows are free, after the rows that freed them were yielded; `None` means that there
    is none for now, and the end if no row is left. Rows are replaced when an eighth of them have finished, because
    moving rows copies the cache. Every sampled token is one of the `top_k` likeliest.
    """
    device = target.device
    cache = Cache(layer_class_to_replicate=GrowingLayer)
    rows: list[Continuation] = []
    mask, logits = torch.zeros(0, 0, dtype=torch.long, device=device), torch.empty(0, device=device)

    def forward(input_ids: torch.Tensor, mask: torch.Tensor, cache: Cache) -> torch.Tensor:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        return target(
            input_ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, use_cache=True, **{CACHE: cache}
        ).logits[:, -1]

    while True:
        kept = [i for i, row in enumerate(rows) if not row.finished]
        if 8 * (len(rows) - len(kept)) >= batch_size or not kept:
            yield from (row for row in rows if row.finished)
            newcomers = list(islice(iter(next_prompt, None), batch_size - len(kept)))
            rows = [rows[i] for i in kept] + newcomers
            if not rows:
                return
            keep = torch.tensor(kept, dtype=torch.long, device=device)
            mask, logits = mask[keep], logits[keep]
            first = int(mask.any(0).long().argmax()) if kept else mask.shape[1]
            mask = mask[:, first:]
            theirs = None
            if newcomers:
                input_ids, new_mask = left_padded([row.input_ids for row in newcomers], device)
                theirs = Cache(layer_class_to_replicate=DynamicLayer)
                new_logits = forward(input_ids, new_mask, theirs)
                logits = torch.cat([logits, new_logits]) if kept else new_logits
                mask = right_aligned((mask[:, None, :, None], new_mask[:, None, :, None]))[:, 0, :, 0]
            if kept:
                for i, layer in enumerate(cache.layers):
                    layer.replace(keep, first, theirs.layers[i] if theirs else None)
            else:
                cache = Cache(layer_class_to_replicate=GrowingLayer)
                for i, layer in enumerate(theirs.layers):
                    cache.update(layer.keys, layer.values, i)
            del theirs
            temperature = torch.tensor([[row.temperature] for row in rows], device=device)

        best = logits.float().topk(min(top_k, logits.shape[-1]))
        choice = torch.multinomial((best.values / temperature.clamp(min=1e-3)).softmax(-1), 1, generator=generator)
        tokens = best.indices.gather(-1, torch.where(temperature > 0, choice, 0))
        for row, token in zip(rows, tokens[:, 0].tolist()):
            if not row.finished:
                row.tokens.append(token)
                row.finished = token in eos_token_ids or len(row.tokens) == row.max_new_tokens
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
        logits = forward(tokens, mask, cache)
