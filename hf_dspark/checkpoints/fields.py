"""The fields of a foreign config, read by name; in the end, whatever was not read must be known to change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, Qwen3Config

from ..configuration_dspark import MOST_LAYERS

# What writers put into any config beside the model, or into a copy of a target's.
HARMLESS = {
    *("architectures", "auto_map", "custom_code", "transformers_version", "torch_dtype", "dtype", "name_or_path"),
    *("num_anchors", "target_model_type", "target_text_model_type", "base_model", "initializer_range"),
    *("tie_word_embeddings", "use_sliding_window", "attention_dropout", "max_window_layers", "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict", "torchscript", "use_bfloat16", "pruned_heads"),
}
# What the drafters have or could have, at the values that make no difference. Any other is read, or it is an error.
NEUTRAL: dict[str, Any] = {
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "mlp_bias": False,
    "rope_interleaved": False,
    "sliding_window_from": "row",
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "log_snr_conditioning": False,
    "backbone": "qwen3",
    "attention_k_eq_v": False,
    "selector_rank": 0,
}
# Copied from targets that transformers has no config for, or written before it had.
OF_TARGETS = {
    *("partial_rotary_factor", "mrope_section", "mrope_interleaved", "rope_theta", "rope_scaling", "head_dim"),
    *("attn_output_gate", "full_attention_interval", "use_qk_norm", "use_bias", "use_qkv_bias", "use_rmsnorm"),
    *("first_k_dense_replace", "n_routed_experts", "n_shared_experts", "n_group", "topk_group", "topk_method"),
    *("norm_topk_prob", "routed_scaling_factor", "score_function", "scoring_func", "output_router_logits"),
    *("decoder_sparse_step", "shared_expert_intermediate_size", "mlp_only_layers", "pretraining_tp", "max_length"),
    *("embedding_dropout", "output_dropout", "num_nextn_predict_layers", "rotary_dim", "language_model_only"),
    *("vision_config", "text_config", "audio_config", "image_token_id", "video_token_id"),
}
PREFIXES_OF_TARGETS = ("moe_", "mtp_", "linear_", "mamba_", "router_", "num_experts", "vision_", "audio_")
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    list: "a list",
    dict: "an object",
}


class Fields:
    """
    A config to read from.

    Args:
        name: of the format, for messages.
        config: config.json.
        sections: names of nested objects whose fields go before those of the same name at the top, in this order.
    """

    def __init__(self, name: str, config: dict, sections: Sequence[str] = ()):
        self.name = name
        self._sections = [_typed(name, section, config[section], dict) for section in sections if config.get(section)]
        self._sections.append(config)
        for layers in (section.get("num_hidden_layers") for section in self._sections):
            if isinstance(layers, int) and not 0 < layers <= MOST_LAYERS:
                raise ValueError(f"In this {name} config, `num_hidden_layers` is {layers}, not 1 to {MOST_LAYERS}.")
        self._read = set(sections)

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """
        The value of a field, `default` where it is absent or null.

        Raises:
            ValueError: it is not of that kind.
        """
        self._read.add(name)
        for section in self._sections:
            if section.get(name) is not None:
                return _typed(self.name, name, section[name], kind)
        return default

    def need(self, name: str, kind: type) -> Any:
        """
        The value of a field that has to be there.

        Raises:
            ValueError: it is not.
        """
        value = self.get(name, kind)
        if value is None:
            raise ValueError(f"A {self.name} config needs `{name}`.")
        return value

    def expect_projector(self, kind: str) -> None:
        """
        Raises:
            ValueError: the drafter is said to have another `projector_type`.
        """
        if (found := self.get("projector_type", str, kind)) != kind:
            raise ValueError(f"This {self.name} drafter has a projector of type {found!r}.")

    def ids(self, name: str) -> list[int] | None:
        """The value of a list of whole numbers."""
        values = self.get(name, list)
        return None if values is None else [_typed(self.name, name, value, int) for value in values]

    def agreed(self, name: str, kind: type) -> Any:
        """
        The value of a field for which readers of the format disagree about which section goes first.

        Raises:
            ValueError: it is not the same in all of them.
        """
        values = [section[name] for section in self._sections if section.get(name) is not None]
        if any(value != values[0] for value in values):
            raise ValueError(f"This {self.name} config says `{name}` twice, and differently: {values}.")
        return self.get(name, kind)

    def refuse_unknown(self, harmless: Iterable[str], of_target: bool = False) -> None:
        """
        Args:
            harmless: fields that change nothing, beside those of any config.
            of_target: the config is a copy of the target's, and its own fields count as well.

        Raises:
            ValueError: there is a field that was neither read nor is known to be harmless.
        """
        known = self._read | HARMLESS | set(harmless)
        unknown = {
            name
            for section in self._sections
            for name, value in section.items()
            if value is not None
            and name not in known
            and not name.startswith("_")
            and not (name in NEUTRAL and value == NEUTRAL[name])
            and not (of_target and (name in OF_TARGETS or name.startswith(PREFIXES_OF_TARGETS)))
        }
        if unknown:
            raise ValueError(
                f"This {self.name} config has fields that hf_dspark does not know, and that may change what the "
                f"drafter computes: {', '.join(sorted(unknown))}. A wrong reading would only show as a lower "
                "acceptance. If they change nothing, remove them from config.json."
            )


def transformers_fields(model_type: object = None) -> set[str]:
    """
    Fields that transformers gives to every config, to a Qwen3 one, and to one of `model_type` if it knows that: where
    a drafter's config is made from its target's, they are along and say nothing.
    """
    classes = [PreTrainedConfig, Qwen3Config]
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        classes.append(CONFIG_MAPPING[model_type])
    names = {"model_type", *GenerationConfig._get_default_generation_params()}
    for config_class in classes:
        names |= {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    return names


def _typed(form: str, name: str, value: Any, kind: type) -> Any:
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (kind in (int, float) and isinstance(value, bool)):
        raise ValueError(f"In this {form} config, `{name}` is {value!r}, not {_KINDS[kind]}.")
    return value
