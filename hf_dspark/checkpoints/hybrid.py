"""DFlash checkpoints that were given a sequential head: z-lab's layout, `markov_head.*` beside it, slot 0 unused."""

from __future__ import annotations

from . import zlab
from .fields import Fields
from .translation import Shapes, section, tensor_name

__all__ = ["NAME", "recognises", "tensor_name", "translate"]

NAME = "DFlash with Markov head"


def recognises(config: dict) -> bool:
    projector = section(config, "dflash_config").get("projector_type", "dflash")
    return zlab.recognises(config) and bool(config.get("markov_rank")) and projector == "dflash"


def translate(config: dict, tensors: Shapes) -> dict:
    """
    `DSparkConfig` fields from the config and the tensor shapes.

    Raises:
        ValueError: a required field is missing, a field contradicts the tensors, or it is unknown what a field does.
    """
    return zlab.translate_dflash(Fields(NAME, config, ["dflash_config"]), tensors)
