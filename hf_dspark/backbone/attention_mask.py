"""What the rows of a block see: the context, as far as a window reaches, and their own block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..configuration_dspark import DSparkConfig


class AttentionPattern(NamedTuple):
    """
    What a layer's rows see.

    Args:
        window: positions of the context, `None` for all.
        from_anchor: whether the window ends before the anchor for every row of a block, or at each row's own position.
        causal: whether the rows of a block see only those before them.
    """

    window: int | None
    from_anchor: bool
    causal: bool

    def sees_all(self, rows: int) -> bool:
        """Whether one block sees all `rows` of an unbroken sequence: its context, and itself."""
        return not self.causal and (self.window is None or rows <= self.window)


def attention_patterns(config: DSparkConfig) -> list[AttentionPattern]:
    """The pattern of each layer."""
    causal = config.causal_in_block
    if isinstance(causal, bool):
        causal = [causal] * config.num_hidden_layers
    return [
        AttentionPattern(
            window=config.sliding_window if kind == "sliding_attention" else None,
            from_anchor=kind == "sliding_attention" and config.sliding_window_from == "anchor",
            causal=in_block,
        )
        for kind, in_block in zip(config.layer_types, causal)
    ]


def visible_rows(
    pattern: AttentionPattern, block_positions: torch.Tensor, context_positions: torch.Tensor, block_size: int
) -> torch.Tensor:
    """
    Which context rows and block rows each block row sees, (R, N * B, T + N * B), true where it does.

    Args:
        pattern: of the layer.
        block_positions: (R, N * B), of N blocks one after the other, each from its anchor on.
        context_positions: (R, T). Rows at or behind an anchor are not seen by its block, so that rows which are only
            there to fill up a batch can be given any position behind all anchors.
        block_size: B.
    """
    slots = torch.arange(block_positions.shape[1], device=block_positions.device)
    block = slots // block_size
    anchors = block_positions - slots % block_size
    rows, keys = block_positions.unsqueeze(-1), context_positions.unsqueeze(-2)

    context = keys < anchors.unsqueeze(-1)
    own = (block.unsqueeze(-1) == block).expand(len(block_positions), -1, -1)
    if pattern.window is not None and pattern.from_anchor:
        context = context & (keys >= anchors.unsqueeze(-1) - pattern.window)
    elif pattern.window is not None:
        context = context & (rows - keys < pattern.window)
        own = own & ((rows - block_positions.unsqueeze(-2)).abs() < pattern.window)
    if pattern.causal:
        own = own & (slots.unsqueeze(-1) >= slots)
    return torch.cat([context.expand(len(block_positions), -1, -1), own], dim=-1)


def attention_masks(
    patterns: Iterable[AttentionPattern],
    block_positions: torch.Tensor,
    context_positions: torch.Tensor,
    block_size: int,
    dtype: torch.dtype,
) -> dict[AttentionPattern, torch.Tensor]:
    """Additive masks (R, 1, N * B, T + N * B), one for each pattern; other arguments as for [`visible_rows`]."""
    masks = {}
    for pattern in set(patterns):
        visible = visible_rows(pattern, block_positions, context_positions, block_size).unsqueeze(1)
        masks[pattern] = torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    return masks
