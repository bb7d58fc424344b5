"""Drafters written in the formats of other frameworks: read back, they are what they were, or they are not written."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_drafter, tiny_target
from safetensors.torch import load_file
from test_formats import DFLASH2, GEMMA4, PLAIN, SLIDING, draft_logits, lively, load
from transformers import PreTrainedModel

from hf_dspark import DSparkConfig
from hf_dspark.checkpoints import writer

OF_THE_ROW = {**SLIDING, "causal_in_block": [True, False]}
OF_THE_ANCHOR = {**OF_THE_ROW, "sliding_window_from": "anchor"}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
OWN = {"has_embed_tokens": True, "has_lm_head": True}
NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False}
# What is written in which format, by the fields of the drafter.
EXPORTED = [
    ("deepspec", {}),
    ("deepspec", OWN),
    ("deepspec", {"markov_head_type": "gated", "enable_confidence_head": False, "attention_bias": True}),
    ("deepspec", {"markov_head_type": "rnn", "confidence_head_with_markov": False, "sample_from_anchor": False}),
    ("deepspec", {**NO_HEADS, "rope_parameters": YARN}),
    ("deepspec", OF_THE_ROW),
    ("deepspec", {**SLIDING, "causal_in_block": True}),
    ("deepspec", {**GEMMA4, "target_layer_ids": [0, 1, 2]}),
    ("deepspec", {**GEMMA4, **OWN, "attention_k_eq_v": False, "final_logit_softcapping": None}),
    ("speculators", {}),
    ("speculators", {"attention_bias": True, "draft_vocab_size": 20}),
    ("speculators", {"markov_head_type": "gated", "draft_vocab_size": 20, **OWN}),
    ("speculators", {"markov_head_type": "rnn", "confidence_head_with_markov": False, "sample_from_anchor": False}),
    ("speculators", {"markov_head_type": "rnn", "enable_confidence_head": False, **OWN}),
    ("speculators", {**PLAIN, "rope_parameters": YARN}),
    ("speculators", {**NO_HEADS, "draft_vocab_size": 20}),
    ("speculators", {"markov_rank": 0, "confidence_head_with_markov": False}),
    ("speculators", OF_THE_ANCHOR),
    ("speculators", {**OF_THE_ANCHOR, "causal_in_block": False, "draft_vocab_size": 20}),
    ("speculators", {**PLAIN, **DFLASH2, **SLIDING, "backbone": "dflash2", "sliding_window_from": "anchor"}),
]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target("qwen3", seed=3)


def computes(config: DSparkConfig) -> dict:
    """What of a config a drafter computes with, where its tables come from apart."""
    without = {"architectures", "auto_map", "base_model", "dtype", "transformers_version", "has_embed_tokens"}
    without |= {"has_lm_head", "attention_dropout", "tie_word_embeddings", "num_target_layers"}
    if not config.selector_rank:
        without |= {"selector_top_k", "conv_kernel_size", "conv_group_size"}
    if not config.markov_rank:
        without |= {"markov_head_type", "confidence_head_with_markov"}
    if "sliding_attention" not in config.layer_types:
        without |= {"sliding_window", "sliding_window_from"}
    return {name: value for name, value in config.to_dict().items() if name not in without and name[0] != "_"}


@pytest.mark.parametrize(("form", "fields"), EXPORTED, ids=str)
def test_there_and_back(form, fields, target, tmp_path):
    native = lively(tiny_drafter(target, **fields))
    if native.d2t is not None:
        native.d2t.copy_(torch.arange(len(native.d2t)) // 2)  # another token every second time
    expected = draft_logits(native, target)
    native.save_pretrained(tmp_path / form, format=form)
    assert {file.name for file in (tmp_path / form).iterdir()} == {"config.json", "model.safetensors"}

    loaded = load(tmp_path / form)
    assert computes(loaded.config) == computes(native.config)
    assert torch.equal(draft_logits(loaded, target), expected)
    loaded.save_pretrained(tmp_path / "native")
    before, after = native.state_dict(), load_file(tmp_path / "native" / "model.safetensors")
    tables = writer(form, native.config).tables(native.config)
    assert after.keys() == before.keys() | {f"{name}.weight" for name in tables}
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name

    again = load(tmp_path / "native")
    again.bind(target)
    again.save_pretrained(tmp_path / "again", format=form)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / form / name).read_bytes(), name
