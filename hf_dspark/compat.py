"""What differs between the supported transformers releases, found by looking at the features themselves."""

from __future__ import annotations

import inspect
from functools import lru_cache

from transformers import PreTrainedModel


@lru_cache(maxsize=None)
def _forward_parameters(model_class: type) -> tuple[str, ...]:
    return tuple(inspect.signature(model_class.forward).parameters)


def cache_keyword(target: PreTrainedModel) -> str:
    """The name under which the target takes and returns its cache: `cache`, or `past_key_values` in older releases."""
    return "cache" if "cache" in _forward_parameters(type(target)) else "past_key_values"
