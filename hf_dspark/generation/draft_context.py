"""What the drafter knows of the sequence: features of committed positions, encoded or still to be."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from ..backbone.attention_mask import attention_masks
from ..backbone.context_cache import ContextCache
from ..modeling_dspark import DSparkModel, DSparkOutput
from .ragged_cache import RaggedCache


class DraftContext:
    """
    The drafter's context for one sequence.

    It is left on the target's cache when `generate()` returns, so that a later turn which continues from that cache
    finds it there, with the token ids that tell whether it still belongs to what the cache holds.
    """

    ATTRIBUTE = "_dspark_context"

    def __init__(self, drafter: DSparkModel, start: int = 0):
        self._drafter = weakref.ref(drafter)
        self._cache = ContextCache(start)
        self._pending: list[torch.Tensor] = []  # features of rounds since the last draft
        self._token_ids: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Number of committed positions held."""
        return self._cache.length + sum(features.shape[1] for features in self._pending)

    def extend(self, features: torch.Tensor) -> None:
        """Add the features (1, rows, K * target_hidden_size) of the positions committed since."""
        self._pending.append(features)

    def block_hidden(self, anchor: torch.Tensor, num_draft_tokens: int | None = None) -> torch.Tensor:
        """Final hidden states (1, B, hidden_size) of the block at `anchor` (1, 1), or of what so many drafts need."""
        drafter = self._drafter()
        pending = torch.cat(self._pending, dim=1)
        output: DSparkOutput = drafter(drafter.block_ids(anchor, num_draft_tokens), pending, cache=self._cache)
        self._pending = [pending[:, :0]]
        return output.last_hidden_state

    def crop(self, length: int) -> None:
        """Forget all but the first `length` positions."""
        if self._pending:
            self._pending = [torch.cat(self._pending, dim=1)[:, : max(length - self._cache.length, 0)]]
        self._cache.crop(length)

    def attach(self, target_cache: object, token_ids: torch.Tensor) -> None:
        """Leave this context on the target's cache; `token_ids` (1, length) are those of its positions."""
        self._token_ids = token_ids
        setattr(target_cache, self.ATTRIBUTE, self)

    @classmethod
    def detach(
        cls, target_cache: object, drafter: DSparkModel, length: int, token_ids: torch.Tensor | None
    ) -> DraftContext | None:
        """
        Take back the context left on a cache that now holds `length` positions, cut to these.

        `None` if there is none, or if it is another drafter's, too short, or of other tokens than `token_ids`
        (1, length); without token ids, what the cache holds is taken to be what was left there.
        """
        context = getattr(target_cache, cls.ATTRIBUTE, None)
        if context is None:
            return None
        delattr(target_cache, cls.ATTRIBUTE)
        if context._drafter() is not drafter or context.length < length or context._cache.start:
            return None
        if token_ids is not None and not torch.equal(context._token_ids[:, :length], token_ids):
            return None
        context.crop(length)
        return context


class RaggedContext:
    """The drafter's contexts for R sequences, each as long as it is."""

    def __init__(self, drafter: DSparkModel, rows: int):
        self._drafter = drafter
        self.device, self.dtype = drafter.device, drafter.dtype
        self._cache = RaggedCache(rows)
        self._pending: list[list[torch.Tensor]] = [[] for _ in range(rows)]

    def extend(self, row: int, features: torch.Tensor) -> None:
        """Add the features (rows, K * target_hidden_size) of the positions of one sequence committed since."""
        self._pending[row].append(features)

    def crop(self, count: int) -> None:
        """Forget the last `count` positions of each sequence, of those that were encoded."""
        self._cache.crop([count] * len(self._pending))

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these sequences only, in this order."""
        self._cache.select(rows)
        self._pending = [self._pending[row] for row in rows]

    def block_hidden(self, anchors: torch.Tensor, num_draft_tokens: int | None = None) -> torch.Tensor:
        """Final hidden states (R, B, hidden_size) of the blocks at `anchors` (R, 1), or what so many drafts need."""
        drafter, device = self._drafter, anchors.device
        pending = [torch.cat(features) for features in self._pending]
        counts = [len(features) for features in pending]
        held, new = torch.tensor([self._cache.lengths, counts], device=device)[:, :, None]
        # Columns: every row's context, all blocks in the same place behind it, and what only fills up at the end.
        blocks = drafter.block_ids(anchors, num_draft_tokens)
        size, width = blocks.shape[1], max(counts)
        longest = max(length + count for length, count in zip(self._cache.lengths, counts))
        context, block = torch.arange(width, device=device), torch.arange(size, device=device)
        places = torch.where(context < new, held + context, longest + size + context)
        columns = torch.cat([places, (longest + block).expand(len(counts), -1)], dim=1)
        rows = torch.arange(len(counts), device=device).repeat_interleave(width + size)
        self._cache.begin(counts, rows, columns.flatten(), end=longest + size, capacity=longest + size + width)
        positions = held + new + block
        masks = attention_masks(
            drafter.attention_patterns, positions, torch.arange(longest, device=device)[None], size, drafter.dtype
        )
        output: DSparkOutput = drafter(
            blocks,
            pad_sequence(pending, batch_first=True),
            position_ids=torch.cat([held + context, positions], dim=1),
            attention_mask=masks,
            cache=self._cache,
        )
        self._pending = [[features[:0]] for features in pending]
        return output.last_hidden_state
