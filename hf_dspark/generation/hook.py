"""The hook into transformers: `generate()` and `pipeline()` accept a DSpark drafter as `assistant_model`."""

from __future__ import annotations

import copy
from functools import wraps

from transformers import GenerationMixin
from transformers.pipelines import base as pipelines

from ..checkpoints import is_drafter
from ..modeling_dspark import DSparkModel
from .decoding import speculative_decoding


def _assisted_decoding(original):
    @wraps(original)
    def wrapper(self, input_ids, **kwargs):
        if not isinstance(kwargs.get("assistant_model"), DSparkModel):
            return original(self, input_ids, **kwargs)
        for name in ("inputs_tensor", "assistant_tokenizer", "tokenizer"):  # for other candidate generators
            kwargs.pop(name, None)
        return speculative_decoding(self, input_ids, **kwargs)

    return wrapper


def _validate_generation_mode(original):
    @wraps(original)
    def wrapper(self, generation_mode, generation_config, generation_mode_kwargs):
        drafter = generation_mode_kwargs.get("assistant_model")
        if isinstance(drafter, DSparkModel):
            drafter.check_target(self)
            generation_mode_kwargs = {**generation_mode_kwargs, "assistant_model": None}
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1  # other assistants draft for one only
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return wrapper


def _load_assistant_model(original):
    @wraps(original)
    def wrapper(model, assistant_model, assistant_tokenizer):
        if isinstance(assistant_model, str) and is_drafter(assistant_model):
            assistant_model = DSparkModel.from_pretrained(assistant_model, dtype=model.dtype, device_map=model.device)
        if isinstance(assistant_model, DSparkModel):
            return assistant_model, None  # the target's tokens are its own, whatever its config says of special ones
        return original(model, assistant_model, assistant_tokenizer)

    return wrapper


_PATCHES = (
    (GenerationMixin, "_assisted_decoding", _assisted_decoding),
    (GenerationMixin, "_validate_generation_mode", _validate_generation_mode),
    (pipelines, "load_assistant_model", _load_assistant_model),
)
_originals: dict[str, object] = {}


def install() -> None:
    """Teach transformers about DSpark drafters; done on import, and only once. Other assistants are untouched."""
    for owner, name, patch in _PATCHES:
        if name not in _originals:
            _originals[name] = getattr(owner, name)
            setattr(owner, name, patch(_originals[name]))


def uninstall() -> None:
    """Undo [`install`]."""
    for owner, name, _ in _PATCHES:
        if name in _originals:
            setattr(owner, name, _originals.pop(name))
