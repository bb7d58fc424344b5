"""A key/value cache with a length per row, filled by passes over the tokens of all rows, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch


@dataclass
class Flattened:
    """
    Which of the N tokens of a pass belongs where; tensors are (N,), tokens of a row follow each other.

    Args:
        counts: tokens of each row in this pass.
        lengths: tokens that each row's cache held before.
        rows: the row of a token.
        slots: its place among the tokens of its row.
        columns: its place in the cache of its row.
    """

    counts: list[int]
    lengths: list[int]
    rows: torch.Tensor
    slots: torch.Tensor
    columns: torch.Tensor
    _known_places: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Flattened:
        sizes, held = torch.tensor(counts), torch.tensor(lengths)
        rows = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        slots = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[rows]
        return cls(list(counts), list(lengths), *torch.stack([rows, slots, held[rows] + slots]).to(device))

    @cached_property
    def width(self) -> int:
        """The most tokens that a row has in this pass."""
        return max(self.counts)

    @property
    def longest(self) -> int:
        """The most columns that a row of the cache has after this pass."""
        return max(held + count for held, count in zip(self.lengths, self.counts))

    @cached_property
    def even(self) -> bool:
        """Whether all rows have equally many tokens in this pass."""
        return min(self.counts) == self.width

    def last(self) -> torch.Tensor:
        """Where each row's last token is among the N, (R,)."""
        return (torch.tensor(self.counts).cumsum(0) - 1).to(self.rows.device)

    def _places(self, heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Where what rows of one width and heads consist of is among the heads of all tokens, (R · heads · width,), and
        the way back, (N · heads,). Rows that are shorter end in their last token again.
        """
        if (heads, device) not in self._known_places:
            counts, each = torch.tensor(self.counts, device=device)[:, None], torch.arange(heads, device=device)
            slots = torch.minimum(torch.arange(self.width, device=device), counts - 1)
            tokens = (counts.cumsum(0) - counts + slots).clamp(min=0)
            there = tokens[:, None] * heads + each[:, None]
            back = (self.rows.to(device)[:, None] * heads + each) * self.width + self.slots.to(device)[:, None]
            self._known_places[heads, device] = there.flatten(), back.flatten()
        return self._known_places[heads, device]

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """States (1, heads, N, head_dim) by row, (R, heads, width, head_dim); anything where a row has none."""
        _, heads, _, size = states.shape
        there, _ = self._places(heads, states.device)
        by_row = states[0].transpose(0, 1).reshape(-1, size).index_select(0, there)
        return by_row.view(len(self.counts), heads, self.width, size)

    def unpad(self, states: torch.Tensor) -> torch.Tensor:
        """The way back, from (R, heads, width, head_dim) to (1, N, heads, head_dim)."""
        heads, size = states.shape[1], states.shape[3]
        _, back = self._places(heads, states.device)
        return states.reshape(-1, size).index_select(0, back).view(1, -1, heads, size)


class RaggedCache:
    """
    Keys and values of R rows, each as long as it is.

    A pass begins with [`begin`], which says where its tokens go; every layer hands them over with [`update`], as it
    would to a cache of transformers, and gets those of all rows, padded behind; [`keep`] says how many stay. The
    buffers grow by doubling; what is taken back is written over later.

    Args:
        rows: R.
    """

    is_compileable = False

    def __init__(self, rows: int):
        self.lengths = [0] * rows
        self._buffers: dict[int, list[torch.Tensor]] = {}  # by layer: keys, values
        self._rows = self._columns = torch.empty(0, dtype=torch.long)
        self._counts: list[int] = []
        self._end = self._capacity = 0

    def begin(
        self,
        counts: Sequence[int],
        rows: torch.Tensor,
        columns: torch.Tensor,
        end: int,
        capacity: int | None = None,
    ) -> None:
        """
        Say where the tokens of the coming pass go.

        Args:
            counts: tokens of each row that may stay.
            rows, columns: the place (N,) of every token.
            end: what lies before this column is read.
            capacity: no column is as large as this (default: `end`).
        """
        self._counts, self._rows, self._columns = list(counts), rows, columns
        self._end, self._capacity = end, capacity or end

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Write the states of the N tokens, (1, kv heads, N, head_dim) or (R, kv heads, N / R, head_dim); returns the
        views (R, kv heads, end, head_dim) of all.
        """
        rows, columns = self._rows.to(keys.device), self._columns.to(keys.device)
        buffers = self._buffers.setdefault(layer_idx, [])
        for i, states in enumerate((keys, values)):
            if i == len(buffers):
                buffers.append(states.new_zeros(len(self.lengths), states.shape[1], 0, states.shape[3]))
            if buffers[i].shape[2] < self._capacity:  # what was never written is masked, but must be a number
                held = buffers[i][:, :, : max(self.lengths)]
                grown = held.new_zeros(*held.shape[:2], 2 * self._capacity, held.shape[3])
                grown[:, :, : held.shape[2]] = held
                buffers[i] = grown
            buffers[i][rows, :, columns] = states.transpose(1, 2).flatten(0, 1)
        return buffers[0][:, :, : self._end], buffers[1][:, :, : self._end]

    def keep(self, counts: Sequence[int] | int) -> None:
        """Keep the first so many tokens of each row that were written last; all of a row that had fewer."""
        if isinstance(counts, int):
            counts = [counts] * len(self.lengths)
        self.lengths = [
            held + min(count, written) for held, count, written in zip(self.lengths, counts, self._counts, strict=True)
        ]

    def crop(self, counts: Sequence[int]) -> None:
        """Take back so many tokens of each row."""
        self.lengths = [held - count for held, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order; those that keep their place are not copied."""
        self.lengths = [self.lengths[row] for row in rows]
        longest = max(self.lengths, default=0)
        places = [place for place, row in enumerate(rows) if place != row]
        for buffers in self._buffers.values():
            for i, buffer in enumerate(buffers):
                if places:
                    buffer[places, :, :longest] = buffer[[rows[place] for place in places], :, :longest]
                buffers[i] = buffer[: len(rows)]

    # What models ask about a cache to make masks; those of rows of different lengths are made elsewhere.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._end, 0
