"""
DeepSpec checkpoints with a Qwen3 backbone (DSpark, and DFlash where `markov_rank` is 0).

The config is a copy of the target's with the drafter's fields on top; which heads and tables there are follows from
the tensors.
"""

from __future__ import annotations

BACKBONE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "attention_bias"),
    *("max_position_embeddings", "initializer_range", "dtype"),
)
INHERITED_ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
DRAFTER = ("num_target_layers", "target_layer_ids", "block_size", "mask_token_id")


def recognises(config: dict) -> bool:
    return "Qwen3DSparkModel" in (config.get("architectures") or []) and "target_layer_ids" in config


def translate(config: dict, tensors: dict[str, tuple[int, ...]]) -> dict:
    """
    `DSparkConfig` fields from the config and the tensor shapes.

    Raises:
        ValueError: a required field is missing, or a field contradicts the tensors.
    """
    missing = [name for name in (*DRAFTER, "hidden_size", "vocab_size") if config.get(name) is None]
    if missing:
        raise ValueError(f"A DeepSpec config needs {missing}.")
    fields = {name: config[name] for name in (*BACKBONE, *DRAFTER) if config.get(name) is not None}
    fields["rope_parameters"] = _rope_parameters(config)
    if any(kind != "full_attention" for kind in config.get("layer_types") or []):
        raise ValueError(f"DeepSpec drafters attend fully, this one has layer_types {config['layer_types']}.")
    fields["sample_from_anchor"] = config.get("sample_from_anchor", True)
    fields["markov_rank"], fields["markov_head_type"] = _sequential_head(config, tensors)
    fields["enable_confidence_head"] = "confidence_head.proj.weight" in tensors
    if config.get("enable_confidence_head") and not fields["enable_confidence_head"]:
        raise ValueError("The config has `enable_confidence_head`, but `confidence_head.proj.weight` is missing.")
    if fields["enable_confidence_head"]:
        width = tensors["confidence_head.proj.weight"][-1]
        fields["confidence_head_with_markov"] = width > config["hidden_size"]
    fields["has_embed_tokens"] = "embed_tokens.weight" in tensors
    fields["has_lm_head"] = "lm_head.weight" in tensors
    return {"model_type": "dspark", **fields}


def _rope_parameters(config: dict) -> dict:
    parameters = config.get("rope_parameters")
    if parameters is None:  # written by transformers 4
        if "rope_theta" not in config:
            raise ValueError("A DeepSpec config needs `rope_parameters` or `rope_theta`.")
        parameters = {"rope_type": "default", **(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    # Inherited from multimodal targets and without meaning here: the drafter rotates whole heads.
    return {name: value for name, value in parameters.items() if name not in INHERITED_ROPE}


def _sequential_head(config: dict, tensors: dict[str, tuple[int, ...]]) -> tuple[int, str]:
    if "markov_head.markov_w1.weight" not in tensors:
        if config.get("markov_rank"):
            raise ValueError(
                f"`markov_rank` is {config['markov_rank']}, but `markov_head.markov_w1.weight` is missing."
            )
        return 0, "vanilla"
    if "markov_head.joint_proj.weight" in tensors:
        kind = "rnn"
    elif "markov_head.gate_proj.weight" in tensors:
        kind = "gated"
    else:
        kind = "vanilla"
    if config.get("markov_head_type", kind) != kind:
        raise ValueError(f"`markov_head_type` is {config['markov_head_type']!r}, but the tensors make a {kind} head.")
    return tensors["markov_head.markov_w1.weight"][-1], kind
