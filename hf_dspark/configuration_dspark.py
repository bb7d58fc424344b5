"""DSpark drafter configuration."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Backbone = Literal["qwen3", "gemma4", "dflash2"]
HeadType = Literal["vanilla", "gated", "rnn"]
LayerType = Literal["full_attention", "sliding_attention"]
WindowStart = Literal["row", "anchor"]
# Fields whose values are switches, numbers and words, where a wrong one would only show later.
KINDS: dict[type | tuple[type, ...], tuple[str, ...]] = {
    bool: (
        *("attention_bias", "attention_k_eq_v", "attention_sink_bias", "rope_interleaved", "sample_from_anchor"),
        *("enable_confidence_head", "confidence_head_with_markov", "has_embed_tokens", "has_lm_head"),
    ),
    (int, float): (
        *("rms_norm_eps", "initializer_range", "attention_dropout", "attention_value_scale", "output_multiplier"),
        "input_embedding_scale",
    ),
    str: ("hidden_act",),
}
LONGEST_REPETITION = 64
MOST_LAYERS = 1000  # beyond that, a number in a file is a mistake, and not one to make room for


@strict
class DSparkConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DSparkModel`]: a drafter for one particular target model.

    Args:
        vocab_size: size of the target's vocabulary.
        draft_vocab_size: how many of the target's tokens the drafter can propose; `None` means all. A smaller one
            comes with a `d2t` tensor in the checkpoint (`target_id = draft_id + d2t[draft_id]`).
        backbone: the kind of draft layers: `"qwen3"`; `"gemma4"`, with norms on both sides of attention and MLP; or
            `"dflash2"`, Qwen3's with convolutions along the block.
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
        hidden_act, rms_norm_eps, attention_bias, rope_parameters, max_position_embeddings: the size of the backbone.
        attention_k_eq_v: whether values are made from the keys' projection (`"gemma4"` only).
        conv_kernel_size: rows that a convolution mixes (`"dflash2"` only).
        conv_group_size: channels that share the part of a kernel that depends on the row (`"dflash2"` only).
        layer_types: `"full_attention"` (the default) or `"sliding_attention"` for each layer.
        sliding_window: context rows that a sliding layer sees.
        sliding_window_from: `"row"` if each row of a block sees the `sliding_window` positions that end with its own,
            `"anchor"` if they all see the `sliding_window` positions before the anchor, and each other.
        causal_in_block: for each layer, or for all at once, whether the rows of a block see only those before them.
        attention_sink_bias: whether each head has a logit that takes part in the softmax and leads nowhere.
        attention_value_scale: factor of the values.
        rope_interleaved: whether rotary pairs are neighbours in a head, instead of half a head apart.
        input_embedding_scale: factor of the embeddings of a block; `None` is the one that the target's embedding
            module has (1 where it has none).
        output_multiplier: factor of the base logits.
        final_logit_softcapping: c in `c · tanh(base logits / c)`, applied before the sequential head's bias.
        target_hidden_size: hidden size of the target (default: `hidden_size`).
        num_target_layers: number of decoder layers of the target, when it is known.
        target_layer_ids: the tapped target layers, strictly increasing; `i` is the output of decoder layer `i`, `-1`
            the target's embedding output.
        block_size: rows of a draft block.
        mask_token_id: the token that fills the block after the anchor.
        sample_from_anchor: whether slot `k` predicts the token `k + 1` places after the anchor (`block_size` drafts),
            or `k` places after it, so that slot 0 goes unused (`block_size - 1` drafts).
        markov_rank: rank of the sequential head, 0 for none (plain DFlash).
        markov_head_type: `"vanilla"`, `"gated"` or `"rnn"`.
        selector_rank: rank of a candidate selector, 0 for none; it takes the place of the sequential head.
        selector_top_k: tokens of each slot that the selector chooses from.
        copy_ngram_size: most tokens of a repetition that a copy head goes by, 0 for none.
        enable_confidence_head: whether each draft token comes with a predicted acceptance probability.
        confidence_head_with_markov: whether that head also reads the embedding of the previous token.
        has_embed_tokens, has_lm_head: whether the checkpoint has its own; otherwise the target's are used.
        base_model: the target's repository on the Hub, when it has one (never a folder).
    """

    model_type = "dspark"

    vocab_size: int = 151936
    draft_vocab_size: int | None = None
    backbone: Backbone = "qwen3"
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0
    attention_k_eq_v: bool = False
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    sliding_window_from: WindowStart = "row"
    causal_in_block: bool | list[bool] = False
    attention_sink_bias: bool = False
    attention_value_scale: float = 1.0
    rope_interleaved: bool = False
    input_embedding_scale: float | None = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = False

    target_hidden_size: int | None = None
    num_target_layers: int | None = None
    target_layer_ids: list[int] | tuple[int, ...] = (1, 9, 17, 25, 33)
    block_size: int = 7
    mask_token_id: int = 0
    sample_from_anchor: bool = True

    markov_rank: int = 256
    markov_head_type: HeadType = "vanilla"
    selector_rank: int = 0
    selector_top_k: int = 16
    copy_ngram_size: int = 0
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    has_embed_tokens: bool = False
    has_lm_head: bool = False
    base_model: str | None = None

    def __post_init__(self, **kwargs):
        if not 0 < self.num_hidden_layers <= MOST_LAYERS:
            raise ValueError(f"`num_hidden_layers` is {self.num_hidden_layers}, not 1 to {MOST_LAYERS}.")
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.target_hidden_size = self.target_hidden_size or self.hidden_size
        self.draft_vocab_size = self.draft_vocab_size or self.vocab_size
        self.layer_types = self.layer_types or ["full_attention"] * self.num_hidden_layers
        self.target_layer_ids = list(self.target_layer_ids)
        super().__post_init__(**kwargs)
        self._check()
        if isinstance(self.causal_in_block, list) and len(set(self.causal_in_block)) == 1:
            self.causal_in_block = self.causal_in_block[0]

    def _check(self) -> None:
        for kind, names in KINDS.items():
            for name in names:
                value = getattr(self, name)
                is_none = value is None and name == "input_embedding_scale"
                if not is_none and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
                    raise ValueError(f"`{name}` of a drafter's config cannot be {value!r}.")
        dtype = getattr(torch, str(self.dtype).removeprefix("torch."), None)
        if self.dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"`dtype` of a drafter's config cannot be {self.dtype!r}.")
        if self.sliding_window_from not in get_args(WindowStart):
            raise ValueError(
                f"`sliding_window_from` is one of {get_args(WindowStart)}, got {self.sliding_window_from!r}."
            )
        sizes = (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "target_hidden_size", "max_position_embeddings", "block_size"),
        )
        for name in sizes:
            if not 0 < getattr(self, name) < 2**31:
                raise ValueError(f"`{name}` must be a positive number, got {getattr(self, name)}.")
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ValueError(
                f"`num_attention_heads` {self.num_attention_heads} is no multiple of `num_key_value_heads` "
                f"{self.num_key_value_heads}, or `head_dim` {self.head_dim} is odd."
            )
        if len(self.layer_types) != self.num_hidden_layers or set(self.layer_types) - set(get_args(LayerType)):
            raise ValueError(
                f"`layer_types` has one of {get_args(LayerType)} for each of {self.num_hidden_layers} layers, got "
                f"{self.layer_types}."
            )
        if "sliding_attention" in self.layer_types and not (self.sliding_window or 0) > 0:
            raise ValueError(f"Sliding layers need a positive `sliding_window`, got {self.sliding_window}.")
        causal = self.causal_in_block if isinstance(self.causal_in_block, list) else [self.causal_in_block]
        if not all(isinstance(value, bool) for value in causal):
            raise ValueError(f"`causal_in_block` is true or false, for all layers or for each, got {causal}.")
        if isinstance(self.causal_in_block, list) and len(causal) != self.num_hidden_layers:
            raise ValueError(
                f"`causal_in_block` is {self.causal_in_block}, there are {self.num_hidden_layers} layers."
            )
        rope = self.rope_parameters
        kind = rope.get("rope_type")
        if kind not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(f"`rope_type` is one of default, {', '.join(ROPE_INIT_FUNCTIONS)}, got {kind!r}.")
        for name in ("rope_theta", "factor", "original_max_position_embeddings"):
            value = rope.get(name)
            if (name in rope or name == "rope_theta") and not (isinstance(value, int | float) and value > 0):
                raise ValueError(f"`{name}` of `rope_parameters` must be a positive number, got {value!r}.")
        if self.final_logit_softcapping is not None and not self.final_logit_softcapping > 0:
            raise ValueError(f"`final_logit_softcapping` must be positive, got {self.final_logit_softcapping}.")
        if sorted(set(self.target_layer_ids)) != self.target_layer_ids or not self.target_layer_ids:
            raise ValueError(f"`target_layer_ids` must be strictly increasing, got {self.target_layer_ids}.")
        if self.target_layer_ids[0] < -1:
            raise ValueError(f"`target_layer_ids` starts at -1 (the embeddings), got {self.target_layer_ids}.")
        if self.markov_rank < 0:
            raise ValueError(f"`markov_rank` is 0 or more, got {self.markov_rank}.")
        if not 0 <= self.copy_ngram_size <= LONGEST_REPETITION:
            raise ValueError(f"`copy_ngram_size` is 0 to {LONGEST_REPETITION}, got {self.copy_ngram_size}.")
        if self.markov_head_type not in get_args(HeadType):
            raise ValueError(f"`markov_head_type` is one of {get_args(HeadType)}, got {self.markov_head_type!r}.")
        if self.backbone not in get_args(Backbone):
            raise ValueError(f"`backbone` is one of {get_args(Backbone)}, got {self.backbone!r}.")
        if self.attention_k_eq_v and self.backbone != "gemma4":
            raise ValueError(f"`attention_k_eq_v` is for Gemma4's draft layers, not for `backbone` {self.backbone!r}.")
        if self.backbone == "dflash2":
            if self.conv_group_size < 1 or self.hidden_size % self.conv_group_size:
                raise ValueError(
                    f"`conv_group_size` {self.conv_group_size} does not divide `hidden_size` {self.hidden_size}."
                )
            if not 0 < self.conv_kernel_size <= self.block_size:
                raise ValueError(
                    f"`conv_kernel_size` {self.conv_kernel_size} is not between 1 and `block_size` {self.block_size}."
                )
        if self.selector_rank < 0:
            raise ValueError(f"`selector_rank` is 0 or more, got {self.selector_rank}.")
        if self.selector_rank:
            self._check_selector()
        if self.num_draft_tokens < 1:
            raise ValueError(f"`block_size` {self.block_size} leaves no slot to draft in.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` {self.mask_token_id} lies outside the vocabulary of {self.vocab_size} tokens."
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` {self.draft_vocab_size} is not between 1 and `vocab_size` {self.vocab_size}."
            )

        if self.base_model is not None:
            try:
                validate_repo_id(self.base_model)
            except HFValidationError as error:
                raise ValueError(
                    f"`base_model` is the target's repository on the Hub, such as `org/name`, not {self.base_model!r}."
                ) from error

    def _check_selector(self) -> None:
        if self.markov_rank:
            raise ValueError(
                f"A drafter has one sequential head: set `markov_rank` (now {self.markov_rank}) or `selector_rank` "
                f"(now {self.selector_rank}) to 0."
            )
        if self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                f"A candidate selector needs the whole vocabulary of {self.vocab_size} tokens, `draft_vocab_size` is "
                f"{self.draft_vocab_size}."
            )
        if not 0 < self.selector_top_k <= self.vocab_size:
            raise ValueError(
                f"`selector_top_k` {self.selector_top_k} is not between 1 and `vocab_size` {self.vocab_size}."
            )

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As [`~transformers.PreTrainedConfig.from_dict`], with a `ValueError` for whatever is wrong with a field."""
        try:
            return super().from_dict(config_dict, **kwargs)
        except (StrictDataclassError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"The drafter's config cannot be read: {error}") from error

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Nothing: this is no code of a repository's own, and saving is not to copy it into one."""

    @property
    def num_draft_tokens(self) -> int:
        """γ, the number of tokens that one block drafts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1
