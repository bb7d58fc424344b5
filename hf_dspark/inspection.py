"""What a drafter's checkpoint is, from its config and the headers of its weights."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import groupby

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from .backbone.attention_mask import AttentionPattern, attention_patterns
from .checkpoints import NATIVE, WRITERS, Checkpoint, config_dict, format_of, obstacle, writer
from .configuration_dspark import DSparkConfig
from .modeling_dspark import DSparkModel

RUNS = "runs here"


def inspect(path: str | os.PathLike, target: str | os.PathLike | None = None, **hub_arguments) -> dict[str, str]:
    """
    Describe a drafter without loading it. One that is refused is described as far as possible, with the reason.

    Args:
        path: a folder or a Hub repository.
        target: the folder or the repository of a model that it may be for.
        hub_arguments: `revision`, `subfolder` and so on.

    Returns:
        What there is to say, by what it is about.

    Raises:
        OSError: there is no such drafter, or no such target.
        ValueError: it is no drafter in a known format, or the target is no causal language model.
    """
    found = format_of(config_dict(path, **hub_arguments))
    if found is None:
        Checkpoint(path, **hub_arguments)  # which says so
    rows = {"format": str(found.NAME)}
    try:
        checkpoint = Checkpoint(path, download=False, **hub_arguments)
        config = DSparkConfig.from_dict(checkpoint.translate())
        DSparkModel.check_tensors(config, checkpoint)
    except ValueError as error:
        return rows | {RUNS: f"no: {error}"}
    count = sum(math.prod(shape) for name, shape in checkpoint.tensors.items() if name != "d2t")
    rows |= {"size": f"{count:,} parameters, {checkpoint.size:,} bytes", **dict(_architecture(config))}
    for name in WRITERS:
        rows[f"as {name}"] = _writable(name, config)
    rows[RUNS] = "yes"
    if target is not None:
        rows["fits the target"] = _fit(config, target)
    return rows


def _architecture(config: DSparkConfig) -> Iterator[tuple[str, str]]:
    layers = config.num_target_layers or f"at least {config.target_layer_ids[-1] + 1}"
    yield "made for", config.base_model or "a target it does not name"
    yield "target's size", f"{layers} layers, hidden size {config.target_hidden_size}, {config.vocab_size:,} tokens"
    outputs = ", ".join("embeddings" if i < 0 else str(i) for i in config.target_layer_ids)
    hidden_states = ", ".join(str(i + 1) for i in config.target_layer_ids)
    yield "layers it reads", f"the outputs of {outputs}; in hidden_states, {hidden_states}"
    slots = "anchor-first: slot k drafts the token k + 1 places behind the anchor"
    if not config.sample_from_anchor:
        slots = "1 + N: slot k drafts the token k places behind the anchor, slot 0 none"
    yield "block", f"{config.block_size} rows, {config.num_draft_tokens} drafts; {slots}"
    yield "mask token", str(config.mask_token_id)
    yield "sequential head", _sequential_head(config)
    if config.copy_ngram_size:
        yield "copy head", f"for repetitions of up to {config.copy_ngram_size} tokens"
    with_markov = config.confidence_head_with_markov and config.markov_rank > 0
    reads = "hidden state and previous token" if with_markov else "hidden state"
    yield "confidence head", f"of {reads}" if config.enable_confidence_head else "none"
    yield "draft vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"
    yield "embeddings", "its own" if config.has_embed_tokens else "the target's"
    yield "output head", "its own" if config.has_lm_head else "the target's"
    heads = f"{config.num_attention_heads} heads over {config.num_key_value_heads} of size {config.head_dim}"
    yield (
        "draft layers",
        f"{config.num_hidden_layers} of {config.backbone}'s kind: hidden size {config.hidden_size}, MLP "
        f"{config.intermediate_size}, {heads}",
    )
    first = 0
    for pattern, group in groupby(attention_patterns(config)):
        count = len(list(group))
        name = f"layer {first}" if count == 1 else f"layers {first} to {first + count - 1}"
        yield name, _pattern(pattern)
        first += count
    rope = {name: value for name, value in config.rope_parameters.items() if name != "rope_type"}
    yield "rotary embedding", ", ".join([_rope_type(config), *(f"{name} {value}" for name, value in rope.items())])
    if extras := list(_extras(config)):
        yield "besides", ", ".join(extras)


def _sequential_head(config: DSparkConfig) -> str:
    if config.selector_rank:
        return f"candidate selector, rank {config.selector_rank}, among the top {config.selector_top_k}"
    return f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none (DFlash)"


def _pattern(pattern: AttentionPattern) -> str:
    context = "all of the context"
    if pattern.window is not None:
        start = "the anchor" if pattern.from_anchor else "each row"
        context = f"a window of {pattern.window} that ends with {start}"
    return f"{context}; the block {'causally' if pattern.causal else 'both ways'}"


def _rope_type(config: DSparkConfig) -> str:
    return f"{config.rope_parameters['rope_type']}{', interleaved' if config.rope_interleaved else ''}"


def _extras(config: DSparkConfig) -> Iterator[str]:
    if config.attention_bias:
        yield "biases in attention"
    if config.attention_sink_bias:
        yield "attention sinks"
    if config.attention_k_eq_v:
        yield "values from keys"
    if config.input_embedding_scale is None:
        yield "embeddings scaled as the target's"
    scales = ("input_embedding_scale", "attention_value_scale", "output_multiplier", "final_logit_softcapping")
    for name in scales:
        if (value := getattr(config, name)) not in (None, 1.0):
            yield f"{name} {value:g}"


def _writable(name: str, config: DSparkConfig) -> str:
    if (reason := obstacle(name, config)) is not None:
        return f"no: {reason}"
    borrowed = borrowed_tables(name, config)
    return f"yes, given the target's {' and '.join(borrowed)}" if borrowed else "yes"


def borrowed_tables(name: str, config: DSparkConfig) -> list[str]:
    """Tables that a checkpoint in the format of that name has to have, and that this drafter borrows."""
    if name == NATIVE:
        return []
    return [table for table in writer(name, config).tables(config) if not getattr(config, f"has_{table}")]


def _fit(config: DSparkConfig, target: str | os.PathLike) -> str:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target))
        drafter = DSparkModel(config)
    try:
        drafter.check_target(model)
    except ValueError as error:
        return f"no: {error}"
    return "yes"
