"""Where a new drafter starts: with what its target says already, so that little text has to teach the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkModel
from ..taps import TargetTaps

# How far back the heads of a layer look, in turn: slot k finds the last context position k + 1 places before it.
LOOK_BACK = (1, 2, 3, 1, 2, 4, 1, 3, 5)
SLOWEST = 0.15  # rotary frequency, in radians a place, that still tells one distance from the next
SHARPNESS = 1.4  # weight of the norms of queries and keys: scores of up to this squared, times sqrt(head_dim)
BASE_SCALE = 0.1  # weight of the final norm: at first the sequential head does most of the talking


class ColumnScale(nn.Module):
    """A weight that is learned in units in which every input has the size 1."""

    scale: torch.Tensor

    def __init__(self, scale: torch.Tensor):
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.scale

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / self.scale


@torch.no_grad()
def initialise(drafter: DSparkModel, target: PreTrainedModel, sizes: torch.Tensor) -> None:
    """
    Prepare a freshly made drafter for training.

    - Attention with biases looks a few places back, each head at a distance of its own, instead of nowhere.
    - The sequential head knows which tokens are alike, from the target's embeddings, and proposes nothing yet.
    - `fc` gives all features of the target the same weight, though their sizes differ by orders of magnitude.

    Args:
        sizes: of the target's features, by [`feature_sizes`].
    """
    for layer in drafter.layers:
        _look_back(layer.self_attn, drafter.rotary_emb.inv_freq)
    if drafter.markov_head is not None:
        drafter.markov_head.markov_w1.weight.copy_(token_likeness(drafter, target))
        drafter.markov_head.markov_w2.weight.zero_()
    drafter.norm.weight.fill_(BASE_SCALE)
    drafter.fc.weight.div_(sizes)


@torch.no_grad()
def prepare(drafter: DSparkModel, sizes: torch.Tensor) -> None:
    """Have `fc` learned in units of the target's features, until [`finish`] makes a plain weight of it again."""
    parametrize.register_parametrization(drafter.fc, "weight", ColumnScale((1 / sizes).to(drafter.fc.weight)))


def finish(drafter: DSparkModel) -> None:
    """Turn what [`prepare`] parametrised into a plain weight."""
    parametrize.remove_parametrizations(drafter.fc, "weight")


@torch.no_grad()
def feature_sizes(drafter: DSparkModel, target: PreTrainedModel, texts: Iterable[Sequence[int]]) -> torch.Tensor:
    """Root mean squares of the tapped hidden states in texts (token ids), (K * target_hidden_size,)."""
    features: list[torch.Tensor] = []
    with TargetTaps(target, drafter.config.target_layer_ids) as taps:
        for text in texts:
            target(torch.as_tensor(text, device=target.device).unsqueeze(0), use_cache=False)
            features.append(taps.take(drafter.device, torch.float32)[0, 1:])  # the first one is like no other
    return torch.cat(features).square().mean(0).sqrt().clamp(min=1e-6)


def token_likeness(drafter: DSparkModel, target: PreTrainedModel) -> torch.Tensor:
    """A 1 and the leading principal components of the target's embeddings, of unit variance, (V, rank)."""
    embeddings = target.get_input_embeddings().weight[: drafter.config.vocab_size].float()
    embeddings = embeddings - embeddings.mean(0)
    rank = min(drafter.config.markov_rank - 1, *embeddings.shape)
    _, sizes, components = torch.pca_lowrank(embeddings, q=rank, center=False, niter=4)
    likeness = torch.zeros(len(embeddings), drafter.config.markov_rank, device=embeddings.device)
    likeness[:, 0] = 1
    likeness[:, 1 : 1 + rank] = embeddings @ components * len(embeddings) ** 0.5 / sizes.square().mean().sqrt()
    return likeness.to(drafter.markov_head.markov_w1.weight)


def _look_back(attention: Any, frequencies: Any) -> None:
    """Constant parts of queries and keys that are aligned where the key stands `LOOK_BACK` places before the query."""
    if attention.q_proj.bias is None or attention.v_proj is None:  # values made of such keys would say nothing else
        return
    half = attention.head_dim // 2
    used = int((frequencies > SLOWEST).sum())
    strength = (attention.head_dim / used) ** 0.5 * 2.5  # against the random parts, of size sqrt(head_dim)
    keys, queries = (proj.bias.view(-1, 2, half).zero_() for proj in (attention.k_proj, attention.q_proj))
    keys[:, 0, :used] = strength
    for head, query in enumerate(queries):
        angle = LOOK_BACK[head % len(LOOK_BACK)] * frequencies[:used]
        query[0, :used] = strength * angle.cos()
        query[1, :used] = -strength * angle.sin()
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(SHARPNESS * (attention.head_dim**0.5 * attention.scaling) ** -0.5)
