"""Gemma4-style draft layers: norms on both sides of attention and MLP, values made from the keys' projection."""

from __future__ import annotations

import torch
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from ..configuration_dspark import DSparkConfig
from .qwen3 import DSparkAttention


class Gemma4Attention(DSparkAttention):
    """Unscaled attention, and values of unit size: the projected keys' where `attention_k_eq_v`."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.scaling = 1.0
        self.q_norm = Gemma4RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Gemma4RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.v_norm = Gemma4RMSNorm(self.head_dim, eps=config.rms_norm_eps, with_scale=False)
        if config.attention_k_eq_v:
            self.v_proj = None

    def keys_and_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self._heads(self.k_proj(rows))
        values = keys if self.v_proj is None else self._heads(self.v_proj(rows))
        return self.k_norm(keys).transpose(1, 2), self.v_norm(values).transpose(1, 2)


class Gemma4DecoderLayer(GradientCheckpointingLayer):
    """Layer with norms before and after each part, whose output is scaled as a whole; the MLP is gated by GELU."""

    layer_scalar: torch.Tensor

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.self_attn = Gemma4Attention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_feedforward_layernorm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, block: torch.Tensor, context: torch.Tensor, **attention_arguments) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(block), context, **attention_arguments)
        block = block + self.post_attention_layernorm(attended)
        block = block + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(block)))
        return block * self.layer_scalar
