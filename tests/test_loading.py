"""Configurations and checkpoints: what is read is what is there, and what is missing is said."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import GOLDEN, drafter_config, prompt, tiny_drafter, tiny_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_dspark import DSparkConfig, DSparkModel
from hf_dspark.checkpoints import read_config, tensor_shapes

DEEPSPEC = ["vanilla", "gated", "rnn", "dflash"]


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of a golden DeepSpec checkpoint, and a way to change it."""

    def copy(head="vanilla", config=None, drop=(), add=None):
        folder = tmp_path / head
        shutil.copytree(GOLDEN / f"deepspec_qwen3_{head}", folder, dirs_exist_ok=True)
        fields = json.loads((folder / "config.json").read_text()) | (config or {})
        (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
        tensors = load_file(folder / "model.safetensors")
        tensors = {name: tensor for name, tensor in tensors.items() if name not in drop} | (add or {})
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return copy


# DeepSpec


@pytest.mark.parametrize("head", DEEPSPEC)
def test_what_is_built_follows_the_tensors(head):
    drafter = DSparkModel.from_pretrained(GOLDEN / f"deepspec_qwen3_{head}")
    tensors = load_file(GOLDEN / f"deepspec_qwen3_{head}" / "model.safetensors")
    state = drafter.state_dict()
    assert set(state) == set(tensors)
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    assert drafter.config.markov_rank == (0 if head == "dflash" else 16)


def test_without_embeddings_and_head_the_targets_are_used(checkpoint, golden_target):
    whole = DSparkModel.from_pretrained(GOLDEN / "deepspec_qwen3_vanilla").eval()
    bare = DSparkModel.from_pretrained(checkpoint(drop=("embed_tokens.weight", "lm_head.weight"))).eval()
    with pytest.raises(ValueError, match="bind"):
        bare.embed(torch.tensor([3]))
    ids = torch.tensor([[0, 6, 4, 24, 18, 6]])
    out = golden_target.generate(ids, assistant_model=bare, max_new_tokens=20, do_sample=False)
    assert out.tolist() == golden_target.generate(ids, max_new_tokens=20, do_sample=False).tolist()
    assert torch.equal(bare.embed(torch.arange(64)), golden_target.get_input_embeddings().weight)
    assert bare.base_logits(torch.eye(64)).shape == (64, 64)
    assert sum(p.numel() for p in bare.parameters()) == sum(p.numel() for p in whole.parameters()) - 2 * 64 * 64


def test_embeddings_that_equal_the_targets_are_shared(golden_target, tmp_path):
    drafter = DSparkModel.from_pretrained(GOLDEN / "deepspec_qwen3_vanilla").eval()
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    drafter.bind(golden_target)
    assert drafter._weight("embed_tokens").data_ptr() == golden_target.get_input_embeddings().weight.data_ptr()
    drafter.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(before), "a shared table is still the checkpoint's"
    again = DSparkModel.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.state_dict().items())


def test_moving_a_drafter_leaves_the_target_alone(golden_target):
    drafter = DSparkModel.from_pretrained(GOLDEN / "deepspec_qwen3_vanilla").eval()
    drafter.bind(golden_target)
    drafter.to(torch.bfloat16)
    assert golden_target.get_input_embeddings().weight.dtype == torch.float32
    drafter.bind(golden_target)
    assert drafter.embed(torch.tensor([3])).dtype == torch.bfloat16


def test_a_changed_target_is_bound_again():
    target = tiny_target("llama")
    drafter = tiny_drafter(target, draft_vocab_size=10)
    drafter.d2t.copy_(torch.arange(10))
    drafter.bind(target)
    before = drafter.base_logits(torch.ones(1, 32))
    with torch.no_grad():
        target.lm_head.weight.mul_(2)
    drafter.bind(target)
    torch.testing.assert_close(drafter.base_logits(torch.ones(1, 32)), 2 * before)
    drafter.d2t.add_(7)
    drafter.bind(target)
    torch.testing.assert_close(drafter.base_logits(torch.eye(32)), target.lm_head.weight[drafter.draft_token_ids].T)


