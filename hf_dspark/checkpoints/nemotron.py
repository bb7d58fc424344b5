"""
NVIDIA Nemotron drafters: DeepSpec's layout with attention sinks, causal blocks and sliding windows.

The taps are counted from the embeddings on (`eagle_aux_hidden_state_layer_ids`), and the config has to say which token
slot 0 predicts.
"""

from __future__ import annotations

from .fields import Fields, transformers_fields
from .translation import Shapes, architectures, tensor_name
from .translation import translate as translate_fields

__all__ = ["NAME", "recognises", "tensor_name", "translate"]

NAME = "Nemotron DSpark"


def recognises(config: dict) -> bool:
    return "Qwen3DSparkModel" in architectures(config) and "eagle_aux_hidden_state_layer_ids" in config


def translate(config: dict, tensors: Shapes) -> dict:
    """
    `DSparkConfig` fields from the config and the tensor shapes.

    Raises:
        ValueError: a required field is missing, a field contradicts the tensors, or it is unknown what a field does.
    """
    fields = Fields(NAME, config, ["dspark_config", "dflash_config"])
    layer_ids = [i - 1 for i in fields.ids("eagle_aux_hidden_state_layer_ids") or []]
    if not layer_ids:
        fields.need("eagle_aux_hidden_state_layer_ids", list)
    if (said := fields.ids("target_layer_ids")) not in (None, layer_ids):
        raise ValueError(
            f"`target_layer_ids` {said} are not `eagle_aux_hidden_state_layer_ids` less one, {layer_ids}: this "
            "drafter says two different things about the layers it reads."
        )
    for name, tensor in (("has_embed_tokens", "embed_tokens.weight"), ("has_lm_head", "lm_head.weight")):
        if fields.get(name, bool, tensor in tensors) != (tensor in tensors):
            raise ValueError(f"`{name}` is {config[name]}, but {tensor} says otherwise.")
    translated = translate_fields(fields, tensors, sample_from_anchor=None, target_layer_ids=layer_ids)
    fields.refuse_unknown(transformers_fields(config.get("model_type")), of_target=True)
    return translated
