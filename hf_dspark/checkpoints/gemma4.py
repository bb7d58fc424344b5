"""
DeepSpec checkpoints with a Gemma4 backbone (`Gemma4DSparkModel`).

The config is a copy of the text config of a Gemma4 target with the drafter's fields on top. All layers are of its
full-attention kind, whose sizes are the `global` ones. Embeddings are scaled and base logits capped as the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..configuration_dspark import DSparkConfig
from . import translation
from .deepspec import drafter_fields, tables, write_tensors
from .fields import Fields, transformers_fields
from .translation import Shapes, architectures, tensor_name
from .translation import translate as translate_fields

__all__ = ["NAME", "recognises", "tables", "tensor_name", "translate", "write_config", "write_tensors"]

NAME = "DeepSpec Gemma4"
# Of the target's other layers, and of parts that the drafter does not have.
HARMLESS = {
    *("use_bidirectional_attention", "use_double_wide_mlp", "moe_intermediate_size", "num_experts", "top_k_experts"),
    *("num_kv_shared_layers", "vocab_size_per_layer_input", "per_layer_config"),
}
READ = {"global_head_dim", "num_global_key_value_heads", "hidden_activation", "attention_k_eq_v"}


def recognises(config: dict) -> bool:
    return "Gemma4DSparkModel" in architectures(config)


def translate(config: dict, tensors: Shapes) -> dict:
    """
    `DSparkConfig` fields from the config and the tensor shapes.

    Raises:
        ValueError: a required field is missing, a field contradicts the tensors, or it is unknown what a field does.
    """
    theirs = Fields(NAME, config)
    for name, kind in (("enable_moe_block", bool), ("hidden_size_per_layer_input", int)):
        if theirs.get(name, kind, 0):
            raise ValueError(f"`{name}` is {config[name]}: Gemma4 drafters with that are not supported.")
    values_from_keys = theirs.get("attention_k_eq_v", bool, False)
    rope = theirs.need("rope_parameters", dict).get("full_attention")
    if not isinstance(rope, dict):
        raise ValueError(f"A {NAME} config needs `rope_parameters` of `full_attention`.")
    kinds = theirs.need("layer_types", list)
    if not kinds or any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"The layers of a {NAME} drafter attend fully, this one has `layer_types` {kinds}.")
    whole = {
        **config,
        "head_dim": theirs.need("global_head_dim", int),
        "num_key_value_heads": theirs.need(
            "num_global_key_value_heads" if values_from_keys else "num_key_value_heads", int
        ),
        "hidden_act": theirs.need("hidden_activation", str),
        "rope_parameters": rope,
    }
    fields = Fields(NAME, whole)
    translated = translate_fields(fields, tensors, sample_from_anchor=True)
    translated |= {
        "rope_parameters": rope,  # rotating a part of each head is the backbone's own way
        "backbone": "gemma4",
        "attention_k_eq_v": values_from_keys,
        "input_embedding_scale": translated["hidden_size"] ** 0.5,
        "final_logit_softcapping": fields.get("final_logit_softcapping", float),
    }
    known = transformers_fields("gemma4_text") | transformers_fields(config.get("target_text_model_type"))
    fields.refuse_unknown(known | HARMLESS | READ, of_target=True)
    return translated


def write_config(config: DSparkConfig, target_architectures: Sequence[str] = ()) -> dict:
    """
    config.json of a drafter.

    Args:
        target_architectures: the target's, for which DeepSpec has no field.

    Raises:
        ValueError: DeepSpec cannot express it.
    """
    here = ("attention_k_eq_v", "final_logit_softcapping", "input_embedding_scale")
    plain = {name: value for name, value in translation.PLAIN.items() if name not in here}
    reasons = {
        "pruned vocabulary": config.draft_vocab_size < config.vocab_size,
        "sliding windows": any(translation.sliding_layers(config)),
        "causal blocks": any(translation.causal_layers(config)),
        f"`input_embedding_scale` {config.input_embedding_scale}": config.input_embedding_scale
        != config.hidden_size**0.5,
    }
    translation.refuse_beyond(NAME, config, plain, reasons)
    backbone = translation.qwen3_fields(config)
    for name in ("hidden_act", "use_sliding_window", "sliding_window"):
        del backbone[name]
    return {
        "architectures": ["Gemma4DSparkModel"],
        **backbone,
        "model_type": "gemma4_text",
        "hidden_activation": config.hidden_act,
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.num_key_value_heads,
        "attention_k_eq_v": config.attention_k_eq_v,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope_parameters": {
            "full_attention": config.rope_parameters,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},  # of no layer here
        },
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        **drafter_fields(config),
    }