def test_rope_of_older_and_of_multimodal_configs(checkpoint):
    expected = DSparkModel.from_pretrained(GOLDEN / "deepspec_qwen3_vanilla").rotary_emb.inv_freq
    old = DSparkModel.from_pretrained(checkpoint(config={"rope_parameters": None, "rope_theta": 10000.0}))
    assert torch.equal(old.rotary_emb.inv_freq, expected)
    inherited = {
        "rope_theta": 10000.0,
        "rope_type": "default",
        "partial_rotary_factor": 0.25,
        "mrope_section": [4, 2, 2],
    }
    drafter = DSparkModel.from_pretrained(checkpoint(config={"rope_parameters": inherited}))
    assert torch.equal(drafter.rotary_emb.inv_freq, expected)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    drafter = DSparkModel.from_pretrained(
        checkpoint(config={"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": yarn})
    )
    assert not torch.equal(drafter.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize(
    ("head", "change", "match"),
    [
        ("vanilla", {"config": {"rope_parameters": None}}, "rope_theta"),
        ("vanilla", {"drop": ("markov_head.markov_w1.weight",)}, "markov_w1"),
        ("vanilla", {"drop": ("markov_head.markov_w2.weight",)}, "markov_w2"),
        ("vanilla", {"drop": ("confidence_head.proj.weight",)}, "confidence_head"),
        ("vanilla", {"drop": ("confidence_head.proj.bias",)}, "confidence_head.proj.bias"),
        ("gated", {"drop": ("markov_head.gate_proj.bias",)}, "gate_proj.bias"),
        ("gated", {"drop": ("markov_head.gate_proj.weight",)}, "markov_head_type"),
        ("rnn", {"drop": ("markov_head.joint_proj.bias",)}, "joint_proj.bias"),
        ("vanilla", {"config": {"markov_head_type": "rnn"}}, "vanilla head"),
        ("vanilla", {"drop": ("layers.1.mlp.up_proj.weight",)}, "layers.1.mlp.up_proj"),
        ("vanilla", {"drop": ("fc.weight",)}, "fc.weight"),
        ("vanilla", {"add": {"left.over": torch.zeros(2)}}, "left.over"),
        ("vanilla", {"config": {"num_hidden_layers": 1, "layer_types": ["full_attention"]}}, "layers.1"),
        ("vanilla", {"config": {"layer_types": ["full_attention", "sliding_attention"]}}, "sliding_window"),
        ("vanilla", {"config": {"mask_token_id": 64}}, "mask_token_id"),
        ("vanilla", {"config": {"mask_token_id": None}}, "mask_token_id"),
        ("vanilla", {"config": {"target_layer_ids": [3, 1, 4, 5]}}, "strictly increasing"),
        ("vanilla", {"config": {"architectures": ["DFlashDraftModel"]}}, "not a drafter in a format"),
    ],
)
def test_a_checkpoint_that_is_not_what_it_says_is_refused(checkpoint, head, change, match):
    with pytest.raises(ValueError, match=match):
        DSparkModel.from_pretrained(checkpoint(head, **change))


def test_a_head_of_the_wrong_shape_is_refused(checkpoint):
    folder = checkpoint(add={"markov_head.markov_w2.weight": torch.zeros(64, 8)})
    with pytest.raises((ValueError, RuntimeError), match="markov_w2"):
        DSparkModel.from_pretrained(folder)


@given(st.binary(max_size=64))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_one_clear_error(tmp_path, content):
    shutil.copy(GOLDEN / "deepspec_qwen3_vanilla" / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        tensor_shapes(tmp_path)


def test_a_target_is_not_a_drafter():
    with pytest.raises(ValueError, match="not a drafter"):
        read_config(GOLDEN / "qwen3_target")


# The own format


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn", "confidence_head_with_markov": False},
        {"markov_rank": 0, "enable_confidence_head": False},
        {"draft_vocab_size": 10},
        {"has_embed_tokens": True, "has_lm_head": True},
        {"sample_from_anchor": False},
    ],
    ids=str,
)
def test_round_trip(fields, tmp_path):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, **fields)
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.arange(10) + 2)
    drafter.generation_config.num_assistant_tokens = 3
    out = target.generate(prompt(5), assistant_model=drafter, max_new_tokens=8, do_sample=False)
    drafter.save_pretrained(tmp_path)
    for load in (DSparkModel.from_pretrained, AutoModel.from_pretrained):
        again = load(tmp_path)
        assert isinstance(again, DSparkModel)
        assert again.generation_config.num_assistant_tokens == 3
        ours, theirs = drafter.state_dict(), again.state_dict()
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(ours) or fields.get("has_lm_head")
    again = target.generate(prompt(5), assistant_model=again, max_new_tokens=8, do_sample=False)
    assert out.tolist() == again.tolist()


