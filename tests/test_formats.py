"""Drafters of other frameworks: each format is read as its framework means it, or refused with the reason."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, prompt, tiny_drafter, tiny_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hf_dspark import DSparkConfig, DSparkModel, trace
from hf_dspark.checkpoints import FORMATS, Checkpoint, format_of, read_config, tensor_shapes
from hf_dspark.checkpoints.zlab import default_layer_ids
from hf_dspark.compat import CACHE, DFlashTokenCandidateGenerator
from hf_dspark.generation.draft_context import DraftContext
from hf_dspark.taps import TargetTaps

close = {"atol": 1e-4, "rtol": 0}
SPECULATORS = ["dspark_vanilla", "dspark_rnn_pruned", "dflash"]


def load(folder: Path, **arguments) -> DSparkModel:
    return DSparkModel.from_pretrained(folder, **arguments).eval()


# speculators, against its own values


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", SPECULATORS)
def test_blocks_of_speculators(name, attention, golden_target):
    drafter = load(GOLDEN / f"speculators_{name}", attn_implementation=attention)
    drafter.bind(golden_target)
    unused = drafter.config.block_size - drafter.config.num_draft_tokens
    assert unused == (name != "dspark_vanilla")
    values = load_file(GOLDEN / f"speculators_{name}" / "blocks.safetensors")
    for block in range(4):
        golden = {key.split(".")[1]: value for key, value in values.items() if key.startswith(f"{block}.")}
        anchor = golden["input_ids"][:, -1:]
        with torch.no_grad():
            hidden = drafter(drafter.block_ids(anchor), golden["context_hidden_states"]).last_hidden_state
            logits = drafter.base_logits(hidden)
            torch.testing.assert_close(hidden, golden["block_hidden_states"], **close)
            torch.testing.assert_close(logits, golden["base_logits"], **close)
            if (head := drafter.markov_head) is not None:
                drafted = golden["draft_token_ids"]
                previous = torch.cat([anchor, drafted[:, :-1]], dim=1)
                if unused:
                    previous = torch.cat([anchor, previous], dim=1)
                embeddings = head.embed(previous)
                logits = head.logits(logits, head.unroll(embeddings, hidden))
                confidence = drafter.confidence_head(hidden, embeddings)[:, unused:]
                torch.testing.assert_close(confidence, golden["confidence_logits"], **close)
        logits = logits[:, unused:]
        torch.testing.assert_close(logits, golden["draft_logits"], **close)
        choice = drafter.target_ids_of(logits.argmax(-1))
        assert torch.equal(choice, golden["draft_token_ids"])


@pytest.mark.parametrize("name", SPECULATORS)
def test_layers_that_speculators_reads(name, golden_target):
    drafter = load(GOLDEN / f"speculators_{name}")
    values = load_file(GOLDEN / f"speculators_{name}" / "blocks.safetensors")
    for block in range(4):
        with torch.no_grad(), TargetTaps(golden_target, drafter.config.target_layer_ids) as taps:
            golden_target(values[f"{block}.input_ids"][:, :-1])
            features = taps.take(drafter.device, drafter.dtype)
        torch.testing.assert_close(features, values[f"{block}.context_hidden_states"], **close)


@pytest.mark.parametrize("name", SPECULATORS)
def test_a_context_in_pieces(name, golden_target):
    """A window over a context that arrives over several rounds is the window over the whole."""
    drafter = load(GOLDEN / f"speculators_{name}")
    drafter.bind(golden_target)
    values = load_file(GOLDEN / f"speculators_{name}" / "blocks.safetensors")
    context = DraftContext(drafter)
    with torch.no_grad():
        for rows in values["3.context_hidden_states"].split([30, 1, 40, 8], dim=1):
            context.extend(rows)
            hidden = context.block_hidden(values["3.input_ids"][:, -1:])
    torch.testing.assert_close(hidden, values["3.block_hidden_states"], **close)


@pytest.mark.parametrize("name", SPECULATORS)
def test_generation_with_a_drafter_of_speculators(name, golden_target):
    drafter = load(GOLDEN / f"speculators_{name}")
    ids = load_file(GOLDEN / f"speculators_{name}" / "blocks.safetensors")["2.input_ids"]
    arguments = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    plain = golden_target.generate(ids, **arguments)
    with trace(drafter) as rounds:
        assert torch.equal(golden_target.generate(ids, assistant_model=drafter, **arguments), plain)
    assert sum(a_round.accepted for a_round in rounds) > 10, "a wrong reading would hardly be accepted"


@pytest.mark.parametrize(
    ("change", "anchor_first"),
    [
        ({}, True),
        ({"sample_from_anchor": False, "speculative_tokens": 6}, False),
        ({"sample_from_anchor": None, "speculative_tokens": 7}, True),
        ({"sample_from_anchor": None, "speculative_tokens": 6}, False),
        ({"sample_from_anchor": None, "speculators_config": None}, False),
    ],
    ids=str,
)
def test_which_token_slot_0_of_speculators_predicts(change, anchor_first):
    config = json.loads((GOLDEN / "speculators_dspark_vanilla" / "config.json").read_text())
    change = dict(change)
    if tokens := change.pop("speculative_tokens", None):
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens
    translated = translate(config | change, tensor_shapes(GOLDEN / "speculators_dspark_vanilla"))
    assert translated.sample_from_anchor is anchor_first
    assert translated.target_layer_ids == [0, 2, 4]
    assert translated.causal_in_block == [True, False]


def test_the_backbone_of_speculators_without_what_equals_defaults():
    folder = GOLDEN / "speculators_dspark_vanilla"
    config = json.loads((folder / "config.json").read_text())
    for name in ("hidden_act", "rms_norm_eps", "initializer_range", "attention_bias", "model_type", "rope_parameters"):
        del config["transformer_layer_config"][name]
    assert translate(config, tensor_shapes(folder)).to_dict() == translate_folder(folder).to_dict()
    config["transformer_layer_config"] |= {"model_type": "llama"}
    assert translate(config, tensor_shapes(folder)).to_dict() == translate_folder(folder).to_dict()
    config["sliding_window_non_causal"] = True
    assert translate(config, tensor_shapes(folder)).causal_in_block is False


def translate(config: dict, tensors: dict) -> DSparkConfig:
    return DSparkConfig.from_dict(format_of(config).translate(config, tensors))


def translate_folder(folder: Path) -> DSparkConfig:
    return DSparkConfig.from_dict(read_config(folder))


# Tiny checkpoints in the layout of each format, made of a native drafter


def geometry(config: DSparkConfig) -> dict:
    """What every format has at the top."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings")
    rope = {"rope_theta": config.rope_parameters["rope_theta"], "rope_scaling": None}
    return {"model_type": "qwen3", "num_target_layers": config.num_target_layers, **rope} | {
        name: getattr(config, name) for name in names
    }


