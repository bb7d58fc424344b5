"""Gemma4, as the target of a drafter and as the kind of its layers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import GOLDEN, drafter_config, prompt, scripted_drafter, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, TrainingArguments
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer

from hf_dspark import DSparkModel, trace
from hf_dspark.backbone.gemma4 import Gemma4DecoderLayer
from hf_dspark.checkpoints import gemma4
from hf_dspark.generation.draft_context import DraftContext
from hf_dspark.training.initialisation import feature_sizes, finish, initialise, prepare
from hf_dspark.training.trainer import DSparkTrainer, config_for

SHARED_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 16}
TARGETS = {
    "layers that reuse keys and values": {"num_kv_shared_layers": 2},
    "values from keys": SHARED_VALUES,
    "both": {"num_kv_shared_layers": 2, **SHARED_VALUES},
    "without per-layer inputs": {"hidden_size_per_layer_input": 0},
}
LAYERS = {  # Gemma4's rotary embedding and geometry, for a drafter
    "backbone": "gemma4",
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 16,
    "num_key_value_heads": 1,
    "attention_k_eq_v": True,
    "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "input_embedding_scale": 32**0.5,
    "final_logit_softcapping": 30.0,
}


def compare(target, length, **fields):
    """Greedy decoding with a drafter that errs now and then against plain generate()."""
    ids = prompt(length, seed=length)
    plain = target.generate(ids, max_new_tokens=30, do_sample=False)
    drafter = scripted_drafter(target, plain[0], **fields)
    with trace(drafter) as rounds:
        out = target.generate(ids, assistant_model=drafter, max_new_tokens=30, do_sample=False)
    assert out.tolist() == plain.tolist()
    assert {a_round.accepted for a_round in rounds} - {0}, "no draft was ever accepted: this tests nothing"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", TARGETS)
def test_targets(kind, attention):
    target = tiny_target("gemma4_text", attn_implementation=attention, **TARGETS[kind])
    for length in (1, 11, 12, 30):  # the window is 12
        compare(target, length)
    compare(target, 14, **LAYERS)


@pytest.mark.parametrize("fields", [{}, LAYERS], ids=["qwen3", "gemma4"])
def test_the_golden_target(golden_gemma4_target, fields):
    for length in (3, 40):  # the window is 32
        compare(golden_gemma4_target, length, **fields)


def test_a_multimodal_target():
    text = tiny_target("gemma4_text", num_kv_shared_layers=2).config
    config = AutoConfig.for_model("gemma4", text_config=text.to_dict(), vision_config=None, audio_config=None)
    torch.manual_seed(0)
    target = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    target.generation_config.eos_token_id = target.generation_config.pad_token_id = None
    compare(target, 14)


@pytest.mark.parametrize("shared", [True, False])
def test_a_layer_computes_what_gemma4s_own_does(shared):
    """With context rows of unit size, transformers' layer norms them to themselves, as ours leaves them."""
    theirs = Gemma4TextConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1 if shared else None,
        attention_k_eq_v=shared,
        hidden_size_per_layer_input=0,
        layer_types=["full_attention"],
        attn_implementation="eager",
    )
    layer = Gemma4TextDecoderLayer(theirs, 0).eval()
    fields = {**LAYERS, "num_key_value_heads": 1 if shared else 2, "attention_k_eq_v": shared}
    config = drafter_config(tiny_target("llama"), **fields)
    config._attn_implementation = "eager"
    ours = Gemma4DecoderLayer(config, 0).eval()
    with torch.no_grad():
        for name, parameter in layer.state_dict().items():
            if name != "input_layernorm.weight":
                parameter.normal_(mean=1 if parameter.dim() == 1 else 0, std=0.3)
    ours.load_state_dict(layer.state_dict())
    assert ours.layer_scalar != 1

    context, block = torch.randn(2, 1, 6, 32).unbind()
    context = context / context.square().mean(-1, keepdim=True).sqrt()
    positions = torch.arange(12)[None]
    cos_sin = DSparkModel(config).rotary_emb(block, positions)
    with torch.no_grad():
        expected = layer(torch.cat([context, block], dim=1), position_embeddings=cos_sin, shared_kv_states={})
        if isinstance(expected, tuple):
            expected = expected[0]
        result = ours(block, context, position_embeddings=cos_sin)
    torch.testing.assert_close(result, expected[:, 6:], atol=1e-4, rtol=1e-4)


def test_base_logits_stay_below_the_cap():
    target = tiny_target("gemma4_text")
    drafter = tiny_drafter(target, **LAYERS)
    drafter.bind(target)
    raw = torch.randn(3, 32) * 100
    logits = drafter.base_logits(raw)
    assert logits.abs().max() <= 30 and logits.argmax() == (raw @ target.lm_head.weight.T).argmax()


