"""
The target's attention while drafts are verified. Flattened tokens attend to rows of different lengths, one call a
layer, and linear layers see no padding; query heads that share keys and values do so without copies of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..compat import CACHE
from .ragged_cache import Flattened, RaggedCache

_PREFIX = "dspark_"  # what follows is the implementation that the model had
_WIDEST = 64  # queries a row that are still a draft, and no prompt
_running = threading.local()
_users: dict[int, int] = {}  # requests that need a config to name the attention of this module, by its id
_users_lock = threading.Lock()


def can_run_ragged(target: PreTrainedModel) -> bool:
    """Whether the attention of all layers of a model can be replaced."""
    kinds = getattr(target.config.get_text_config(decoder=True), "layer_types", None) or ()
    return (
        bool(target._supports_attention_backend)
        and set(kinds) <= {"full_attention", "sliding_attention"}
        and hasattr(sys.modules[type(target.get_decoder()).__module__], "eager_attention_forward")
    )


def own_attention(config: PreTrainedConfig) -> str:
    """The attention implementation that a model has when nobody has it replaced."""
    return (config._attn_implementation or "eager").removeprefix(_PREFIX)


@contextmanager
def verifying_attention(target: PreTrainedModel) -> Iterator[None]:
    """
    Have the target's layers use the attention of this module, which is its own but for short passes with shared keys,
    where it takes another way to the same sums, and for passes inside [`flattened`].

    Other threads may use the target meanwhile, ragged or not: only passes of the thread that is inside [`flattened`]
    are taken for ragged ones. The target is left as it was, whatever happens.
    """
    configs = {id(module.config): module.config for module in target.get_decoder().modules() if _has_config(module)}
    with _users_lock:
        for key, config in configs.items():
            _users[key] = _users.get(key, 0) + 1
            if _users[key] == 1:
                config._attn_implementation_internal = _register(own_attention(config))
    try:
        yield
    finally:
        with _users_lock:
            for key, config in configs.items():
                _users[key] -= 1
                if not _users[key]:
                    del _users[key]
                    config._attn_implementation_internal = own_attention(config)


def attention_for_one(target: PreTrainedModel) -> AbstractContextManager[None]:
    """[`verifying_attention`] where a single row can gain from it: the model has `sdpa`, and lets it be replaced."""
    can_gain = own_attention(target.config.get_text_config(decoder=True)) == "sdpa" and can_run_ragged(target)
    return verifying_attention(target) if can_gain else nullcontext()


def _has_config(module: nn.Module) -> bool:
    return isinstance(getattr(module, "config", None), PreTrainedConfig)


@contextmanager
def flattened(tokens: Flattened) -> Iterator[None]:
    """This thread's passes are over these tokens."""
    _running.tokens = tokens
    try:
        yield
    finally:
        _running.tokens = None


def forward_flattened(
    target: PreTrainedModel, cache: RaggedCache, tokens: Flattened, position_ids: torch.Tensor, **inputs
) -> torch.Tensor:
    """
    One forward of the target over the tokens of all rows, which the cache then holds, inside [`verifying_attention`];
    logits (N, V). `position_ids` and the inputs are (1, N, ...).
    """
    cache.begin(tokens.counts, tokens.rows, tokens.columns, tokens.longest)
    with flattened(tokens):
        outputs = target(**inputs, position_ids=position_ids, use_cache=True, return_dict=True, **{CACHE: cache})
    cache.keep(tokens.counts)
    return outputs.logits[0]


def _register(implementation: str) -> str:
    name = _PREFIX + implementation
    AttentionInterface.register(name, partial(_attention, implementation))
    AttentionMaskInterface.register(name, partial(_mask, implementation))
    return name


def _function(implementation: str, module: nn.Module) -> Callable:
    return ALL_ATTENTION_FUNCTIONS.get_interface(
        implementation, sys.modules[type(module).__module__].eager_attention_forward
    )


def _padded(implementation: str) -> str:
    """What computes attention with a mask for every row; not all implementations take one."""
    return implementation if implementation in ("eager", "sdpa") else "sdpa"


def _attention(
    implementation: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    The model's own attention, but for a few queries with a mask whose heads share keys: `sdpa` would copy the whole
    cache for them, head by head. Here the queries of heads that share keys are rows of one head.

    Inside [`flattened`], queries are (1, heads, N, head_dim), keys and values (R, kv heads, longest, head_dim).
    """
    tokens = getattr(_running, "tokens", None)
    if tokens is not None:
        implementation, query = _padded(implementation), tokens.pad(query)
    rows, heads, width, size = query.shape
    shared = heads // key.shape[1]
    few = implementation == "sdpa" and shared > 1 and width <= _WIDEST
    one_mask = attention_mask is not None and attention_mask.shape[1] == 1
    more = kwargs.get("dropout") or any(kwargs.get(name) is not None for name in ("position_bias", "softcap"))
    if more or not (few and one_mask):
        own = _function(implementation, module)
        output, weights = own(module, query, key, value, attention_mask, **kwargs)
        return (output, weights) if tokens is None else (tokens.unpad(output.transpose(1, 2)), None)
    output = F.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], shared * width, size),
        key,
        value,
        attn_mask=attention_mask.expand(-1, shared, -1, -1).reshape(len(attention_mask), 1, shared * width, -1),
        scale=kwargs.get("scaling"),
    ).reshape(rows, heads, width, -1)
    return (output.transpose(1, 2).contiguous() if tokens is None else tokens.unpad(output)), None


def _mask(implementation: str, *args, **kwargs) -> torch.Tensor | None:
    """
    The mask (R, 1, width, longest) of a kind of layers, which is its mask function, asked about columns of the cache.

    Columns that a row does not have lie behind all its tokens, where causal attention never looks; what padding sees
    does not matter.
    """
    tokens = getattr(_running, "tokens", None)
    if tokens is None:
        make = AttentionMaskInterface().get(implementation)
        return None if make is None else make(*args, **kwargs)
    device, window = kwargs["device"], kwargs.get("local_size")
    causal = kwargs.get("allow_is_causal_skip") and (window is None or tokens.width <= window)
    if _padded(implementation) == "sdpa" and causal and tokens.even and not any(tokens.lengths):
        return None  # plainly causal, which needs no mask
    held = torch.tensor(tokens.lengths, device=device)[:, None, None, None]
    queries = held + torch.arange(tokens.width, device=device)[:, None]
    columns = torch.arange(tokens.longest, device=device)
    whichever = torch.zeros((), dtype=torch.long, device=device)  # of sequence or head: the mask is the same
    visible = kwargs["mask_function"](whichever, whichever, queries, columns)
    dtype = kwargs.get("dtype", torch.float32)  # each layer would turn a boolean mask into such numbers
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(~visible, torch.finfo(dtype).min)
