"""
DeepSpec checkpoints with a Qwen3 backbone (DSpark, and DFlash where `markov_rank` is 0).

The config is a copy of the target's with the drafter's fields on top; which heads and tables there are follows from
the tensors. Blocks are anchor-first unless the config says otherwise.

What is written says so, and has frozen copies of the target's embeddings and output head, as DeepSpec's own have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..configuration_dspark import DSparkConfig
from . import translation
from .fields import Fields, transformers_fields
from .translation import Shapes, architectures, tensor_name
from .translation import translate as translate_fields

__all__ = ["NAME", "recognises", "tables", "tensor_name", "translate", "write_config", "write_tensors"]

NAME = "DeepSpec"
ARCHITECTURES = {"Qwen3DSparkModel", "LingDSparkModel", "Qwen3OmniDSparkModel"}
# Of this package's own configs, which are in DeepSpec's layout once they are given its architecture.
OWN = (
    *("has_embed_tokens", "has_lm_head", "causal_in_block"),
    *("conv_kernel_size", "conv_group_size", "selector_top_k"),  # without effect unless `backbone` and rank say so
)


def recognises(config: dict) -> bool:
    return bool(ARCHITECTURES.intersection(map(str, architectures(config)))) and "target_layer_ids" in config


def translate(config: dict, tensors: Shapes) -> dict:
    """
    `DSparkConfig` fields from the config and the tensor shapes.

    Raises:
        ValueError: a required field is missing, a field contradicts the tensors, or it is unknown what a field does.
    """
    fields = Fields(NAME, config)
    fields.expect_projector("dspark")
    if fields.get("causal_in_block", bool, False):
        raise ValueError("DeepSpec has no field `causal_in_block`; its blocks are causal where `is_causal` says so.")
    translated = translate_fields(fields, tensors, sample_from_anchor=True)
    fields.refuse_unknown(
        transformers_fields(config.get("model_type")) | transformers_fields(config.get("target_model_type")) | {*OWN},
        of_target=True,
    )
    return translated


def write_config(config: DSparkConfig, target_architectures: Sequence[str] = ()) -> dict:
    """
    config.json of a drafter.

    Args:
        target_architectures: the target's, for which DeepSpec has no field.

    Raises:
        ValueError: DeepSpec cannot express it.
    """
    causal, sliding = translation.causal_layers(config), translation.sliding_layers(config)
    reasons = {
        "pruned vocabulary (it can be written for speculators)": config.draft_vocab_size < config.vocab_size,
        "windows that start from the anchor": any(sliding) and config.sliding_window_from != "row",
        "`causal_in_block`": causal != sliding and len(set(causal)) > 1,
        "`rope_parameters` that turn a part of each head": translation.turns_part_of_heads(config),
    }
    translation.refuse_beyond(NAME, config, translation.PLAIN, reasons)
    return {
        "architectures": ["Qwen3DSparkModel"],
        **translation.qwen3_fields(config),
        **drafter_fields(config),
        **({} if causal == sliding else {"is_causal": causal[0]}),
    }


def drafter_fields(config: DSparkConfig) -> dict:
    """What stands on top of the fields of the backbone."""
    names = ("num_target_layers", "target_layer_ids", "block_size", "mask_token_id", "sample_from_anchor")
    fields = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    return {**fields, **translation.heads_fields(config), "tie_word_embeddings": False}


def tables(config: DSparkConfig) -> tuple[str, ...]:
    """Which of embeddings and output head a checkpoint has to have, even where they are the target's."""
    return ("embed_tokens", "lm_head")


def write_tensors(tensors: dict[str, torch.Tensor], config: DSparkConfig) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint; their names are the same."""
    return tensors
