"""
DeepSpec checkpoints with a Qwen3 backbone (DSpark, and DFlash where `markov_rank` is 0).

The config is a copy of the target's with the drafter's fields on top; which heads and tables there are follows from
the tensors. Blocks are anchor-first unless the config says otherwise.
"""

from __future__ import annotations

from .fields import Fields, transformers_fields
from .translation import Shapes, architectures, tensor_name
from .translation import translate as translate_fields

__all__ = ["NAME", "recognises", "tensor_name", "translate"]

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
    if fields.get("projector_type", str, "dspark") != "dspark":
        raise ValueError(f"This DeepSpec drafter has a projector of type {config['projector_type']!r}.")
    if fields.get("causal_in_block", bool, False):
        raise ValueError("DeepSpec has no field `causal_in_block`; its blocks are causal where `is_causal` says so.")
    translated = translate_fields(fields, tensors, sample_from_anchor=True)
    fields.refuse_unknown(
        transformers_fields(config.get("model_type")) | transformers_fields(config.get("target_model_type")) | {*OWN},
        of_target=True,
    )
    return translated
