"""What the drafter knows of the sequence: features of committed positions, encoded or still to be."""

from __future__ import annotations

import weakref

import torch

from ..backbone.context_cache import ContextCache
from ..modeling_dspark import DSparkModel, DSparkOutput


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

    def block_hidden(self, anchor: torch.Tensor) -> torch.Tensor:
        """Final hidden states (1, B, hidden_size) of the block at `anchor` (1, 1)."""
        drafter = self._drafter()
        pending = torch.cat(self._pending, dim=1)
        output: DSparkOutput = drafter(drafter.block_ids(anchor), pending, cache=self._cache)
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
