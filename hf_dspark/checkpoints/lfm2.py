"""
LiquidAI drafters (`Lfm2DSparkDraftModel`): heads described at the top, taps and mask in `dflash_config`, rotary pairs
side by side. Blocks are anchor-first unless the config says otherwise.
"""

from __future__ import annotations

from .fields import Fields, transformers_fields
from .translation import Shapes, architectures, tensor_name
from .translation import translate as translate_fields

__all__ = ["NAME", "recognises", "tensor_name", "translate"]

NAME = "LFM2 DSpark"


def recognises(config: dict) -> bool:
    return "Lfm2DSparkDraftModel" in architectures(config)


def translate(config: dict, tensors: Shapes) -> dict:
    """
    `DSparkConfig` fields from the config and the tensor shapes.

    Raises:
        ValueError: a required field is missing, a field contradicts the tensors, or it is unknown what a field does.
    """
    fields = Fields(NAME, config, ["dspark_config", "dflash_config"])
    fields.need("rope_is_neox_style", bool)
    fields.expect_projector("dspark")
    translated = translate_fields(fields, tensors, sample_from_anchor=True)
    fields.refuse_unknown(transformers_fields())
    return translated