def test_from_pretrained_takes_the_usual_arguments(tmp_path):
    tiny_drafter(tiny_target("llama")).save_pretrained(tmp_path)
    drafter = DSparkModel.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager", device_map="cpu"
    )
    assert drafter.dtype == torch.bfloat16
    assert drafter.config._attn_implementation == "eager"
    drafter.save_pretrained(tmp_path)
    assert DSparkModel.from_pretrained(tmp_path, dtype="auto", device_map="auto").dtype == torch.bfloat16
    model, info = DSparkModel.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(model, DSparkModel) and not info["missing_keys"]
    assert isinstance(AutoConfig.from_pretrained(tmp_path), DSparkConfig)


def test_sharded_checkpoints(tmp_path):
    drafter = tiny_drafter(tiny_target("llama"))
    drafter.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert set(tensor_shapes(tmp_path)) == set(drafter.state_dict())
    again = DSparkModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in drafter.state_dict().items())
    drafter.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"], "no shards stay behind"
    assert set(DSparkModel.from_pretrained(tmp_path).state_dict()) == set(again)


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    drafter = tiny_drafter(tiny_target("llama"))
    drafter.save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    drafter.norm.weight.data.add_(1)
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drafter.save_pretrained(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
def test_attention_implementations_agree(attention):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, head_dim=16)
    drafter.bind(target)
    features = torch.randn(1, 6, 96)
    block = drafter.block_ids(torch.tensor([[5]]))
    with torch.no_grad():
        expected = drafter(block, features).last_hidden_state
        drafter.set_attn_implementation(attention)
        torch.testing.assert_close(drafter(block, features).last_hidden_state, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"mask_token_id": 40}, "mask_token_id"),
        ({"target_layer_ids": [2, 1]}, "strictly increasing"),
        ({"target_layer_ids": [-2, 1]}, "starts at -1"),
        ({"block_size": 1, "sample_from_anchor": False}, "no slot"),
        ({"draft_vocab_size": 41}, "draft_vocab_size"),
        ({"markov_head_type": "lstm"}, "markov_head_type"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"causal_in_block": [True]}, "causal_in_block"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
    ],
)
def test_impossible_configurations(fields, match):
    with pytest.raises(Exception, match=match):
        drafter_config(tiny_target("llama"), **fields)


def test_gemma_embeddings_are_borrowed_unscaled():
    target = tiny_target("gemma3_text")
    drafter = tiny_drafter(target)
    drafter.bind(target)
    assert torch.equal(drafter.embed(torch.tensor([7])), target.get_input_embeddings().weight[7:8])


def test_loading_in_another_dtype_keeps_the_token_map(tmp_path):
    drafter = tiny_drafter(tiny_target("llama"), draft_vocab_size=10)
    drafter.d2t.copy_(torch.arange(10) + 2)
    drafter.save_pretrained(tmp_path)
    again = DSparkModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.draft_token_ids.tolist() == [2 * k + 2 for k in range(10)]
    assert again.d2t.dtype == torch.int64


def test_golden_targets_load_as_transformers_models(golden_target):
    assert type(golden_target) is type(AutoModelForCausalLM.from_config(golden_target.config))
