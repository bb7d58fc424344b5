"""The drafter's key/value cache: one row per committed target position, none for block rows."""

from __future__ import annotations

import torch


class ContextCache:
    """
    Keys and values of the context rows of every draft layer.

    A layer hands over its new context rows followed by its block rows and attends to everything held so far; only the
    context rows stay. The buffers grow by doubling, so a round copies nothing that was there before.

    Args:
        start: position of the first context row in the sequence, not 0 if the drafter never saw what came before.
    """

    def __init__(self, start: int = 0):
        self.start = start
        self.length = 0
        self._buffers: list[torch.Tensor] = []

    @property
    def end(self) -> int:
        """Position that follows the last context row."""
        return self.start + self.length

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows (R, kv heads, rows, head_dim) behind the held ones; returns held and new rows together."""
        end = self.length + keys.shape[2]
        if layer_idx == len(self._buffers):
            self._buffers.append(keys.new_empty(2, *keys.shape[:2], 0, keys.shape[3]))
        buffer = self._buffers[layer_idx]
        if buffer.shape[3] < end:
            grown = buffer.new_empty(*buffer.shape[:3], 2 * end, buffer.shape[4])
            grown[:, :, :, : self.length] = buffer[:, :, :, : self.length]
            self._buffers[layer_idx] = buffer = grown
        buffer[0, :, :, self.length : end] = keys
        buffer[1, :, :, self.length : end] = values
        return buffer[0, :, :, :end], buffer[1, :, :, :end]

    def keep(self, rows: int) -> None:
        """Keep the first `rows` of the rows that every layer has just written."""
        self.length += rows

    def crop(self, length: int) -> None:
        """Forget all but the first `length` context rows."""
        self.length = min(self.length, length)
