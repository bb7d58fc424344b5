"""
transformers' own DFlash drafter, `muse_glimmer_assistant`: slot 0 is unused, rows of a block see each other both ways.

Its window reaches `sliding_window` places back, one more than in other formats.
"""

from __future__ import annotations

from . import translation
from .fields import Fields, transformers_fields
from .translation import Shapes, architectures

NAME = "transformers Muse Glimmer assistant"
VOCABULARY = 202048  # of the target; the config does not say
ENCODER = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
DEFAULTS = {
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
    "sliding_window": 2048,
}


def recognises(config: dict) -> bool:
    return config.get("model_type") == "muse_glimmer_assistant" or "MuseGlimmerAssistantModel" in architectures(config)


def tensor_name(name: str) -> str | None:
    name = translation.tensor_name(name)
    return ENCODER.get(name, name)


def translate(config: dict, tensors: Shapes) -> dict:
    """
    `DSparkConfig` fields from the config and the tensor shapes.

    Raises:
        ValueError: a required field is missing, a field contradicts the tensors, or it is unknown what a field does.
    """
    config = DEFAULTS | {name: value for name, value in config.items() if value is not None}
    fields = Fields(NAME, config)
    config.setdefault("layer_types", ["sliding_attention"] * fields.need("num_hidden_layers", int))
    translated = translation.translate(fields, tensors, sample_from_anchor=False)
    translated["causal_in_block"] = False
    if translated["sliding_window"] is not None:
        translated["sliding_window"] += 1
    fields.refuse_unknown(transformers_fields("muse_glimmer_assistant"))
    return translated
