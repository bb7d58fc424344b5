"""What the formats have in common: they all keep a Qwen3-style drafter under about the same names."""

from __future__ import annotations

import re
from typing import Any

from ..configuration_dspark import DSparkConfig
from .fields import Fields

Shapes = dict[str, tuple[int, ...]]

GEOMETRY = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Inherited from multimodal targets and without meaning here: the drafter rotates whole heads.
INHERITED_ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
# What not every format can say, with its values in a drafter that has nothing of it.
PLAIN: dict[str, Any] = {
    "attention_k_eq_v": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "rope_interleaved": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "selector_rank": 0,
}
# Patterns of tensors that are there for training, or that follow from the config.
DROPPED = [r"(^|\.)(t2d|mask_embedding(\.weight)?)$", r"(^|\.)(rotary_emb|verifier_lm_head|verifier_norm)\."]


def tensor_name(name: str) -> str | None:
    """The name that a [`DSparkModel`] has for a tensor of a checkpoint, `None` if it is not for drafting."""
    name = name.removeprefix("model.")
    return None if any(re.search(pattern, name) for pattern in DROPPED) else name


def translate(
    fields: Fields,
    tensors: Shapes,
    sample_from_anchor: bool | None,
    target_layer_ids: list[int] | None = None,
    block_size: int | None = None,
) -> dict:
    """
    `DSparkConfig` fields of a drafter with the fields that most formats share.

    Args:
        sample_from_anchor: what it means if the config does not say; `None` if it has to.
        target_layer_ids: the tapped layers, if they are not simply there.
        block_size: what it is if the config does not say.

    Raises:
        ValueError: a required field is missing, or a field contradicts the tensors.
    """
    anchor_first = fields.get("sample_from_anchor", bool, sample_from_anchor)
    if anchor_first is None:
        anchor_first = fields.need("sample_from_anchor", bool)
    return {
        "model_type": "dspark",
        **backbone(fields, tensors),
        **attention(fields, tensors),
        **heads(fields, tensors),
        "rope_parameters": rope(fields),
        "rope_interleaved": not fields.get("rope_is_neox_style", bool, True),
        "num_target_layers": fields.get("num_target_layers", int),
        "target_hidden_size": fields.get("target_hidden_size", int),
        "target_layer_ids": target_layer_ids or fields.ids("target_layer_ids") or [],
        "block_size": fields.agreed("block_size", int) or block_size or fields.need("block_size", int),
        "mask_token_id": fields.need("mask_token_id", int),
        "sample_from_anchor": anchor_first,
    }


def backbone(fields: Fields, tensors: Shapes) -> dict:
    """Sizes of the layers; which tables there are follows from the tensors."""
    if fields.get("quantization_config", dict):
        raise ValueError(
            f"This {fields.name} drafter is quantised (`quantization_config`), which hf_dspark does not read: "
            "dequantise its weights to bfloat16 first."
        )
    config = {name: fields.need(name, int) for name in GEOMETRY}
    config["num_key_value_heads"] = fields.get("num_key_value_heads", int, config["num_attention_heads"])
    config["head_dim"] = fields.get("head_dim", int)
    if config["head_dim"] is None:
        config["head_dim"] = _size(tensors, "layers.0.self_attn.q_norm.weight", 1)
    config["hidden_act"] = fields.get("hidden_act", str, "silu")
    config["rms_norm_eps"] = fields.get("rms_norm_eps", float, 1e-6)
    config["attention_bias"] = fields.get("attention_bias", bool, False)
    config["max_position_embeddings"] = fields.get("max_position_embeddings", int, 32768)
    config["initializer_range"] = fields.get("initializer_range", float, 0.02)
    config["dtype"] = fields.get("dtype", str) or fields.get("torch_dtype", str)
    config["has_embed_tokens"] = "embed_tokens.weight" in tensors
    config["has_lm_head"] = "lm_head.weight" in tensors

    config["draft_vocab_size"] = _size(tensors, "d2t", 1) if "d2t" in tensors else config["vocab_size"]
    said = fields.get("draft_vocab_size", int, config["draft_vocab_size"])
    if said != config["draft_vocab_size"]:
        raise ValueError(
            f"`draft_vocab_size` is {said}, but "
            + (f"`d2t` has {config['draft_vocab_size']} entries." if "d2t" in tensors else "there is no `d2t`.")
        )
    return config


def attention(fields: Fields, tensors: Shapes) -> dict:
    """
    Windows, causal blocks, sinks and value scale.

    Where nothing is said about a whole drafter, rows of a block see each other causally in sliding layers and both
    ways in full ones.
    """
    layers = fields.need("num_hidden_layers", int)
    kinds = fields.get("layer_types", list)
    causal = fields.get("is_causal", bool)
    for name in ("causal", "dflash_query_causal"):
        said = fields.get(name, bool)
        causal = said if causal is None else causal
    if fields.get("use_swa", bool, False):
        kinds, causal = ["sliding_attention"] * layers, bool(causal)
    elif kinds is None:
        if fields.get("use_sliding_window", bool, False):
            raise ValueError(f"This {fields.name} config has `use_sliding_window`, but no `layer_types`.")
        kinds = ["full_attention"] * layers
    window = fields.get("sliding_window", int)
    window = fields.get("swa_window_size", int, window)
    sinks = "layers.0.self_attn.attention_sink_bias" in tensors
    if fields.get("attention_sink_bias", bool, False) and not sinks:
        raise ValueError("The config has `attention_sink_bias`, but the tensors of that name are missing.")
    return {
        "layer_types": kinds,
        "sliding_window": window if "sliding_attention" in kinds else None,
        "causal_in_block": [kind == "sliding_attention" for kind in kinds] if causal is None else causal,
        "attention_sink_bias": sinks,
        "attention_value_scale": fields.get("attention_value_scale", float, 1.0),
    }


