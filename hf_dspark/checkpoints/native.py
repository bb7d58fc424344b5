"""This package's own format: a `DSparkConfig` beside tensors of the same names as the modules."""

from __future__ import annotations


def recognises(config: dict) -> bool:
    return config.get("model_type") == "dspark"


def translate(config: dict, tensors: dict[str, tuple[int, ...]]) -> dict:
    """The config as it is; a tensor too many or too few is the loader's to report."""
    return config
