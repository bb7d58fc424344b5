"""
z-lab DFlash checkpoints (`DFlashDraftModel`): a backbone without heads, embeddings or output head of its own.

A field of `dflash_config` goes before one of the same name at the top. Slot 0 of a block goes unused unless the config
says otherwise. A block is embedded as the target embeds its text, scaled where the target scales.
"""

from __future__ import annotations

from .fields import Fields, transformers_fields
from .translation import Shapes, architectures, tensor_name
from .translation import translate as translate_fields

__all__ = ["NAME", "recognises", "tensor_name", "translate"]

NAME = "z-lab DFlash"
BLOCK_SIZE = 16  # where the config does not say
HARMLESS = {"mask_token"}


def recognises(config: dict) -> bool:
    return "DFlashDraftModel" in architectures(config) and isinstance(config.get("dflash_config"), dict)


def translate(config: dict, tensors: Shapes) -> dict:
    """
    `DSparkConfig` fields from the config and the tensor shapes.

    Raises:
        ValueError: a required field is missing, a field contradicts the tensors, or it is unknown what a field does.
    """
    return translate_dflash(Fields(NAME, config, ["dflash_config"]), tensors)


def translate_dflash(fields: Fields, tensors: Shapes) -> dict:
    """The same for formats that build on this one."""
    fields.expect_projector("dflash")
    if not fields.get("use_aux_hidden_state", bool, True):
        raise ValueError("This drafter does not read hidden states of the target (`use_aux_hidden_state`).")
    layer_ids = fields.ids("target_layer_ids")
    if layer_ids is None:
        layer_ids = default_layer_ids(fields.need("num_target_layers", int), fields.need("num_hidden_layers", int))
    translated = translate_fields(
        fields, tensors, sample_from_anchor=False, target_layer_ids=layer_ids, block_size=BLOCK_SIZE
    )
    translated |= {
        "input_embedding_scale": fields.get("input_embedding_scale", float),
        "output_multiplier": fields.get("output_multiplier", float, 1.0),
        "final_logit_softcapping": fields.get("final_logit_softcapping", float) or None,
    }
    fields.refuse_unknown(transformers_fields() | HARMLESS)
    return translated


def default_layer_ids(target_layers: int, draft_layers: int) -> list[int]:
    """The tapped layers where the config names none: evenly spread, one for each draft layer."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]
