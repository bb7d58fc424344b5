"""What differs between the supported transformers releases, found by looking at the features themselves."""

from __future__ import annotations

import dataclasses
import os

from huggingface_hub.errors import HfHubHTTPError
from transformers import QuantizedCache
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import hub

try:
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
except ImportError:
    DFlashTokenCandidateGenerator = None

# The name under which models take and return their cache.
CACHE = "cache" if any(f.name == "cache" for f in dataclasses.fields(GenerateDecoderOnlyOutput)) else "past_key_values"


def can_roll_back(cache: Cache) -> bool:
    """Whether `cache.crop` takes tokens back exactly; some releases wrongly say so of quantized caches."""
    return cache.is_croppable and not isinstance(cache, QuantizedCache)


# What huggingface_hub raises when the Hub refuses or cannot be reached; it comes from one or another HTTP client.
HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]


def resolve_revision(path: str | os.PathLike, revision: str | None = None, **kwargs) -> str | None:
    """At best effort, the commit of a Hub repository that `revision` is, so that all files come from the same one."""
    if not hasattr(hub, "resolve_revision"):
        return revision
    arguments = {name: kwargs[name] for name in ("token", "local_files_only", "cache_dir") if name in kwargs}
    return hub.resolve_revision(path, revision, **arguments)
