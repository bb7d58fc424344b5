"""
NVIDIA ModelOpt DSpark checkpoints: `DFlashDraftModel` with a projector of type `dspark`, tensors of heads at the top.

Slot k predicts the token behind its own place where labels are shifted (`shift_label`), which is the rule.
"""

from __future__ import annotations

from . import translation
from .fields import Fields, transformers_fields
from .translation import Shapes, architectures, section

NAME = "NVIDIA ModelOpt DSpark"
HEADS = {
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "gate_proj": "markov_head.gate_proj",
    "joint_proj": "markov_head.joint_proj",
    "confidence_proj": "confidence_head.proj",
}


def recognises(config: dict) -> bool:
    return "DFlashDraftModel" in architectures(config) and (
        section(config, "dflash_config").get("projector_type") == "dspark"
    )


def tensor_name(name: str) -> str | None:
    name = translation.tensor_name(name)
    if name is None:
        return None
    module, dot, rest = name.partition(".")
    return HEADS.get(module, module) + dot + rest


def translate(config: dict, tensors: Shapes) -> dict:
    """
    `DSparkConfig` fields from the config and the tensor shapes.

    Raises:
        ValueError: a required field is missing, a field contradicts the tensors, or it is unknown what a field does.
    """
    fields = Fields(NAME, config, ["dflash_config"])
    fields.get("projector_type", str)
    if fields.get("use_confidence_head", bool, False) and "confidence_head.proj.weight" not in tensors:
        raise ValueError("The config has `use_confidence_head`, but `confidence_proj.weight` is missing.")
    translated = translation.translate(fields, tensors, sample_from_anchor=fields.get("shift_label", bool, True))
    fields.refuse_unknown(transformers_fields())
    return translated
