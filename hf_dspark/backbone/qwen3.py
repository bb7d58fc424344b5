"""Qwen3-style draft layers: queries from the block, keys and values from context and block."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, eager_attention_forward, rotate_half

from ..configuration_dspark import DSparkConfig
from .context_cache import ContextCache


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """
    Rotary embedding of states (R, heads, rows, head_dim) with cos and sin (R, rows, head_dim).

    Pairs are half a head apart; where they are neighbours, heads come out in the order that has them so, which is all
    the same to the product of a query and a key.
    """
    if interleaved:
        states = states.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return states * cos.unsqueeze(1) + rotate_half(states) * sin.unsqueeze(1)


class DSparkAttention(nn.Module):
    """Attention of a draft block to the context and to itself."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = False
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.attention_sink_bias = (
            nn.Parameter(torch.zeros(config.num_attention_heads)) if config.attention_sink_bias else None
        )

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (-1, self.head_dim))

    def keys_and_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, not yet rotated, and values (R, kv heads, rows, head_dim) of rows (R, rows, hidden_size)."""
        keys = self.k_norm(self._heads(self.k_proj(rows)))
        return keys.transpose(1, 2), self._heads(self.v_proj(rows)).transpose(1, 2)

    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: ContextCache | None = None,
    ) -> torch.Tensor:
        cos, sin = position_embeddings
        rows = torch.cat([context, block], dim=1)
        queries = self.q_norm(self._heads(self.q_proj(block))).transpose(1, 2)
        keys, values = self.keys_and_values(rows)
        if self.config.attention_value_scale != 1:
            values = values * self.config.attention_value_scale
        interleaved = self.config.rope_interleaved
        queries = rotate(queries, cos[:, context.shape[1] :], sin[:, context.shape[1] :], interleaved)
        keys = rotate(keys, cos, sin, interleaved)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        if self.attention_sink_bias is not None:
            keys, values, attention_mask = self._with_sink(queries, keys, values, attention_mask)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, _ = attention(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
        )
        return self.o_proj(output.flatten(-2))

    def _with_sink(self, queries, keys, values, attention_mask):
        """One more row whose score is the head's sink bias and whose value is nothing."""
        if self.config._attn_implementation not in ("eager", "sdpa"):
            raise ValueError(
                f"This drafter has attention sinks, which {self.config._attn_implementation} attention does not do "
                'here: load it with `attn_implementation="sdpa"`.'
            )
        shape = (*queries.shape[:3], keys.shape[2])
        mask = queries.new_zeros(shape) if attention_mask is None else attention_mask.expand(shape)
        sink = self.attention_sink_bias.to(queries.dtype).view(1, -1, 1, 1).expand(*shape[:3], 1)
        return F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1)), torch.cat([mask, sink], dim=-1)


class DSparkDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm decoder layer; `input_layernorm` is for block rows only, the context comes normalised."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DSparkAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, block: torch.Tensor, context: torch.Tensor, **attention_arguments) -> torch.Tensor:
        block = block + self.self_attn(self.input_layernorm(block), context, **attention_arguments)
        return block + self.mlp(self.post_attention_layernorm(block))