def heads(config: DSparkConfig) -> dict:
    names = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    return {name: getattr(config, name) for name in names}


def taps(config: DSparkConfig) -> dict:
    return {"target_layer_ids": config.target_layer_ids, "mask_token_id": config.mask_token_id}


def deepspec(config):
    noise = {"partial_rotary_factor": 0.25, "attn_output_gate": True, "num_experts": 8, "num_anchors": 512}
    fields = {**geometry(config), **heads(config), **taps(config), **noise, "block_size": config.block_size}
    if not config.sample_from_anchor:
        fields["sample_from_anchor"] = False
    return {"architectures": ["LingDSparkModel"], "model_type": "bailing_moe", **fields}


def specforge(config):
    nested = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
    nested |= {**taps(config), **heads(config)}
    fields = {
        **geometry(config),
        "block_size": config.block_size,
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    }
    if config.rope_parameters["rope_type"] != "default":
        fields["rope_scaling"] = {k: v for k, v in config.rope_parameters.items() if k != "rope_theta"}
    return {"architectures": ["DSparkDraftModel"], **fields, "dflash_config": nested, "dspark_config": nested}


def zlab(config):
    nested = {**taps(config), "block_size": config.block_size}
    for name in ("attention_value_scale", "output_multiplier", "final_logit_softcapping", "input_embedding_scale"):
        if getattr(config, name) not in (None, 1.0):
            nested[name] = getattr(config, name)
    fields = {
        **geometry(config),
        "layer_types": config.layer_types,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    }
    if config.sliding_window:
        nested["swa_window_size"] = config.sliding_window
        fields["is_causal"] = config.causal_in_block if isinstance(config.causal_in_block, bool) else None
    return {"architectures": ["DFlashDraftModel"], **fields, "dflash_config": nested}


def hybrid(config):
    fields = zlab(config) | heads(config)
    return fields | {"block_size": fields["dflash_config"].pop("block_size")}


def modelopt(config):
    nested = {**taps(config), "projector_type": "dspark", "shift_label": config.sample_from_anchor}
    nested |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov_head_type}
    nested["use_confidence_head"] = config.enable_confidence_head
    fields = {**geometry(config), "block_size": config.block_size}
    return {"architectures": ["DFlashDraftModel"], **fields, "dflash_config": nested}


def lfm2(config):
    fields = {**geometry(config), **heads(config), "block_size": config.block_size}
    fields["rope_is_neox_style"] = not config.rope_interleaved
    nested = {**taps(config), "num_target_layers": fields.pop("num_target_layers")}
    return {"architectures": ["Lfm2DSparkDraftModel"], **fields, "dflash_config": nested}


def nemotron(config):
    fields = {**geometry(config), **heads(config), **taps(config), "block_size": config.block_size}
    fields |= {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids]}
    fields |= {"has_embed_tokens": True, "has_lm_head": False, "sample_from_anchor": config.sample_from_anchor}
    fields |= {"attention_sink_bias": True, "dflash_query_causal": True}
    fields |= {"layer_types": config.layer_types, "sliding_window": config.sliding_window}
    return {"architectures": ["Qwen3DSparkModel"], **fields}


