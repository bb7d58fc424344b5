"""
DFlash2 checkpoints, of z-lab (`DFlash2DraftModel`) and of the speculators library: a DFlash drafter as either writes
it, with convolutions along the block and a candidate selector. Rows of a block see each other both ways.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..configuration_dspark import DSparkConfig
from . import speculators, zlab
from .fields import Fields
from .speculators import tables, write_tensors
from .translation import Shapes, architectures, section, tensor_name

__all__ = ["NAME", "recognises", "tables", "tensor_name", "translate", "write_config", "write_tensors"]

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


def write_config(config: DSparkConfig, target_architectures: Sequence[str] = ()) -> dict:
    """
    config.json of a drafter, as speculators writes it.

    Args:
        target_architectures: the target's, which the config names.

    Raises:
        ValueError: it cannot express the drafter.
    """
    if not config.selector_rank or config.markov_rank or config.enable_confidence_head:
        raise ValueError(f"A {NAME} drafter has a candidate selector and no other head.")
    rest = DSparkConfig.from_dict(config.to_dict() | {"backbone": "qwen3", "selector_rank": 0})
    written = speculators.write_config(rest, target_architectures)
    written["speculators_config"]["algorithm"] = "dflash2"
    names = {"speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"]}
    return written | names | {name: getattr(config, name) for name in OWN}
