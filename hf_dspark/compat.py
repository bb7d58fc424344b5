"""What differs between the supported transformers releases, found by looking at the features themselves."""

from __future__ import annotations

import dataclasses

from transformers import QuantizedCache
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput

try:
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
except ImportError:
    DFlashTokenCandidateGenerator = None

# The name under which models take and return their cache.
CACHE = "cache" if any(f.name == "cache" for f in dataclasses.fields(GenerateDecoderOnlyOutput)) else "past_key_values"


def can_roll_back(cache: Cache) -> bool:
    """Whether `cache.crop` takes tokens back exactly; some releases wrongly say so of quantized caches."""
    return cache.is_croppable and not isinstance(cache, QuantizedCache)
