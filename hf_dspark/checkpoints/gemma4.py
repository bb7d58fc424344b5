"""
DeepSpec checkpoints with a Gemma4 backbone (`Gemma4DSparkModel`).

The config is a copy of the text config of a Gemma4 target with the drafter's fields on top. All layers are of its
full-attention kind: their sizes are the `global` ones.
"""

from __future__ import annotations

from . import deepspec

REQUIRED = ("global_head_dim", "hidden_activation", "intermediate_size", "num_attention_heads", "num_hidden_layers")


def recognises(config: dict) -> bool:
    return "Gemma4DSparkModel" in (config.get("architectures") or [])


def translate(config: dict, tensors: dict[str, tuple[int, ...]]) -> dict:
    """
    `DSparkConfig` fields from the config and the tensor shapes.

    Raises:
        ValueError: a required field is missing, a field contradicts the tensors, or there are experts or per-layer
            inputs.
    """
    missing = [name for name in REQUIRED if config.get(name) is None]
    if missing:
        raise ValueError(f"A DeepSpec config with a Gemma4 backbone needs {missing}.")
    for name in ("enable_moe_block", "hidden_size_per_layer_input"):
        if config.get(name):
            raise ValueError(f"`{name}` is {config[name]}: Gemma4 drafters with that are not supported.")
    shares = bool(config.get("attention_k_eq_v"))
    kv_heads = "num_global_key_value_heads" if shares else "num_key_value_heads"
    if config.get(kv_heads) is None:
        raise ValueError(f"A DeepSpec config with a Gemma4 backbone needs {[kv_heads]}.")
    theirs = {
        **config,
        "head_dim": config["global_head_dim"],
        "num_key_value_heads": config[kv_heads],
        "hidden_act": config["hidden_activation"],
        "rope_parameters": _rope_parameters(config),
    }
    fields = deepspec.translate(theirs, tensors)
    # The cut of `partial_rotary_factor` is this backbone's own, not inherited.
    return {
        **fields,
        "rope_parameters": theirs["rope_parameters"],
        "backbone": "gemma4",
        "attention_k_eq_v": shares,
        "input_embedding_scale": config["hidden_size"] ** 0.5,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }


def _rope_parameters(config: dict) -> dict:
    """Those of full attention; beside them stand a sliding layer's and fields without values."""
    parameters = (config.get("rope_parameters") or {}).get("full_attention")
    if parameters is None:
        raise ValueError("A DeepSpec config with a Gemma4 backbone needs `rope_parameters` of `full_attention`.")
    return parameters
