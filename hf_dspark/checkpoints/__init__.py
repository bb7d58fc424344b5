"""Public checkpoint formats, one module each: config fields and tensor names in, `DSparkConfig` fields out."""

from __future__ import annotations

import json
import os

from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from . import deepspec, gemma4, native

FORMATS = (native, gemma4, deepspec)


def read_config(path: str | os.PathLike, **hub_arguments) -> dict:
    """
    `DSparkConfig` fields of the checkpoint at `path` (a folder or a Hub repository), in whichever format it is.

    Raises:
        OSError: there is no such folder or repository, or no config in it.
        ValueError: no known format, or one that cannot be read.
    """
    config, _ = PreTrainedConfig.get_config_dict(path, **hub_arguments)
    if not config:
        raise OSError(f"{path} has no config.json; if the drafter is in a folder within it, name that as `subfolder`.")
    for checkpoint_format in FORMATS:
        if checkpoint_format.recognises(config):
            return checkpoint_format.translate(config, tensor_shapes(path, **hub_arguments))
    raise ValueError(
        f"{path} is not a drafter in a format that hf_dspark reads: architectures {config.get('architectures')}, "
        f"model_type {config.get('model_type')!r}. It reads its own format and DeepSpec's."
    )


def is_drafter(path: str | os.PathLike, **hub_arguments) -> bool:
    """Whether `path` holds a drafter in a format that [`read_config`] reads."""
    config, _ = PreTrainedConfig.get_config_dict(path, **hub_arguments)
    return any(checkpoint_format.recognises(config) for checkpoint_format in FORMATS)


def tensor_shapes(path: str | os.PathLike, **hub_arguments) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a safetensors checkpoint, read from the headers alone."""
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **hub_arguments)
    if index is None:
        files = [SAFE_WEIGHTS_NAME]
    else:
        with open(index) as file:
            files = sorted(set(json.load(file)["weight_map"].values()))
    shapes: dict[str, tuple[int, ...]] = {}
    for name in files:
        shapes |= _header(cached_file(path, name, **hub_arguments))
    return shapes


def _header(path: str) -> dict[str, tuple[int, ...]]:
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path} is not a safetensors file, or it is cut short: {error}") from error