def muse_glimmer(config):
    fields = {name: value for name, value in geometry(config).items() if name not in ("rope_scaling", "rope_theta")}
    fields |= {"rope_parameters": config.rope_parameters, "layer_types": config.layer_types, **taps(config)}
    fields |= {"sliding_window": config.sliding_window - 1, "block_size": config.block_size}
    del fields["num_target_layers"]
    return fields | {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}


def speculators(config):
    nested = geometry(config) | {"layer_types": config.layer_types, "sliding_window": config.sliding_window}
    del nested["rope_scaling"], nested["rope_theta"], nested["num_target_layers"]
    nested |= {
        "rope_parameters": {"sliding_attention": config.rope_parameters, "full_attention": config.rope_parameters}
    }
    return {
        "speculators_model_type": "dspark",
        "architectures": ["Qwen3DSparkModel"],
        "transformer_layer_config": nested | {"use_sliding_window": True},
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": not config.causal_in_block,
        "sample_from_anchor": config.sample_from_anchor,
        **heads(config),
    }


def gemma4(config):
    sizes = geometry(config)
    del sizes["rope_theta"], sizes["rope_scaling"]
    moved = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}
    moved["hidden_activation"] = "hidden_act"
    moved = {theirs: sizes.pop(ours) for theirs, ours in moved.items()}
    noise = {"head_dim": 4, "num_key_value_heads": 4, "enable_moe_block": False, "hidden_size_per_layer_input": 0}
    rope = {"full_attention": config.rope_parameters, "sliding_attention": {"rope_type": "default"}}
    return {
        "architectures": ["Gemma4DSparkModel"],
        **{**sizes, **moved, **noise, **heads(config), **taps(config)},
        "model_type": "gemma4_text",
        "attention_k_eq_v": config.attention_k_eq_v,
        "final_logit_softcapping": config.final_logit_softcapping,
        "layer_types": config.layer_types,
        "block_size": config.block_size,
        "rope_parameters": {**rope, "rope_theta": None, "rope_type": "default"},
    }


def dflash2_of_zlab(config):
    fields = zlab(config)
    own = {name: getattr(config, name) for name in DFLASH2}
    return fields | {"architectures": ["DFlash2DraftModel"], "dflash_config": fields["dflash_config"] | own}


def dflash2_of_speculators(config):
    fields = {name: value for name, value in speculators(config).items() if name not in heads(config)}
    own = {name: getattr(config, name) for name in DFLASH2}
    return fields | {"speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"]} | own


