"""
SpecForge DSpark checkpoints (`DSparkDraftModel`): fields in `dspark_config` or `dflash_config`, tensors without
embeddings and output head. Blocks are anchor-first unless the config says otherwise.

Trainer checkpoints of earlier versions have `logit_head.` before the names of the heads.
"""

from __future__ import annotations

from . import translation
from .fields import Fields, transformers_fields
from .translation import Shapes, architectures, section

NAME = "SpecForge DSpark"
ARCHITECTURES = {"DSparkDraftModel", "Qwen3DSparkModel"}
SECTIONS = ("dspark_config", "dflash_config")
HARMLESS = {"confidence_head_alpha"}  # weight of a loss


def recognises(config: dict) -> bool:
    return bool(ARCHITECTURES.intersection(map(str, architectures(config)))) and any(
        section(config, name).get("projector_type") == "dspark" for name in SECTIONS
    )


def tensor_name(name: str) -> str | None:
    name = translation.tensor_name(name)
    return None if name is None else name.removeprefix("logit_head.")


def translate(config: dict, tensors: Shapes) -> dict:
    """
    `DSparkConfig` fields from the config and the tensor shapes.

    Raises:
        ValueError: a required field is missing, a field contradicts the tensors, or it is unknown what a field does.
    """
    fields = Fields(NAME, config, SECTIONS)
    fields.get("projector_type", str)
    mode = fields.get("attention_mode", str, "gqa")
    if mode not in ("gqa", "mha"):
        raise ValueError(f"This SpecForge drafter has {mode} attention, hf_dspark has grouped-query attention.")
    translated = translation.translate(fields, tensors, sample_from_anchor=True)
    fields.refuse_unknown(transformers_fields() | HARMLESS)
    return translated