def rope(fields: Fields) -> dict:
    """`rope_parameters`, from those or from the `rope_theta` and `rope_scaling` that transformers 4 wrote."""
    parameters, theta = fields.get("rope_parameters", dict), fields.get("rope_theta", float)
    scaling = fields.get("rope_scaling", dict, {})
    if parameters is None:
        if theta is None:
            raise ValueError(f"A {fields.name} config needs `rope_parameters` or `rope_theta`.")
        parameters = {**scaling, "rope_theta": theta}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    if by_layer:
        if any(value != by_layer[0] for value in by_layer):
            raise ValueError(f"This {fields.name} config has different `rope_parameters` for different layers.")
        parameters = by_layer[0]
    parameters = {name: value for name, value in parameters.items() if name not in INHERITED_ROPE}
    kind = parameters.pop("rope_type", None) or parameters.get("type") or "default"
    parameters.pop("type", None)
    parameters.setdefault("rope_theta", theta)
    return {**parameters, "rope_type": "default" if kind == "mrope" else kind}


def heads(fields: Fields, tensors: Shapes) -> dict:
    """Sequential and confidence head, as the tensors make them."""
    rank, kind = 0, "vanilla"
    if "markov_head.markov_w1.weight" in tensors:
        rank = _size(tensors, "markov_head.markov_w1.weight", 2)
        if "markov_head.joint_proj.weight" in tensors:
            kind = "rnn"
        elif "markov_head.gate_proj.weight" in tensors:
            kind = "gated"
    said_rank, said_kind = fields.get("markov_rank", int, rank), fields.get("markov_head_type", str, kind)
    if said_rank and not rank:
        raise ValueError(f"`markov_rank` is {said_rank}, but `markov_head.markov_w1.weight` is missing.")
    if rank and said_kind != kind:
        raise ValueError(f"`markov_head_type` is {said_kind!r}, but the tensors make a {kind} head.")

    has_confidence = "confidence_head.proj.weight" in tensors
    if fields.get("enable_confidence_head", bool, False) and not has_confidence:
        raise ValueError("The config has `enable_confidence_head`, but `confidence_head.proj.weight` is missing.")
    with_markov = fields.get("confidence_head_with_markov", bool, True)
    if has_confidence:
        with_markov = _size(tensors, "confidence_head.proj.weight", 2) > fields.need("hidden_size", int)
    return {
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": has_confidence,
        "confidence_head_with_markov": with_markov,
    }


def _size(tensors: Shapes, name: str, dimensions: int) -> int:
    """The last dimension of a tensor."""
    if len(tensors.get(name, ())) != dimensions:
        raise ValueError(f"{name} has the shape {tensors.get(name)}, not one of {dimensions} dimensions.")
    return tensors[name][-1]


def architectures(config: dict) -> list:
    """What the config says the model's class is."""
    names = config.get("architectures")
    return names if isinstance(names, list) else []


def section(config: dict, name: str) -> dict:
    """A nested object of a config, empty if there is none of that name."""
    return config[name] if isinstance(config.get(name), dict) else {}


# Writing


def refuse_beyond(name: str, config: DSparkConfig, plain: dict[str, Any], reasons: dict[str, bool]) -> None:
    """
    Args:
        name: of the format that is to be written.
        plain: fields that it does not have, and the values that need none.
        reasons: what else it may lack, and whether this drafter would need it.

    Raises:
        ValueError: the format cannot say what this drafter computes.
    """
    found = {field: getattr(config, field) for field in plain}
    lacking = [f"`{field}` {value}" for field, value in found.items() if value != plain[field]]
    last = config.num_target_layers and config.num_target_layers - 1
    common = {
        "a `target_hidden_size` other than `hidden_size`": config.target_hidden_size != config.hidden_size,
        f"layer {last} among `target_layer_ids`, whose output engines have behind the final norm alone": last
        in config.target_layer_ids,
    }
    lacking += [reason for reason, is_there in (common | reasons).items() if is_there]
    if lacking:
        raise ValueError(f"The {name} format has no way to express this drafter's {'; '.join(lacking)}.")


def qwen3_fields(config: DSparkConfig) -> dict:
    """The fields of a Qwen3 config that has this drafter's layers."""
    names = (
        *(*GEOMETRY, "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias"),
        *("max_position_embeddings", "initializer_range", "rope_parameters", "layer_types", "sliding_window"),
    )
    fields = {name: getattr(config, name) for name in names}
    return {"model_type": "qwen3", **fields, "use_sliding_window": "sliding_attention" in config.layer_types}


def turns_part_of_heads(config: DSparkConfig) -> bool:
    """Whether `rope_parameters` have what formats with Qwen3 layers take for a leftover of the target's config."""
    return any(name in config.rope_parameters for name in INHERITED_ROPE)


def heads_fields(config: DSparkConfig) -> dict:
    """What most formats call the heads."""
    fields: dict[str, Any] = {
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.enable_confidence_head,
    }
    if config.markov_rank:
        fields["markov_head_type"] = config.markov_head_type
    return fields | {"confidence_head_with_markov": config.confidence_head_with_markov and config.markov_rank > 0}


def causal_layers(config: DSparkConfig) -> list[bool]:
    """For each layer, whether the rows of a block see only those before them."""
    causal = config.causal_in_block
    return causal if isinstance(causal, list) else [causal] * config.num_hidden_layers


def sliding_layers(config: DSparkConfig) -> list[bool]:
    """For each layer, whether it slides; where a config says no more than that, these layers are the causal ones."""
    return [kind == "sliding_attention" for kind in config.layer_types]