def test_round_trip(tmp_path):
    target = tiny_target("gemma4_text")
    drafter = tiny_drafter(target, **LAYERS)
    drafter.layers[0].layer_scalar.fill_(0.5)
    drafter.save_pretrained(tmp_path)
    again = DSparkModel.from_pretrained(tmp_path).eval()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    features, block = torch.randn(1, 4, 96), drafter.block_ids(torch.tensor([[5]]))
    for model in (drafter, again):
        model.bind(target)
    with torch.no_grad():
        assert torch.equal(*(m(block, features).last_hidden_state for m in (drafter, again)))


@pytest.mark.parametrize("own_tables", [True, False])
def test_training(own_tables, tmp_path):
    """Blocks packed in one forward are those of generation, and all of the drafter learns."""
    target = tiny_target("gemma4_text")
    tables = {"has_embed_tokens": own_tables, "has_lm_head": own_tables}
    fields = {**LAYERS, "num_hidden_layers": 1, "num_attention_heads": 4, "block_size": 5, "markov_rank": 8, **tables}
    drafter = DSparkModel(config_for(target, mask_token_id=3, **fields))
    rows = [{"input_ids": prompt(length, seed=length)[0].tolist()} for length in (14, 9)]
    sizes = feature_sizes(drafter, target, [row["input_ids"] for row in rows])
    initialise(drafter, target, sizes)
    prepare(drafter, sizes)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = DSparkTrainer(drafter, target, arguments, rows, num_anchors=4)
    ids, anchors, features = prompt(14), torch.tensor([[1, 5, 8]]), torch.randn(1, 14, drafter.fc.in_features)
    with torch.no_grad():
        packed = trainer.model._block_hidden(ids, features, anchors)
        for k, anchor in enumerate(anchors[0].tolist()):
            context = DraftContext(drafter)
            context.extend(features[:, :anchor])
            alone = context.block_hidden(ids[:, anchor : anchor + 1])
            torch.testing.assert_close(packed[:, k], alone, atol=1e-4, rtol=1e-4)
    before = {name: parameter.clone() for name, parameter in drafter.named_parameters()}
    trainer.train()
    assert not [name for name, parameter in drafter.named_parameters() if torch.equal(parameter, before[name])]
    finish(drafter)
    assert all(parameter.isfinite().all() for parameter in drafter.parameters())


# DeepSpec's checkpoints

PUBLISHED = {  # deepseek-ai/dspark_gemma4_12b_block7
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "attention_bias": False,
    "attention_k_eq_v": True,
    "block_size": 7,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3840,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 15360,
    "layer_types": ["full_attention"] * 5,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 4,
    "num_attention_heads": 16,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 48,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_theta": None,
        "rope_type": "default",
    },
    "target_layer_ids": [5, 17, 29, 41, 46],
    "vocab_size": 262144,
}
TABLES = {  # tensors that the config is read together with
    "markov_head.markov_w1.weight": (262144, 256),
    "confidence_head.proj.weight": (1, 3840 + 256),
    "embed_tokens.weight": (262144, 3840),
    "lm_head.weight": (262144, 3840),
}


def test_size_of_the_published_drafter():
    config = DSparkModel.config_class(**gemma4.translate(PUBLISHED, TABLES))
    with torch.device("meta"):
        drafter = DSparkModel(config)
    assert sum(parameter.numel() for parameter in drafter.parameters()) == 3_430_444_545
    assert sum(tensor.numel() for tensor in drafter.state_dict().values()) == 3_430_444_545 + 5


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"enable_moe_block": True}, "enable_moe_block"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input"),
        ({"global_head_dim": None}, "global_head_dim"),
        ({"num_global_key_value_heads": None}, "num_global_key_value_heads"),
        ({"target_layer_ids": None}, "target_layer_ids"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "full_attention"),
        ({"attention_k_eq_v": False}, "v_proj"),
        ({"layer_types": [["full_attention"]]}, "layer_types"),
    ],
    ids=str,
)
def test_a_checkpoint_that_is_not_what_it_says_is_refused(config, match, tmp_path):
    folder = GOLDEN / "deepspec_gemma4_vanilla"
    fields = json.loads((folder / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shutil.copy(folder / "model.safetensors", tmp_path)
    with pytest.raises(ValueError, match=match):
        DSparkModel.from_pretrained(tmp_path)


def test_without_embeddings_and_head_the_targets_are_used(golden_gemma4_target, tmp_path):
    """The own tables are the target's; the target's are scaled and capped in the same way."""
    folder = GOLDEN / "deepspec_gemma4_vanilla"
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], golden_gemma4_target.get_input_embeddings().weight)
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    drafter = DSparkModel.from_pretrained(tmp_path).eval()
    drafter.bind(golden_gemma4_target)
    block = load_file(folder / "block.safetensors")
    with torch.no_grad():
        hidden = drafter(block["draft_input_ids"], block["context_hidden_states"]).last_hidden_state
        torch.testing.assert_close(drafter.base_logits(hidden), block["base_logits"], atol=1e-4, rtol=0)
