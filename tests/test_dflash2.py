"""DFlash2: convolutions along the block, and a selector that chooses among the most likely tokens of a slot."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import GOLDEN, drafter_config, prompt, scripted_drafter, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file
from transformers import TrainingArguments

from hf_dspark import DSparkConfig, DSparkModel, trace
from hf_dspark.backbone.dflash2 import BlockConvolution
from hf_dspark.checkpoints import dflash2
from hf_dspark.generation.draft_context import DraftContext
from hf_dspark.training.trainer import DSparkTrainer

CONVOLUTIONS = {"backbone": "dflash2", "conv_group_size": 8}
SELECTOR = {"markov_rank": 0, "enable_confidence_head": False, "selector_rank": 8, "selector_top_k": 4}
close = {"atol": 1e-4, "rtol": 0}


def lively(drafter):
    """The same drafter with kernels, codebooks and so on that are far from those of a new one."""
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if any(part in name for part in ("conv.", "selector.")):
                parameter.normal_(std=0.5)
    return drafter


# The reference's values


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("k", range(4))
def test_golden_blocks(k, attention, golden_target):
    drafter = DSparkModel.from_pretrained(GOLDEN / "speculators_dflash2", attn_implementation=attention).eval()
    drafter.bind(golden_target)
    blocks = load_file(GOLDEN / "speculators_dflash2" / "blocks.safetensors")
    block = {name.removeprefix(f"{k}."): tensor for name, tensor in blocks.items() if name.startswith(f"{k}.")}
    anchor = block["input_ids"][:, -1:]
    with torch.no_grad():
        hidden = drafter(drafter.block_ids(anchor), block["context_hidden_states"]).last_hidden_state
        base_logits = drafter.base_logits(hidden)
        torch.testing.assert_close(hidden, block["block_hidden_states"], **close)
        torch.testing.assert_close(base_logits, block["base_logits"], **close)
        head, previous = drafter.sequential_head, anchor[0]
        for slot in range(1, 8):
            feature, _ = head.step(head.embed(previous), hidden[:, slot], head.initial_state(hidden[:, slot]))
            logits = head.logits(base_logits[:, slot], feature)
            candidates = block["candidate_token_ids"][:, slot - 1]
            torch.testing.assert_close(logits.gather(-1, candidates), block["candidate_logits"][:, slot - 1], **close)
            assert logits.isfinite().sum() == drafter.config.selector_top_k
            previous = logits.argmax(-1)
            assert previous == block["draft_token_ids"][0, slot - 1]


def test_golden_drafts(golden_target):
    """The generator drafts what the reference does, from contexts of the target's own making."""
    drafter = DSparkModel.from_pretrained(GOLDEN / "speculators_dflash2").eval()
    blocks = load_file(GOLDEN / "speculators_dflash2" / "blocks.safetensors")
    for k in range(4):
        ids = blocks[f"{k}.input_ids"]
        with trace(drafter) as rounds:
            golden_target.generate(ids[:, :-1], assistant_model=drafter, max_new_tokens=9, do_sample=False)
        assert golden_target.generate(ids[:, :-1], max_new_tokens=1, do_sample=False)[0, -1] == ids[0, -1]
        assert rounds[0].draft == blocks[f"{k}.draft_token_ids"][0].tolist()


# Checkpoints


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the golden checkpoint with another config, and perhaps without some tensors."""

    def copy(change, drop=()):
        folder = GOLDEN / "speculators_dflash2"
        config = change(json.loads((folder / "config.json").read_text()))
        (tmp_path / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        tensors = {name: tensor for name, tensor in tensors.items() if name not in drop}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return copy


def as_zlab(config: dict) -> dict:
    """The same drafter's config as z-lab writes it."""
    own = ("block_size", "mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return {
        **{name: value for name, value in config["transformer_layer_config"].items()},
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "num_target_layers": 6,
        "dflash_config": {
            **{name: config[name] for name in own},
            "target_layer_ids": [i - 1 for i in config["aux_hidden_state_layer_ids"]],
        },
    }


def test_both_packagings_of_a_drafter(checkpoint, golden_target):
    """The windows of z-lab's end at each row instead of at the anchor: the same as long as they hold the context."""
    theirs = DSparkModel.from_pretrained(GOLDEN / "speculators_dflash2").eval()
    ours = DSparkModel.from_pretrained(checkpoint(as_zlab)).eval()
    assert (theirs.config.sliding_window_from, ours.config.sliding_window_from) == ("anchor", "row")
    blocks = load_file(GOLDEN / "speculators_dflash2" / "blocks.safetensors")
    for k, same in ((0, True), (1, True), (2, False)):  # contexts of 5, 19 and 44, windows of 32
        ids, features = blocks[f"{k}.input_ids"], blocks[f"{k}.context_hidden_states"]
        with torch.no_grad():
            hidden = []
            for drafter in (theirs, ours):
                drafter.bind(golden_target)
                hidden.append(drafter(drafter.block_ids(ids[:, -1:]), features).last_hidden_state)
        assert torch.allclose(*hidden, atol=1e-4) == same