PLAIN = {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
MODELOPT = {"markov_head.markov_": "markov_", "markov_head.": "", "confidence_head.proj": "confidence_proj"}
DFLASH2 = {"selector_rank": 8, "selector_top_k": 6, "conv_kernel_size": 2, "conv_group_size": 8}
GEMMA4 = {
    "backbone": "gemma4",
    "attention_k_eq_v": True,
    "hidden_act": "gelu_pytorch_tanh",
    "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "input_embedding_scale": 32**0.5,
    "final_logit_softcapping": 3.0,
}
# The format's name, fields of the drafter, its config in that format, and what begins tensor names there.
WRITTEN = [
    ("DeepSpec", {}, deepspec, {}),
    ("DeepSpec", {"markov_head_type": "gated", "sample_from_anchor": False}, deepspec, {}),
    ("DeepSpec", {"has_embed_tokens": True, "has_lm_head": True}, deepspec, {"": "model."}),
    ("SpecForge DSpark", {"rope_parameters": YARN}, specforge, {}),
    (
        "SpecForge DSpark",
        {"markov_head_type": "rnn"},
        specforge,
        {"markov_head.": "logit_head.markov_head.", "confidence_head.": "logit_head.confidence_head."},
    ),
    ("z-lab DFlash", PLAIN, zlab, {}),
    ("z-lab DFlash", {**PLAIN, **SLIDING, "causal_in_block": [True, False]}, zlab, {}),
    ("z-lab DFlash", {**PLAIN, **SLIDING, "causal_in_block": False}, zlab, {}),
    (
        "z-lab DFlash",
        {
            **PLAIN,
            "attention_sink_bias": True,
            "attention_value_scale": 0.7,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 3.0,
            "input_embedding_scale": 2.0,
        },
        zlab,
        {},
    ),
    ("DFlash with Markov head", {"sample_from_anchor": False}, hybrid, {}),
    ("NVIDIA ModelOpt DSpark", {"markov_head_type": "rnn"}, modelopt, MODELOPT),
    ("NVIDIA ModelOpt DSpark", {"markov_head_type": "gated"}, modelopt, MODELOPT),
    ("LFM2 DSpark", {"rope_interleaved": True}, lfm2, {}),
    (
        "Nemotron DSpark",
        {
            **SLIDING,
            "causal_in_block": True,
            "attention_sink_bias": True,
            "sample_from_anchor": False,
            "enable_confidence_head": False,
            "has_embed_tokens": True,
        },
        nemotron,
        {},
    ),
    (
        "transformers Muse Glimmer assistant",
        {**PLAIN, **SLIDING, "layer_types": ["sliding_attention"] * 2},
        muse_glimmer,
        {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."},
    ),
    (
        "speculators",
        {**SLIDING, "sliding_window_from": "anchor", "causal_in_block": [True, False], "draft_vocab_size": 20},
        speculators,
        {},
    ),
    ("speculators", {**SLIDING, "sliding_window_from": "anchor", "has_embed_tokens": True}, speculators, {}),
    ("DeepSpec Gemma4", {**GEMMA4, "has_embed_tokens": True, "has_lm_head": True}, gemma4, {}),
    ("DFlash2", {**PLAIN, **SLIDING, **DFLASH2, "backbone": "dflash2"}, dflash2_of_zlab, {}),
    (
        "DFlash2",
        {**PLAIN, **SLIDING, **DFLASH2, "backbone": "dflash2", "sliding_window_from": "anchor"},
        dflash2_of_speculators,
        {},
    ),
]


def lively(drafter: DSparkModel, seed: int = 0) -> DSparkModel:
    """With weights that are large enough for every part to make a difference."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        if drafter.d2t is not None:
            drafter.d2t.copy_(torch.arange(len(drafter.d2t)))
    return drafter


def write(folder: Path, config: dict, drafter: DSparkModel, prefixes: dict[str, str] | None = None, shards: int = 1):
    """A checkpoint of another framework."""
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        old = next((prefix for prefix in prefixes or {} if name.startswith(prefix)), None)
        tensors[name if old is None else prefixes[old] + name[len(old) :]] = tensor.contiguous()
    if drafter.d2t is not None:
        tensors["t2d"] = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        part = {name: tensors[name] for name in tensors if names[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target("qwen3", seed=3)


def draft_logits(drafter: DSparkModel, target: PreTrainedModel, length: int = 20) -> torch.Tensor:
    """Logits of all slots of a block, each knowing the same tokens before it, and the confidence logits."""
    drafter.bind(target)
    with torch.no_grad(), TargetTaps(target, drafter.config.target_layer_ids) as taps:
        target(prompt(length))
        features = taps.take(drafter.device, drafter.dtype)
        hidden = drafter(drafter.block_ids(prompt(1, seed=1)), features).last_hidden_state
        logits = drafter.base_logits(hidden)
        embeddings = None
        if (head := drafter.sequential_head) is not None:
            embeddings = head.embed(prompt(hidden.shape[1], seed=1))
            if drafter.candidate_selector is not None:
                features, _ = head.step(embeddings, hidden, head.initial_state(hidden))
            else:
                features = head.unroll(embeddings, hidden)
            logits = head.logits(logits, features)
        if drafter.confidence_head is not None:
            logits = torch.cat([logits, drafter.confidence_head(hidden, embeddings).unsqueeze(-1)], dim=-1)
    return logits


@pytest.mark.parametrize(("name", "fields", "foreign", "prefixes"), WRITTEN)
def test_a_checkpoint_in_another_layout(name, fields, foreign, prefixes, target, tmp_path):
    layer_ids = [0, 2] if name in ("z-lab DFlash", "transformers Muse Glimmer assistant") else [-1, 1, 2]
    native = lively(tiny_drafter(target, **{"target_layer_ids": layer_ids, **fields}))
    config = foreign(native.config)
    write(tmp_path, config, native, prefixes, shards=2 if prefixes else 1)
    assert name == Checkpoint(tmp_path).format.NAME

    loaded = load(tmp_path)
    assert loaded.config.sample_from_anchor == native.config.sample_from_anchor
    assert loaded.config.num_draft_tokens == native.config.block_size - (not native.config.sample_from_anchor)
    assert loaded.state_dict().keys() == native.state_dict().keys()
    expected = draft_logits(native, target)
    torch.testing.assert_close(draft_logits(loaded, target), expected, atol=1e-5, rtol=1e-5)
    for other in different(native.config):
        if other.keys() & fields.keys():
            changed = lively(tiny_drafter(target, **{"target_layer_ids": layer_ids, **fields, **other}))
            assert not torch.allclose(draft_logits(changed, target), expected, atol=1e-3), f"{other} would pass, too"

    arguments = {"max_new_tokens": 12, "do_sample": False}
    with trace(loaded) as rounds:
        out = target.generate(prompt(9), assistant_model=loaded, **arguments)
    assert torch.equal(out, target.generate(prompt(9), **arguments))
    assert len(rounds[0].draft) == loaded.config.num_draft_tokens

    loaded.save_pretrained(tmp_path / "native")
    again = load(tmp_path / "native")
    assert set(load_file(tmp_path / "native" / "model.safetensors")) == set(native.state_dict())
    assert torch.equal(draft_logits(again, target), draft_logits(loaded, target))


def different(config: DSparkConfig) -> list[dict]:
    """Wrong readings of what makes a difference here."""
    return [
        {"causal_in_block": not config.causal_in_block if isinstance(config.causal_in_block, bool) else False},
        {"sliding_window": (config.sliding_window or 2) - 1},
        {"rope_interleaved": not config.rope_interleaved},
        {"attention_value_scale": 1.0},
        {"output_multiplier": 1.0},
        {"final_logit_softcapping": None},
        {"input_embedding_scale": 1.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ]


def test_windows_of_both_kinds():
    """From the anchor every slot sees as much; from the rows, the last slot sees less."""
    target = tiny_target("llama")
    settings = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 6}
    for start, causal in (("anchor", False), ("row", False), ("anchor", True), ("row", True)):
        drafter = lively(tiny_drafter(target, **settings, sliding_window_from=start, causal_in_block=causal))
        drafter.bind(target)
        features = torch.randn(1, 12, 96)
        reach = []
        for place in range(12):
            changed = features.clone()
            changed[:, place] += 1
            with torch.no_grad():
                before, after = (
                    drafter(drafter.block_ids(torch.tensor([[5]])), x).last_hidden_state for x in (features, changed)
                )
            reach.append((before != after).any(-1)[0].tolist())
        for slot in range(5):
            first = 12 - 6 if start == "anchor" else 12 + slot - 5
            assert [row[slot] for row in reach] == [place >= first for place in range(12)]


# transformers' own DFlash


if DFlashTokenCandidateGenerator:
    from transformers.cache_utils import DFlashCache
    from transformers.models import muse_glimmer_assistant as muse
with_dflash = pytest.mark.skipif(
    not DFlashTokenCandidateGenerator, reason="this release of transformers has no DFlash"
)


def muse_assistant(target: PreTrainedModel, std: float = 0.3, **fields) -> PreTrainedModel:
    config = muse.MuseGlimmerAssistantConfig(
        hidden_size=target.config.hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=target.config.vocab_size,
        block_size=5,
        mask_token_id=3,
        target_layer_ids=[0, 2],
        **{"sliding_window": 7, **fields},
    )
    torch.manual_seed(5)
    assistant = muse.MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.normal_(std=std)
    return assistant


@with_dflash
@pytest.mark.parametrize("context", [3, 7, 8, 20])
def test_the_assistant_of_transformers(context, target, tmp_path):
    assistant = muse_assistant(target)
    assistant.save_pretrained(tmp_path)
    assert "encoder.fc.weight" in load_file(tmp_path / "model.safetensors")
    drafter = load(tmp_path)
    drafter.bind(target)
    features, block = torch.randn(1, context, 64), drafter.block_ids(torch.tensor([[5]]))
    with torch.no_grad():
        ours = drafter(block, features).last_hidden_state
        cache = DFlashCache(config=assistant.config)
        cache.set_previous_accepted_tokens(context)
        theirs = assistant(target.get_input_embeddings()(block), features, **{CACHE: cache}).last_hidden_state
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@with_dflash
def test_drafts_of_a_zlab_checkpoint_are_those_of_transformers(tmp_path):
    target = tiny_target("qwen3", seed=5, vocab_size=8)
    assistant = muse_assistant(target, std=0.6, layer_types=["full_attention"] * 2)
    config = assistant.config.to_dict() | {"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}
    config = {name: value for name, value in config.items() if name not in ("mask_token_id", "target_layer_ids")}
    config["dflash_config"] = {"mask_token_id": 3, "target_layer_ids": [0, 2]}
    config |= {"num_target_layers": 4, "vocab_size": 8}
    tensors = {
        name.replace("encoder.fc", "fc").replace("encoder.output_norm_enc", "hidden_norm"): tensor
        for name, tensor in assistant.state_dict().items()
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    drafter = load(tmp_path)
    assert not drafter.config.sample_from_anchor
    steps_agree(target, drafter, assistant, prompt(7) % 5)


@with_dflash
def test_drafts_of_the_assistant_are_those_of_transformers(tmp_path):
    """In a whole text, too, beyond the window, where transformers no longer keeps what it does not see."""
    target = tiny_target("qwen3", seed=3, vocab_size=8)
    assistant = muse_assistant(target, std=0.6)
    assistant.save_pretrained(tmp_path)
    steps_agree(target, load(tmp_path), assistant, prompt(17) % 5)


def steps_agree(target: PreTrainedModel, drafter: DSparkModel, assistant: PreTrainedModel, ids: torch.Tensor):
    """Ours and transformers' generator get as many tokens accepted in every round of a text."""
    arguments = {"inputs": ids, "max_new_tokens": 60, "do_sample": False}
    with trace(drafter) as rounds:
        target.generate(**arguments, assistant_model=drafter)
    sizes: list[int] = []
    target.generate(**arguments, assistant_model=assistant, speculation_type="dflash", streamer=Sizes(sizes))
    assert sizes[2:] == [1 + a_round.accepted for a_round in rounds]
    assert len(set(sizes[2:])) > 2, "too few kinds of rounds to tell anything"


# What runs other code on the same weights: the tests above, and scripts in tests/interop.
SIDE_BY_SIDE = {
    "z-lab DFlash": "side by side with transformers, and with dflash 0.1.0 (tests/interop/zlab_dflash.py)",
    "transformers Muse Glimmer assistant": "side by side with transformers",
}


class Sizes:
    """A streamer that counts the tokens of each step."""

    def __init__(self, sizes: list[int]):
        self.sizes = sizes

    def put(self, tokens):
        self.sizes.append(tokens.numel())

    def end(self):
        pass


def test_a_target_that_scales_its_embeddings():
    target = tiny_target("gemma3_text")
    drafter = tiny_drafter(target, input_embedding_scale=None)
    drafter.bind(target)
    ids = torch.tensor([[7, 9]])
    torch.testing.assert_close(drafter.embed(ids), target.get_input_embeddings()(ids))


# Which format it is, and what is refused


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "dspark"}, "hf_dspark"),
        ({"speculators_model_type": "dspark", "architectures": ["Qwen3DSparkModel"]}, "speculators"),
        ({"speculators_config": {"algorithm": "dflash"}}, "speculators"),
        ({"speculators_model_type": "dflash2"}, "DFlash2"),
        ({"architectures": ["DFlash2DraftModel"], "dflash_config": {}}, "DFlash2"),
        ({"model_type": "muse_glimmer_assistant"}, "transformers Muse Glimmer assistant"),
        ({"architectures": ["Gemma4DSparkModel"], "target_layer_ids": [1]}, "DeepSpec Gemma4"),
        (
            {"architectures": ["Qwen3DSparkModel"], "eagle_aux_hidden_state_layer_ids": [1], "target_layer_ids": [0]},
            "Nemotron DSpark",
        ),
        ({"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [1]}, "DeepSpec"),
        ({"architectures": ["Qwen3OmniDSparkModel"], "target_layer_ids": [1]}, "DeepSpec"),
        ({"architectures": ["Qwen35DSparkModel"], "target_layer_ids": [1]}, "Qwen3.5 DSpark"),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark"}}, "SpecForge DSpark"),
        ({"architectures": ["Lfm2DSparkDraftModel"], "dflash_config": {}}, "LFM2 DSpark"),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark"}},
            "NVIDIA ModelOpt DSpark",
        ),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}}, "Domino"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}, "markov_rank": 8}, "DFlash with Markov head"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, "z-lab DFlash"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna DFlash"),
        ({"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5}, "DeepSeek-V4 DSpark"),
        ({"architectures": ["KimiK3DSparkModel"]}, "GLM-5.2, Kimi-K3 or DeepSeek DSpark"),
        ({"architectures": ["MuseSparkDSparkModel"]}, "MiniMax-M3 or Muse-Spark DSpark"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, None),
        ({"architectures": ["DSparkDraftModel"]}, None),
    ],
    ids=str,
)
def test_which_format_a_config_is_of(config, name):
    found = format_of(config)
    assert (None if found is None else found.NAME) == name


