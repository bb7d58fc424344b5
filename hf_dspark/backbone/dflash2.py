"""DFlash2's draft layers: Qwen3's, with short convolutions along the block around attention and MLP."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..configuration_dspark import DSparkConfig
from .qwen3 import DSparkDecoderLayer


class BlockConvolution(nn.Module):
    """
    Two causal convolutions within each block: one on what goes into a sub-layer, one on what comes out.

    A row mixes each channel with that of the rows just before it in its block. The weights are a kernel of the
    channel's own plus one for its group of channels, which the row works out from what goes in.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.block_size = config.block_size
        self.groups = config.hidden_size // config.conv_group_size
        identity = torch.zeros(2, config.conv_kernel_size, config.hidden_size)
        identity[:, 0] = 1
        self.base_kernel = nn.Parameter(identity)
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * config.conv_kernel_size * self.groups, bias=False)

    def kernels(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Kernels of each of the rows (R, rows, H), for the way in and the way out, (R, rows, taps, H) each."""
        by_group = self.kernel_projection(rows).unflatten(-1, (2, -1, self.groups))
        group_size = rows.shape[-1] // self.groups
        return (self.base_kernel + by_group.repeat_interleave(group_size, dim=-1)).unbind(-3)

    def convolve(self, rows: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """The rows (R, rows, H), which make one block or several, each mixed with those before it in its block."""
        size, taps = min(self.block_size, rows.shape[1]), kernels.shape[-2]
        blocks = rows.unflatten(1, (-1, size))
        shifted = [F.pad(blocks, (0, 0, tap, 0))[..., :size, :] for tap in range(taps)]
        return (torch.stack(shifted, dim=-2).flatten(1, 2) * kernels).sum(-2)


class DFlash2DecoderLayer(DSparkDecoderLayer):
    """[`DSparkDecoderLayer`] whose attention and MLP read and write convolved block rows."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attention_conv = BlockConvolution(config)
        self.mlp_conv = BlockConvolution(config)

    def forward(self, block: torch.Tensor, context: torch.Tensor, **attention_arguments) -> torch.Tensor:
        rows = self.input_layernorm(block)
        before, after = self.attention_conv.kernels(rows)
        rows = self.self_attn(self.attention_conv.convolve(rows, before), context, **attention_arguments)
        block = block + self.attention_conv.convolve(rows, after)
        rows = self.post_attention_layernorm(block)
        before, after = self.mlp_conv.kernels(rows)
        return block + self.mlp_conv.convolve(self.mlp(self.mlp_conv.convolve(rows, before)), after)