def test_sliding_layers_are_causal_only_if_the_config_says_so(checkpoint):
    def without(config):
        return {name: value for name, value in config.items() if name != "sliding_window_non_causal"}

    def causal(config):
        return config | {"sliding_window_non_causal": False}

    assert DSparkModel.from_pretrained(checkpoint(without)).config.causal_in_block is False
    assert DSparkModel.from_pretrained(checkpoint(causal)).config.causal_in_block is True
    assert DSparkModel.from_pretrained(checkpoint(lambda config: as_zlab(config) | {"is_causal": None}))


@pytest.mark.parametrize(
    ("change", "drop", "match"),
    [
        ({"selector_rank": None}, (), "selector_rank"),
        ({"selector_rank": 13}, (), "selector_rank"),
        ({"selector_top_k": 65}, (), "selector_top_k"),
        ({"conv_kernel_size": None}, (), "conv_kernel_size"),
        ({"conv_kernel_size": 3}, (), "kernel"),
        ({"conv_group_size": 32}, (), "kernel_projection"),
        ({"selector_temperature": 2.0}, (), "selector_temperature"),
        ({}, ("candidate_selector.successor_codebook",), "successor_codebook"),
        ({}, ("layers.1.mlp_conv.base_kernel",), "mlp_conv"),
    ],
    ids=str,
)
def test_a_checkpoint_that_is_not_what_it_says_is_refused(checkpoint, change, drop, match):
    with pytest.raises(ValueError, match=match):
        DSparkModel.from_pretrained(checkpoint(lambda config: config | change, drop))


QWEN = {  # z-lab/Qwen3.8-27B-DFlash2
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 5,
    "use_sliding_window": True,
    "max_window_layers": 5,
    "sliding_window": 2048,
    "vocab_size": 248320,
    "num_target_layers": 64,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 248070,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [5, 19, 33, 47, 61],
    },
}
GEMMA = {  # rasyosef/gemma-4-E2B-it-dflash2
    "architectures": ["DFlash2DraftModel"],
    "speculators_model_type": "dflash2",
    "aux_hidden_state_layer_ids": [3, 13, 23, 33],
    "block_size": 8,
    "conv_group_size": 16,
    "conv_kernel_size": 2,
    "draft_vocab_size": 262144,
    "mask_token_id": 4,
    "sample_from_anchor": False,
    "selector_rank": 256,
    "selector_top_k": 16,
    "transformer_layer_config": {
        "model_type": "qwen3",
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 5,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
        "vocab_size": 262144,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    },
}


@pytest.mark.parametrize(
    ("config", "size"), [(QWEN, 1_924_404_480), (GEMMA, 323_042_560)], ids=["z-lab", "speculators"]
)
def test_sizes_of_published_drafters(config, size):
    with torch.device("meta"):
        drafter = DSparkModel(DSparkConfig(**dflash2.translate(config, {})))
    assert sum(parameter.numel() for parameter in drafter.parameters()) == size


# Decoding


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("fields", [CONVOLUTIONS, SELECTOR, CONVOLUTIONS | SELECTOR], ids=["conv", "selector", "both"])
def test_greedy(fields, from_anchor):
    target = tiny_target("qwen3")
    drafter = lively(tiny_drafter(target, sample_from_anchor=from_anchor, **fields))
    for length in (1, 9):
        plain = target.generate(prompt(length), max_new_tokens=20, do_sample=False)
        out = target.generate(prompt(length), assistant_model=drafter, max_new_tokens=20, do_sample=False)
        assert out.tolist() == plain.tolist()
        scripted = lively(scripted_drafter(target, plain[0], sample_from_anchor=from_anchor, **fields))
        with trace(scripted) as rounds:
            out = target.generate(prompt(length), assistant_model=scripted, max_new_tokens=20, do_sample=False)
        assert out.tolist() == plain.tolist()
        assert {a_round.accepted for a_round in rounds} - {0}, "no draft was ever accepted: this tests nothing"


@pytest.mark.parametrize("do_sample", [True, False])
def test_a_slot_whose_candidates_are_all_forbidden_ends_the_draft(do_sample):
    def allowed(batch, ids):
        return [(int(ids[-1]) * 7 + k) % 36 + 4 for k in range(9)]

    target = tiny_target("llama")
    drafter = lively(tiny_drafter(target, **SELECTOR))
    with trace(drafter) as rounds:
        out = target.generate(
            prompt(8),
            assistant_model=drafter,
            do_sample=do_sample,
            max_new_tokens=40,
            prefix_allowed_tokens_fn=allowed,
        )
    assert min(len(a_round.draft) for a_round in rounds) < max(len(a_round.draft) for a_round in rounds)
    assert all(out[0, i] in allowed(0, out[0, :i]) for i in range(8, out.shape[1]))
    if not do_sample:
        plain = target.generate(prompt(8), do_sample=False, max_new_tokens=40, prefix_allowed_tokens_fn=allowed)
        assert out.tolist() == plain.tolist()