@pytest.mark.parametrize(
    "architecture", ["Qwen35DSparkModel", "DFlashLagunaForCausalLM", "Glm5_2DSparkModel", "DSparkMiniMaxDraftModel"]
)
def test_other_backbones_are_refused_by_name(architecture, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    name = format_of({"architectures": [architecture]}).NAME
    with pytest.raises(ValueError, match=f"is a {name} drafter.*does not read"):
        DSparkModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("index", "change", "match"),
    [
        (0, {"log_snr_conditioning": True}, "signal-to-noise"),
        *((i, {"num_hidden_layers": 2**40}, "num_hidden_layers") for i in range(14)),
        (15, {"transformer_layer_config": {"num_hidden_layers": 2**40}}, "num_hidden_layers"),
        (0, {"some_new_scale": 2.0}, "some_new_scale"),
        (0, {"quantization_config": {"quant_method": "modelopt"}}, "dequantise"),
        (0, {"projector_type": "domino"}, "domino"),
        (0, {"draft_vocab_size": 20}, "no `d2t`"),
        (3, {"dspark_config": {"attention_mode": "mla", "projector_type": "dspark"}}, "mla attention"),
        (3, {"logit_scale": 0.5}, "logit_scale"),
        (5, {"block_size": 4}, "twice, and differently"),
        (5, {"dflash_config": 5}, None),
        (5, {"use_sliding_window": True, "layer_types": None}, "no `layer_types`"),
        (5, {"hidden_size": "wide"}, "not a whole number"),
        (8, {"sliding_window_non_causal": True}, "sliding_window_non_causal"),
        (12, {"rope_is_neox_style": None}, "rope_is_neox_style"),
        (13, {"sample_from_anchor": None}, "sample_from_anchor"),
        (13, {"target_layer_ids": [0, 2, 3]}, "less one"),
        (
            15,
            {"sample_from_anchor": False, "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}},
            "5",
        ),
        (15, {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        (15, {"transformer_layer_config": {"model_type": "deepseek_v3"}}, "deepseek_v3"),
        (15, {"transformer_layer_config": {"new_field": 1}}, "new_field"),
    ],
)
def test_what_a_config_says_is_done_or_refused(index, change, match, target):
    _, fields, foreign, _ = WRITTEN[index]
    native = tiny_drafter(target, **fields)
    config = foreign(native.config) | change
    found = format_of(config)
    if match is None:
        assert found is None
        return
    shapes = {name: tuple(tensor.shape) for name, tensor in native.state_dict().items()}
    with pytest.raises(ValueError, match=match):
        DSparkConfig.from_dict(found.translate(config, shapes))


def test_a_pickled_mask_embedding_is_not_opened(target, tmp_path):
    native = tiny_drafter(target, **PLAIN)
    write(tmp_path, zlab(native.config), native)
    (tmp_path / "mask_embedding.pt").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ValueError, match="pickle"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"fc.weight": torch.zeros(32, 8, dtype=torch.uint8)}, "dequantise"),
        ({"fc.weight_scale": torch.zeros(32, 8)}, "dequantise"),
        ({"model.fc.weight": torch.zeros(2)}, "two tensors"),
        ({"candidate_selector.predecessor_codebook": torch.zeros(2)}, "belongs to nothing"),
    ],
)
def test_tensors_that_are_not_read(tensors, match, target, tmp_path):
    native = tiny_drafter(target, **PLAIN)
    write(tmp_path, zlab(native.config), native)
    save_file(load_file(tmp_path / "model.safetensors") | tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=match):
        load(tmp_path)


