"""
Public checkpoint formats, one module each: config fields and tensor names in, `DSparkConfig` fields out.

A format has a `NAME`, and says which configs are its own (`recognises`), what `DSparkConfig` fields they mean
(`translate`), and what a [`DSparkModel`] calls their tensors (`tensor_name`). Those of `WRITERS` also give a config
(`write_config`), the tables that go with it (`tables`), and tensors (`write_tensors`).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import PurePath, PurePosixPath
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ..configuration_dspark import DSparkConfig
from . import (
    deepspec,
    dflash2,
    gemma4,
    hybrid,
    lfm2,
    modelopt,
    muse_glimmer,
    native,
    nemotron,
    specforge,
    speculators,
    unsupported,
    zlab,
)
from .translation import DROPPED, Shapes

__all__ = [
    "DROPPED",
    "FORMATS",
    "NATIVE",
    "WRITERS",
    "Checkpoint",
    "config_dict",
    "format_of",
    "is_drafter",
    "obstacle",
    "read_config",
    "tensor_shapes",
    "writer",
]

# The first that recognises a config is the one; several share an architecture's name.
FORMATS: tuple[Any, ...] = (
    native,
    unsupported.OTHER_DFLASH2,
    dflash2,
    speculators,
    muse_glimmer,
    gemma4,
    unsupported.NOISE_LEVEL,
    nemotron,
    unsupported.GATED_QUERIES,
    deepspec,
    specforge,
    lfm2,
    modelopt,
    unsupported.DOMINO,
    hybrid,
    zlab,
    unsupported.LAGUNA,
    unsupported.LATENT_ATTENTION,
    unsupported.OTHER_LAYERS,
    unsupported.DEEPSEEK_V4,
)
NATIVE = "native"
# What writes drafters for other frameworks, by their draft layers.
WRITERS: dict[str, dict[str, Any]] = {
    "deepspec": {"qwen3": deepspec, "gemma4": gemma4},
    "speculators": {"qwen3": speculators, "dflash2": dflash2},
}
# Element types of plain weights and token maps; weights in any other come with scales.
PLAIN_TYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"}
MASK_EMBEDDING = "mask_embedding.pt"


class Checkpoint:
    """
    A drafter in a folder or on the Hub, in whichever format it is: its config and the headers of its weights.

    Args:
        path: a folder or a Hub repository.
        download: whether to fetch weights from the Hub, or no more of them than the headers.
        hub_arguments: `revision`, `token` and so on.

    Raises:
        OSError: there is no such folder or repository, or no config or weights in it.
        ValueError: no known format, or files that are damaged.
    """

    def __init__(self, path: str | os.PathLike, download: bool = True, **hub_arguments):
        self.path = path
        self.config = config_dict(path, **hub_arguments)
        if not self.config:
            raise OSError(
                f"{path} has no config.json; if the drafter is in a folder within it, name that as `subfolder`."
            )
        self.format = format_of(self.config)
        if self.format is None:
            names = ", ".join(f.NAME for f in FORMATS if not isinstance(f, unsupported.Unsupported))
            raise ValueError(
                f"{path} is not a drafter in a format that hf_dspark reads: architectures "
                f"{self.config.get('architectures')}, model_type {self.config.get('model_type')!r}. It reads {names}."
            )
        if isinstance(self.format, unsupported.Unsupported):
            self.format.translate(self.config, {})
        if self.format in (zlab, hybrid) and cached_file(
            path, MASK_EMBEDDING, _raise_exceptions_for_missing_entries=False, **hub_arguments
        ):
            raise ValueError(
                f"{path} keeps the embedding of its mask token in {MASK_EMBEDDING}, a pickle, which hf_dspark never "
                "opens: it could run any code. Ask for a safetensors file."
            )
        self.tensors: Shapes = {}  # by the names that a DSparkModel has
        self.renamed: dict[str, str] = {}  # names in the files, where they are others
        shapes, self.size = _read_headers(path, download, **hub_arguments)  # the size in bytes
        for theirs, shape in shapes.items():
            ours = self.format.tensor_name(theirs)
            if ours is None:
                continue
            if ours in self.tensors:
                raise ValueError(f"{path} has two tensors that are {ours}, one of them is {theirs}.")
            self.tensors[ours] = shape
            if ours != theirs:
                self.renamed[theirs] = ours

    def translate(self) -> dict:
        """
        `DSparkConfig` fields.

        Raises:
            ValueError: the config cannot be read, contradicts the tensors, or has fields of unknown effect.
        """
        return self.format.translate(dict(self.config), self.tensors)

    @property
    def key_mapping(self) -> dict[str, str]:
        """Patterns of names in the files, and what they become, as `from_pretrained` takes them."""
        return {f"^{re.escape(theirs)}$": ours for theirs, ours in self.renamed.items()}


def format_of(config: dict) -> Any:
    """The format of a config, `None` if it is none of these."""
    return next((checkpoint_format for checkpoint_format in FORMATS if checkpoint_format.recognises(config)), None)


def writer(name: str, config: DSparkConfig) -> Any:
    """
    What writes a drafter in the format of that name, one of `WRITERS`.

    Raises:
        ValueError: there is no such format, or it has no layers of this drafter's kind.
    """
    if name not in WRITERS:
        raise ValueError(f"{name!r} is no format to write; there are {', '.join((NATIVE, *WRITERS))}.")
    if config.backbone not in WRITERS[name]:
        raise ValueError(
            f"The {name} format has no draft layers of {config.backbone}'s kind, only those of "
            f"{' and '.join(WRITERS[name])}."
        )
    return WRITERS[name][config.backbone]


def obstacle(name: str, config: DSparkConfig) -> str | None:
    """Why a drafter cannot be written in the format of that name, even given its target; `None` if it can."""
    if config.input_embedding_scale is None:  # the target says
        config = DSparkConfig.from_dict(config.to_dict() | {"input_embedding_scale": 1.0})
    try:
        writer(name, config).write_config(config)
    except ValueError as error:
        return str(error)
    return None


def read_config(path: str | os.PathLike, **hub_arguments) -> dict:
    """`DSparkConfig` fields of the checkpoint at `path`; errors as for [`Checkpoint`] and its `translate`."""
    return Checkpoint(path, **hub_arguments).translate()


def is_drafter(path: str | os.PathLike, **hub_arguments) -> bool:
    """Whether `path` holds a drafter in a known format, be it one that is refused."""
    return format_of(config_dict(path, **hub_arguments)) is not None


def tensor_shapes(path: str | os.PathLike, **hub_arguments) -> Shapes:
    """
    Names and shapes of the tensors of a safetensors checkpoint, read from the headers alone.

    Raises:
        OSError: there are no safetensors files.
        ValueError: one is damaged, or holds quantised weights.
    """
    return _read_headers(path, True, **hub_arguments)[0]


def _read_headers(path: str | os.PathLike, download: bool, **hub_arguments) -> tuple[Shapes, int]:
    """Shapes of all tensors, and the bytes of the files that they are in."""
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **hub_arguments)
    shapes: Shapes = {}
    size = 0
    for name in [SAFE_WEIGHTS_NAME] if index is None else _shards(index):
        file = (cached_file if download else _if_here)(path, name, **hub_arguments)
        header, length = _header(file) if file else _header_on_hub(str(path), name, **hub_arguments)
        shapes |= header
        size += length
    return shapes, size


def _if_here(path: str | os.PathLike, name: str, **hub_arguments) -> str | None:
    """Where a file is, if it is in a folder or has been fetched before."""
    return cached_file(
        path,
        name,
        **{**hub_arguments, "local_files_only": True},
        _raise_exceptions_for_missing_entries=os.path.isdir(path),
        _raise_exceptions_for_connection_errors=False,
    )


def _header_on_hub(
    repository: str, name: str, revision: str | None = None, subfolder: str = "", token: Any = None, **others
) -> tuple[Shapes, int]:
    try:
        found = HfApi(token=token).parse_safetensors_file_metadata(
            repository, str(PurePosixPath(subfolder, name)), revision=revision
        )
    except (SafetensorsParsingError, NotASafetensorsRepoError) as error:
        raise ValueError(f"{name} of {repository} is not a safetensors file: {error}") from error
    entries = {key: vars(tensor) for key, tensor in found.tensors.items()}
    return _checked(f"{name} of {repository}", entries)


def config_dict(path: str | os.PathLike, **hub_arguments) -> dict:
    """
    config.json, empty if there is none.

    Raises:
        OSError: there is no such folder or repository.
        ValueError: it is no JSON object.
    """
    try:
        config, _ = PreTrainedConfig.get_config_dict(path, **hub_arguments)
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has a config.json that is no JSON object: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} has a config.json that is no JSON object.")
    return config


def _shards(index: str) -> list[str]:
    try:
        with open(index, encoding="utf-8") as file:
            content = json.load(file)
        content["metadata"]  # transformers reads that, too
        names = set(content["weight_map"].values())
        if all(name == PurePath(name).name and name.endswith(".safetensors") for name in names):
            return sorted(names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of safetensors files: {error}") from error
    raise ValueError(f"{index} names files other than safetensors files beside it: {sorted(names)}.")


def _header(path: str) -> tuple[Shapes, int]:
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file, or it is cut short: {error}") from error
    shapes, end = _checked(path, entries)
    if 8 + length + end > size:
        raise ValueError(f"{path} is not a whole safetensors file: {size} bytes of {8 + length + end}.")
    return shapes, size


def _checked(path: str, entries: dict) -> tuple[Shapes, int]:
    """Shapes and the bytes of the tensors that a header describes, if these are plain ones."""
    try:
        shapes = {name: tuple(int(n) for n in entry["shape"]) for name, entry in entries.items()}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        types = {str(entry["dtype"]) for entry in entries.values()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file, or it is cut short: {error}") from error
    scales = [name for name in shapes if re.search(r"(weight_scale(_\d)?|input_scale|\.scale)$", name)]
    if scales or types - PLAIN_TYPES:
        raise ValueError(
            f"{path} holds quantised weights ({', '.join([*sorted(types - PLAIN_TYPES), *scales[:2]])}), which "
            "hf_dspark does not read: dequantise them to bfloat16 first."
        )
    return shapes, end