# The parts


def test_convolutions_by_their_definition():
    config = drafter_config(tiny_target("llama"), **CONVOLUTIONS, conv_kernel_size=3)
    convolution = BlockConvolution(config)
    torch.nn.init.normal_(convolution.base_kernel)
    torch.nn.init.normal_(convolution.kernel_projection.weight)
    rows = torch.randn(2, 10, 32)  # two blocks of five
    with torch.no_grad():
        for side, kernels in enumerate(convolution.kernels(rows)):
            result = convolution.convolve(rows, kernels)
            for row in range(10):
                dynamic = convolution.kernel_projection(rows[:, row]).view(2, 2, 3, 4)[:, side]
                expected = torch.zeros(2, 32)
                for tap in range(min(3, row % 5 + 1)):
                    for channel in range(32):
                        kernel = convolution.base_kernel[side, tap, channel] + dynamic[:, tap, channel // 8]
                        expected[:, channel] += kernel * rows[:, row - tap, channel]
                torch.testing.assert_close(result[:, row], expected, atol=1e-5, rtol=1e-5)


def test_new_convolutions_change_nothing():
    target = tiny_target("llama")
    plain, convolved = tiny_drafter(target), tiny_drafter(target, **CONVOLUTIONS)
    torch.nn.init.zeros_(convolved.layers[0].attention_conv.kernel_projection.weight)
    for layer in convolved.layers:
        for convolution in (layer.attention_conv, layer.mlp_conv):
            torch.nn.init.zeros_(convolution.kernel_projection.weight)
    assert not convolved.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    features = torch.randn(1, 6, 96)
    for drafter in (plain, convolved):
        drafter.bind(target)
    with torch.no_grad():
        ours, theirs = (m(m.block_ids(torch.tensor([[5]])), features).last_hidden_state for m in (plain, convolved))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"backbone": "mamba"}, "backbone"),
        ({"attention_k_eq_v": True}, "attention_k_eq_v"),
        (CONVOLUTIONS | {"conv_group_size": 5}, "conv_group_size"),
        (CONVOLUTIONS | {"conv_kernel_size": 6}, "conv_kernel_size"),
        (SELECTOR | {"markov_rank": 8}, "one sequential head"),
        (SELECTOR | {"draft_vocab_size": 10}, "whole vocabulary"),
        (SELECTOR | {"selector_top_k": 41}, "selector_top_k"),
        (SELECTOR | {"selector_rank": -1}, "selector_rank"),
    ],
    ids=str,
)
def test_impossible_configurations(fields, match):
    with pytest.raises(Exception, match=match):
        drafter_config(tiny_target("llama"), **fields)


def test_round_trip(tmp_path):
    drafter = lively(tiny_drafter(tiny_target("llama"), **CONVOLUTIONS, **SELECTOR))
    drafter.save_pretrained(tmp_path)
    again = DSparkModel.from_pretrained(tmp_path)
    assert set(again.state_dict()) == set(drafter.state_dict())
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())


# Training


def trainer_for(drafter, target, folder):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
    )
    rows = [{"input_ids": prompt(length, seed=length)[0].tolist()} for length in (14, 9)]
    return DSparkTrainer(drafter, target, arguments, rows, num_anchors=4)


def test_packed_blocks_are_convolved_each_for_itself(tmp_path):
    target = tiny_target("llama")
    drafter = lively(tiny_drafter(target, **CONVOLUTIONS))
    objective = trainer_for(drafter, target, tmp_path).model
    ids, anchors, features = prompt(14), torch.tensor([[1, 5, 8]]), torch.randn(1, 14, 96)
    with torch.no_grad():
        packed = objective._block_hidden(ids, features, anchors)
        for k, anchor in enumerate(anchors[0].tolist()):
            context = DraftContext(drafter)
            context.extend(features[:, :anchor])
            torch.testing.assert_close(packed[:, k], context.block_hidden(ids[:, anchor : anchor + 1]))


def test_training_reaches_the_convolutions(tmp_path):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, **CONVOLUTIONS)
    before = {name: parameter.clone() for name, parameter in drafter.named_parameters()}
    trainer_for(drafter, target, tmp_path).train()
    moved = [name for name, parameter in drafter.named_parameters() if not torch.equal(parameter, before[name])]
    assert set(moved) == set(before)


def test_training_a_selector_is_refused(tmp_path):
    target = tiny_target("llama")
    with pytest.raises(ValueError, match="selector_rank=0"):
        trainer_for(tiny_drafter(target, **SELECTOR), target, tmp_path)