def test_a_token_map_that_leads_out_of_the_vocabulary(target, tmp_path):
    native = tiny_drafter(target, draft_vocab_size=20, has_lm_head=True)
    native.d2t.copy_(torch.arange(20) + 2)  # target ids, as some other frameworks write
    native.d2t[-1] = 39
    write(tmp_path, speculators(native.config), native)
    with pytest.raises(ValueError, match="offsets"):
        load(tmp_path)


def test_tensors_for_training_are_left_out(target, tmp_path, caplog):
    native = tiny_drafter(target)
    write(tmp_path, deepspec(native.config), native)
    extra = ("t2d", "mask_embedding", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
    tensors = load_file(tmp_path / "model.safetensors") | {name: torch.zeros(3) for name in extra}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load(tmp_path).state_dict().keys() == native.state_dict().keys()
    assert not caplog.records


def test_layers_that_zlab_reads_where_it_does_not_say():
    assert default_layer_ids(36, 1) == [18]
    assert default_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_layer_ids(28, 5) == [1, 7, 13, 19, 25]


# Damaged files


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["qwen3", "rnn"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def configs(target) -> list[tuple[dict, dict]]:
    """A config and the tensor shapes of each format."""
    found = []
    for _, fields, foreign, _ in WRITTEN:
        native = tiny_drafter(target, **fields)
        shapes = {name: tuple(tensor.shape) for name, tensor in native.state_dict().items()}
        found.append((foreign(native.config), shapes))
        found.append((native.config.to_dict(), shapes))
    return found


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_config_is_read_or_refused_in_one_way(configs, data):
    config, tensors = data.draw(st.sampled_from(configs))
    config = json.loads(json.dumps(config))
    for _ in range(data.draw(st.integers(1, 3))):
        owners = [config] + [value for value in config.values() if isinstance(value, dict)]
        owner = data.draw(st.sampled_from(owners))
        name = data.draw(st.sampled_from([*owner, "is_causal", "rope_scaling"]) | st.text(max_size=5))
        owner[name] = data.draw(JSON)
    tensors = dict(tensors)
    tensors[data.draw(st.sampled_from(sorted(tensors)))] = data.draw(
        st.lists(st.integers(0, 99), max_size=3).map(tuple)
    )
    if (found := format_of(config)) is not None:
        try:
            assert isinstance(DSparkConfig.from_dict(found.translate(config, tensors)), DSparkConfig)
        except (ValueError, OSError) as error:
            assert str(error)


@given(content=JSON, tail=st.binary(max_size=16))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_header_is_read_or_refused_in_one_way(tmp_path, content, tail):
    header = json.dumps({"a": content, "b": {"dtype": "F32", "shape": content, "data_offsets": [0, 4]}}).encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + tail)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        tensor_shapes(tmp_path)


@given(content=JSON)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_in_place_of_a_config(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises((ValueError, OSError)):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[" * 100000, "\x00", "5"])
def test_a_config_that_is_no_json(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises((ValueError, OSError), match=r"config\.json"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        *({}, [], {"weight_map": {}}, {"metadata": {}, "weight_map": 5}, {"metadata": {}, "weight_map": {"a": 5}}),
        {"metadata": {}, "weight_map": {"a": "../model.safetensors"}},
    ],
)
def test_an_index_that_is_none(target, tmp_path, index):
    native = tiny_drafter(target)
    write(tmp_path, deepspec(native.config), native)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json"):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_checkpoint_that_is_cut_short(target, tmp_path, kept):
    native = tiny_drafter(target)
    write(tmp_path, deepspec(native.config), native)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load(tmp_path)


# Sizes of published drafters: parameters, from the geometry (hidden, MLP, heads, key/value heads, head size, layers),
# the number of taps, the vocabulary and the draft vocabulary, what tables it has, and the rank of the Markov head.

FULL, HEAD = {"has_embed_tokens": True, "has_lm_head": True}, {"has_lm_head": True}
PUBLISHED = {
    "deepseek-ai/dspark_qwen3_4b_block7": (1_393_133_569, (2560, 9728, 32, 8, 128, 5), 5, 151936, None, FULL, 256),
    "deepseek-ai/dspark_qwen3_8b_block7": (2_371_081_729, (4096, 12288, 32, 8, 128, 5), 5, 151936, None, FULL, 256),
    "deepseek-ai/dspark_qwen3_14b_block7": (3_416_263_169, (5120, 17408, 40, 8, 128, 5), 5, 151936, None, FULL, 256),
    "jayyun98/Ling-3.0-Tiny-DSpark": (274_217_729, (1536, 4608, 16, 16, 128, 3), 5, 157184, None, {}, 512),
    "RedHatAI/Qwen3.8-27B-speculator.dspark": (1_988_431_617, (5120, 17408, 20, 4, 256, 5), 8, 248320, None, {}, 256),
    "RedHatAI/GLM-5.3-speculator.dspark": (1_249_565_313, (6144, 12288, 64, 64, 64, 3), 5, 154880, None, {}, 256),
    "RedHatAI/Kimi-K3-speculator.dspark": (4_744_900_481, (7168, 14336, 96, 16, 64, 5), 5, 163840, None, FULL, 256),
    "yosefw/Qwen3-0.6B-DSpark": (317_425_793, (1024, 3072, 16, 8, 128, 5), 3, 151936, 32000, FULL, 256),
    "rasyosef/Qwen3-1.7B-DSpark": (295_918_849, (2048, 6144, 16, 8, 128, 4), 4, 151936, None, {}, 256),
    "rasyosef/Llama-3.2-1B-Instruct-speculator.dspark": (
        *(310_164_609, (2048, 8192, 32, 8, 64, 3), 5),
        *(128256, 32000, HEAD, 256),
    ),
    "rasyosef/Qwen3.5-2B-DSpark": (451_726_161, (2048, 6144, 16, 8, 128, 5), 5, 248320, 50000, HEAD, 256),
    "RadixArk/Qwen3.8-27B-DSpark": (1_359_284_737, (5120, 10240, 40, 8, 128, 5), 5, 248320, None, {}, 256),
    "LiquidAI/LFM2.5-VL-3B-DSpark": (279_468_801, (2048, 6144, 32, 8, 64, 4), 5, 128000, None, {}, 256),
    "abstract-extraordinary/Muse-Glimmer-30B-DSpark": (
        *(2_659_433_728, (6656, 19968, 32, 8, 128, 5), 5),
        *(202048, None, {"enable_confidence_head": False}, 256),
    ),
}
PUBLISHED_BYTES = {
    "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark": (1.90, (2048, 6144, 16, 2, 256, 5), 5, 248320, 32000, FULL, 256),
    "RedHatAI/gemma-4-31B-it-speculator.dspark": (8.39, (5376, 21504, 32, 16, 256, 5), 5, 262144, 32000, FULL, 256),
}


def parameters(geometry, num_taps, vocabulary, draft_vocabulary, fields, rank) -> tuple[int, int]:
    """Elements of a published drafter's floating-point tensors, and of its token maps."""
    hidden, mlp, num_heads, kv_heads, head_dim, layers = geometry
    config = DSparkConfig(
        vocab_size=vocabulary,
        draft_vocab_size=draft_vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=num_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        target_layer_ids=list(range(num_taps)),
        markov_rank=rank,
        **fields,
    )
    with torch.device("meta"):
        drafter = DSparkModel(config)
    # t2d, a flag for each token, is in the files, but nothing that a drafter needs
    maps = 0 if drafter.d2t is None else drafter.d2t.numel() + vocabulary
    return sum(math.prod(p.shape) for p in drafter.parameters()), maps


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_drafters_have_the_parameters_that_the_hub_counts(name):
    count, *layout = PUBLISHED[name]
    assert sum(parameters(*layout)) == count


@pytest.mark.parametrize("name", PUBLISHED_BYTES)
def test_published_drafters_have_the_size_that_the_hub_shows(name):
    size, *layout = PUBLISHED_BYTES[name]
    weights, _ = parameters(*layout)
    assert 2 * weights / 1e9 == pytest.approx(size, abs=0.01)


def test_the_document_says_what_is_tested():
    from format_matrix import DOCUMENT, matrix

    assert DOCUMENT.read_text(encoding="utf-8") == matrix(), "run tests/format_matrix.py"


def test_every_format_is_tested():
    read = {found.NAME for found in FORMATS if not hasattr(found, "reason")}
    assert read == {name for name, *_ in WRITTEN} | {"hf_dspark"}
