"""
Checkpoints of the speculators library, DSpark and DFlash.

The backbone is a nested config from which the fields at their defaults are left out. The taps count from the
embeddings on. Sliding layers see a window before the anchor that is the same for every slot, and are causal in the
block unless `sliding_window_non_causal`; full layers never are. The vocabulary may be pruned (`d2t`).

What is written has the layout of version 0.9.0: a drafter with a pruned vocabulary brings its rows of the output head,
which engines cannot take from the target's; other tables are there only if they are the drafter's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from transformers import CONFIG_MAPPING

from ..configuration_dspark import DSparkConfig
from . import translation
from .fields import Fields, transformers_fields
from .translation import Shapes, section, tensor_name
from .translation import translate as translate_fields

__all__ = ["NAME", "recognises", "tables", "tensor_name", "translate", "write_config", "write_tensors"]

NAME = "speculators"
ALGORITHMS = ("dspark", "dflash")
VERSION = "0.9.0"
BACKBONES = ("qwen3", "llama")  # the layers are Qwen3's either way
HARMLESS = {"speculators_model_type", "speculators_version", "speculators_config", "model_type"}


def algorithm(config: dict) -> object:
    """What speculators calls the kind of drafter, `None` if this is none of its checkpoints."""
    return config.get("speculators_model_type") or section(config, "speculators_config").get("algorithm")


def recognises(config: dict) -> bool:
    return algorithm(config) in ALGORITHMS


def translate(config: dict, tensors: Shapes) -> dict:
    """
    `DSparkConfig` fields from the config and the tensor shapes.

    Raises:
        ValueError: a required field is missing, a field contradicts the tensors, or it is unknown what a field does.
    """
    outer = Fields(NAME, config)
    backbone = whole_backbone(outer.need("transformer_layer_config", dict))
    if (aux := outer.ids("aux_hidden_state_layer_ids")) is None:
        raise ValueError(f"A {NAME} config needs `aux_hidden_state_layer_ids`.")
    own = {name: value for name, value in config.items() if name not in ("transformer_layer_config", "dtype")}
    fields = Fields(NAME, backbone | own)
    anchor_first = sample_from_anchor(outer)
    non_causal = outer.get("sliding_window_non_causal", bool, False)
    translated = translate_fields(fields, tensors, anchor_first, target_layer_ids=[i - 1 for i in aux])
    translated |= {
        "dtype": outer.get("dtype", str),
        "sliding_window_from": "anchor" if "sliding_attention" in translated["layer_types"] else "row",
        "causal_in_block": [kind == "sliding_attention" and not non_causal for kind in translated["layer_types"]],
        "sample_from_anchor": anchor_first,
        "base_model": verifier(config),
    }
    known = {"aux_hidden_state_layer_ids", "sliding_window_non_causal", *HARMLESS}
    fields.refuse_unknown(known | set(backbone))
    return translated


def whole_backbone(nested: dict) -> dict:
    """
    The nested config with what was left out as equal to the defaults.

    Raises:
        ValueError: it is of no kind that speculators writes, or has fields that are unknown.
    """
    model_type = nested.get("model_type", "qwen3")
    if model_type not in BACKBONES:
        raise ValueError(f"This speculators drafter has layers of {model_type!r}, hf_dspark has those of Qwen3.")
    Fields(NAME, nested, []).refuse_unknown(transformers_fields(model_type) | {"rope_theta", "rope_scaling"})
    if nested.get("mlp_bias"):
        raise ValueError("This speculators drafter has biases in its MLPs (`mlp_bias`), hf_dspark has none.")
    rope = section(nested, "rope_parameters")
    if "sliding_attention" in rope:  # one for each kind of layers; speculators takes this one for all
        nested = nested | {"rope_parameters": rope["sliding_attention"]}
    try:
        return CONFIG_MAPPING[model_type](**nested).to_dict()
    except (StrictDataclassError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"`transformer_layer_config` of this speculators config cannot be read: {error}") from error


def sample_from_anchor(fields: Fields) -> bool:
    """
    Whether slot k predicts the token behind its own place. A config that does not say so, says it by the number of
    tokens to speculate if that is all of the block's; otherwise slot 0 goes unused.
    """
    block_size = fields.need("block_size", int)
    methods = fields.get("speculators_config", dict, {}).get("proposal_methods")
    counts = {
        method["speculative_tokens"]
        for method in (methods if isinstance(methods, list) else [])
        if isinstance(method, dict) and isinstance(method.get("speculative_tokens"), int)
    }
    said = fields.get("sample_from_anchor", bool)
    if said is None:
        return counts == {block_size}
    if not said and any(count >= block_size for count in counts):
        raise ValueError(
            f"`sample_from_anchor` is false, but {max(counts)} tokens are to be speculated from blocks of "
            f"{block_size}."
        )
    return said


def verifier(config: dict) -> str | None:
    """The target's repository on the Hub, if that is what the config names."""
    name = section(section(config, "speculators_config"), "verifier").get("name_or_path")
    try:
        if isinstance(name, str) and name.count("/") == 1:
            validate_repo_id(name)
            return name
    except HFValidationError:
        pass
    return None


def write_config(config: DSparkConfig, target_architectures: Sequence[str] = ()) -> dict:
    """
    config.json of a drafter.

    Args:
        target_architectures: the target's, which the config names.

    Raises:
        ValueError: speculators cannot express it.
    """
    causal, sliding = translation.causal_layers(config), translation.sliding_layers(config)
    reasons = {
        "windows that start from each row": any(sliding) and config.sliding_window_from != "anchor",
        f"`causal_in_block` {config.causal_in_block}": causal != sliding and any(causal),
        "`rope_parameters` that turn a part of each head": translation.turns_part_of_heads(config),
    }
    translation.refuse_beyond(NAME, config, translation.PLAIN, reasons)
    kind = "dspark" if config.markov_rank or config.enable_confidence_head else "dflash"
    return {
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "transformer_layer_config": translation.qwen3_fields(config) | {"tie_word_embeddings": False},
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": any(sliding) and not any(causal),
        "sample_from_anchor": config.sample_from_anchor,
        **(translation.heads_fields(config) if kind == "dspark" else {}),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_draft_tokens}],
            "verifier": {"name_or_path": config.base_model, "architectures": list(target_architectures)},
        },
        "tie_word_embeddings": False,
    }


def tables(config: DSparkConfig) -> tuple[str, ...]:
    """Which of embeddings and output head a checkpoint has to have, even where they are the target's."""
    return ("lm_head",) if config.draft_vocab_size < config.vocab_size else ()


def write_tensors(tensors: dict[str, torch.Tensor], config: DSparkConfig) -> dict[str, torch.Tensor]:
    """
    The tensors of a checkpoint: with a pruned vocabulary also `t2d`, which says of each of the target's tokens whether
    it is in it.

    Raises:
        ValueError: draft tokens are not in the order of the target's, so that `t2d` would put them into another.
    """
    if "d2t" not in tensors:
        return tensors
    offsets = tensors["d2t"].cpu()
    ids = torch.arange(len(offsets)) + offsets
    if (ids.diff() <= 0).any():
        raise ValueError(f"The {NAME} format wants the draft vocabulary in the order of the target's token ids.")
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {**tensors, "t2d": t2d}
