"""This package's own format: a `DSparkConfig` beside tensors of the same names as the modules."""

from __future__ import annotations

from .translation import Shapes

NAME = "hf_dspark"


def recognises(config: dict) -> bool:
    return config.get("model_type") == "dspark"


def tensor_name(name: str) -> str | None:
    return name


def translate(config: dict, tensors: Shapes) -> dict:
    """The config as it is; a tensor too many or too few is the loader's to report."""
    return config
