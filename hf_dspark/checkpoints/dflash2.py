"""
DFlash2 checkpoints, of z-lab (`DFlash2DraftModel`) and of the speculators library: a DFlash drafter as either writes
it, with convolutions along the block and a candidate selector. Rows of a block see each other both ways.
"""

from __future__ import annotations

from . import speculators, zlab
from .fields import Fields
from .translation import Shapes, architectures, section, tensor_name

__all__ = ["NAME", "recognises", "tensor_name", "translate"]

NAME = "DFlash2"
OWN = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def recognises(config: dict) -> bool:
    return speculators.algorithm(config) == "dflash2" or "DFlash2DraftModel" in architectures(config)


def translate(config: dict, tensors: Shapes) -> dict:
    """
    `DSparkConfig` fields from the config and the tensor shapes.

    Raises:
        ValueError: a required field is missing, a field contradicts the tensors, or it is unknown what a field does.
    """
    fields = Fields(NAME, config, ["dflash_config"])
    own = {name: fields.need(name, int) for name in OWN}
    for name in CODEBOOKS:
        if len(tensors.get(name, ())) == 2 and tensors[name][1] != own["selector_rank"]:
            raise ValueError(f"`selector_rank` is {own['selector_rank']}, but {name} has the shape {tensors[name]}.")
    rest = {name: value for name, value in config.items() if name not in OWN}
    if speculators.algorithm(config):
        translated = speculators.translate({"sliding_window_non_causal": True, **rest}, tensors)
    else:
        nested = section(config, "dflash_config")
        rest["dflash_config"] = {name: value for name, value in nested.items() if name not in OWN}
        translated = zlab.translate({"is_causal": False, **rest}, tensors)
    return {**translated, **own, "backbone": "dflash2"}
