"""Drafters written in the formats of other frameworks: read back, they are what they were, or they are not written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, drafter_config, tiny_drafter, tiny_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_formats import DFLASH2, GEMMA4, PLAIN, SLIDING, WRITTEN, draft_logits, lively, load, write
from transformers import PreTrainedModel
from typer.testing import CliRunner

from hf_dspark import DSparkConfig, DSparkModel
from hf_dspark.checkpoints import Checkpoint, format_of, writer
from hf_dspark.cli import app

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


def test_a_borrowed_output_head_of_a_pruned_drafter(target, tmp_path):
    """Engines get the rows of the target's head that belong to the drafter's tokens, and which tokens these are."""
    drafter = tiny_drafter(target, draft_vocab_size=20, base_model="org/target")
    drafter.d2t.copy_(torch.arange(20) // 2)
    with pytest.raises(ValueError, match="bind"):
        drafter.save_pretrained(tmp_path / "unbound", format="speculators")
    assert not (tmp_path / "unbound").exists()
    drafter.bind(target)
    drafter.save_pretrained(tmp_path, format="speculators")
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    ids = [i + i // 2 for i in range(20)]
    assert torch.equal(tensors["lm_head.weight"], target.lm_head.weight[ids])
    assert tensors["t2d"].nonzero().flatten().tolist() == ids and tensors["t2d"].shape == (40,)
    assert "embed_tokens.weight" not in tensors
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/target",
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert config["aux_hidden_state_layer_ids"] == [0, 2, 3]  # of taps -1, 1, 2: 0 are the embeddings


@pytest.mark.parametrize("anchor_first", [True, False])
def test_tokens_to_speculate(anchor_first, target, tmp_path):
    drafter = tiny_drafter(target, sample_from_anchor=anchor_first)
    drafter.save_pretrained(tmp_path, format="speculators")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["sample_from_anchor"] is anchor_first
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5 - (not anchor_first)


def test_a_deepspec_drafter_has_the_tables_of_its_target(target, tmp_path):
    drafter = tiny_drafter(target)
    drafter.bind(target)
    drafter.save_pretrained(tmp_path, format="deepspec", max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tables = dict(load(tmp_path).named_parameters())
    assert torch.equal(tables["embed_tokens.weight"], target.get_input_embeddings().weight)
    assert torch.equal(tables["lm_head.weight"], target.lm_head.weight)
    drafter.save_pretrained(tmp_path, format="deepspec")
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}, "shards of before"


@pytest.mark.parametrize(
    ("form", "fields", "reason"),
    [
        ("gguf", {}, "native, deepspec, speculators"),
        ("deepspec", {"draft_vocab_size": 20}, "pruned vocabulary"),
        ("deepspec", {"attention_sink_bias": True}, "attention_sink_bias"),
        ("deepspec", {"rope_interleaved": True}, "rope_interleaved"),
        ("deepspec", {"final_logit_softcapping": 3.0}, "final_logit_softcapping"),
        ("deepspec", OF_THE_ANCHOR, "start from the anchor"),
        ("deepspec", {**SLIDING, "causal_in_block": [False, True]}, "causal_in_block"),
        ("deepspec", {"target_layer_ids": [1, 3]}, "layer 3"),
        ("deepspec", {**PLAIN, **DFLASH2, "backbone": "dflash2"}, "dflash2"),
        ("deepspec", {**GEMMA4, **SLIDING}, "sliding windows"),
        ("deepspec", {**GEMMA4, "input_embedding_scale": 2.0}, "input_embedding_scale"),
        ("speculators", {"attention_value_scale": 0.5}, "attention_value_scale"),
        ("speculators", OF_THE_ROW, "start from each row"),
        ("speculators", {"causal_in_block": True}, "causal_in_block"),
        ("speculators", {"output_multiplier": 0.5, "input_embedding_scale": 2.0}, "input_embedding_scale.*multiplier"),
        ("speculators", GEMMA4, "gemma4"),
        ("speculators", {**PLAIN, **DFLASH2}, "selector_rank"),
        ("speculators", {"input_embedding_scale": None}, "input_embedding_scale"),
    ],
    ids=str,
)
def test_what_a_format_cannot_express_is_refused_by_name(form, fields, reason, target, tmp_path):
    drafter = tiny_drafter(target, **fields)
    if fields.get("input_embedding_scale", 1) is not None:
        drafter.bind(target)
    with pytest.raises(ValueError, match=reason):
        drafter.save_pretrained(tmp_path / "export", format=form)
    assert not (tmp_path / "export").exists()


def test_a_scale_that_the_target_says(target, tmp_path):
    drafter = tiny_drafter(target, input_embedding_scale=None, **PLAIN)
    drafter.bind(target)
    drafter.save_pretrained(tmp_path, format="speculators")
    assert load(tmp_path).config.input_embedding_scale == 1.0


def test_draft_tokens_out_of_order_are_not_written(target, tmp_path):
    drafter = tiny_drafter(target, draft_vocab_size=20, has_lm_head=True)
    drafter.d2t[0], drafter.d2t[1] = 1, -1
    with pytest.raises(ValueError, match="order"):
        drafter.save_pretrained(tmp_path / "export", format="speculators")
    assert not (tmp_path / "export").exists()


def test_a_failure_leaves_what_was_there(target, tmp_path, monkeypatch):
    drafter = tiny_drafter(target)
    drafter.save_pretrained(tmp_path, format="speculators")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def no_space(*arguments, **keywords):
        raise OSError("no space left")

    monkeypatch.setattr("hf_dspark.modeling_dspark.write_text", no_space)
    with pytest.raises(OSError, match="no space"):
        lively(drafter).save_pretrained(tmp_path, format="speculators")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_cards_and_uploads_are_for_the_native_format(target, tmp_path):
    with pytest.raises(ValueError, match="native format"):
        tiny_drafter(target).save_pretrained(tmp_path / "export", format="speculators", push_to_hub=True)
    assert not (tmp_path / "export").exists()


PARTIAL = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
CHANGES = {
    "draft_vocab_size": st.sampled_from([20, 40]),
    "layer_types": st.lists(st.sampled_from(["sliding_attention", "full_attention"]), min_size=2, max_size=2),
    "causal_in_block": st.booleans() | st.lists(st.booleans(), min_size=2, max_size=2),
    "sliding_window_from": st.sampled_from(["row", "anchor"]),
    "attention_bias": st.booleans(),
    "attention_sink_bias": st.booleans(),
    "attention_value_scale": st.sampled_from([0.5, 1.0]),
    "rope_interleaved": st.booleans(),
    "rope_parameters": st.sampled_from(
        [
            YARN,
            {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            GEMMA4["rope_parameters"],
        ]
    ),
    "input_embedding_scale": st.sampled_from([1.0, 2.0, 32**0.5]),
    "output_multiplier": st.sampled_from([0.5, 1.0]),
    "final_logit_softcapping": st.sampled_from([None, 3.0]),
    "hidden_act": st.sampled_from(["silu", "gelu"]),
    "backbone": st.sampled_from(["qwen3", "gemma4", "dflash2"]),
    "target_hidden_size": st.sampled_from([16, 32]),
    "target_layer_ids": st.lists(st.integers(-1, 3), min_size=1, unique=True).map(sorted),
    "sample_from_anchor": st.booleans(),
    "markov_rank": st.sampled_from([0, 8]),
    "markov_head_type": st.sampled_from(["vanilla", "gated", "rnn"]),
    "selector_rank": st.sampled_from([0, 8]),
    "enable_confidence_head": st.booleans(),
    "confidence_head_with_markov": st.booleans(),
    "has_embed_tokens": st.booleans(),
    "has_lm_head": st.booleans(),
}


@given(exported=st.sampled_from(EXPORTED), data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_drafter_is_read_back_as_it_was_or_not_written(exported, data, target):
    form, fields = exported
    names = data.draw(st.lists(st.sampled_from(sorted(CHANGES)), max_size=3, unique=True))
    fields = {**fields, **{name: data.draw(CHANGES[name]) for name in names}}
    try:
        config = tiny_config(target, **fields)
    except ValueError:
        return  # no drafter at all
    with torch.device("meta"):
        tensors = dict(DSparkModel(config).state_dict())
    try:
        to = writer(form, config)
        written = json.loads(json.dumps(to.write_config(config)))
    except ValueError as error:
        assert str(error)
        return
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert format_of(written) is to
    assert computes(DSparkConfig.from_dict(to.translate(written, shapes))) == computes(config)


def tiny_config(target: PreTrainedModel, **fields) -> DSparkConfig:
    return drafter_config(target, **{"sliding_window": 6, "conv_group_size": 8, "selector_top_k": 6, **fields})


# The command


def run(*arguments) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def target_folder(target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    target.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "fields", "foreign", "prefixes"), WRITTEN[::2])
def test_any_drafter_becomes_a_native_one(name, fields, foreign, prefixes, target, tmp_path):
    layer_ids = [0, 2] if name in ("z-lab DFlash", "transformers Muse Glimmer assistant") else [-1, 1, 2]
    native = lively(tiny_drafter(target, **{"target_layer_ids": layer_ids, **fields}))
    write(tmp_path, foreign(native.config), native, prefixes)
    assert run("convert", tmp_path, tmp_path / "native", "--to", "native")[0] == 0
    assert Checkpoint(tmp_path / "native").format.NAME == "hf_dspark"
    assert torch.equal(draft_logits(load(tmp_path / "native"), target), draft_logits(load(tmp_path), target))


def test_convert_from_one_format_over_another_to_a_third(target, target_folder, tmp_path):
    native = lively(tiny_drafter(target, attention_bias=True)).bfloat16()
    native.save_pretrained(tmp_path / "a")
    assert run("convert", tmp_path / "a", tmp_path / "b", "--to", "deepspec", "--target", target_folder)[0] == 0
    assert run("convert", tmp_path / "b", tmp_path / "c", "--to", "speculators")[0] == 0
    assert run("convert", tmp_path / "c", tmp_path / "d", "--to", "native")[0] == 0
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    for key, tensor in native.state_dict().items():
        assert tensors[key].dtype == torch.bfloat16 and torch.equal(tensors[key], tensor)
    assert str(tmp_path) not in (tmp_path / "c" / "config.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["new", "--to", "deepspec"], "name its --target"),
        (["new", "--to", "gguf"], "no format to write"),
        (["drafter", "--to", "native"], "not empty"),
        (["new", "--to", "deepspec", "--target", "empty"], "empty"),
        (["new", "--to", "deepspec", "--target", "drafter"], "dspark"),
    ],
)
def test_what_convert_refuses(arguments, reason, target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_drafter(target).save_pretrained("drafter")
    Path("empty").mkdir()
    code, output = run("convert", "drafter", *arguments)
    assert code == 1 and reason in output
    assert not Path("new").exists()


def test_a_drafter_that_does_not_fit_the_target_is_not_converted(target_folder, tmp_path):
    tiny_drafter(tiny_target("llama", hidden_size=16)).save_pretrained(tmp_path / "a")
    code, output = run("convert", tmp_path / "a", tmp_path / "b", "--to", "native", "--target", target_folder)
    assert code == 1 and "does not fit" in output and not (tmp_path / "b").exists()


@pytest.mark.parametrize("name", ["deepspec_qwen3_gated", "speculators_dspark_rnn_pruned", "deepspec_gemma4_vanilla"])
def test_drafters_of_the_frameworks_themselves_are_written_as_they_were(name, tmp_path):
    """Every tensor of what DeepSpec and speculators saved comes back, as does every field that says how to draft."""
    form = name.split("_")[0]
    drafter = load(GOLDEN / name)
    drafter.save_pretrained(tmp_path, format=form)
    theirs, ours = load_file(GOLDEN / name / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (GOLDEN / name, tmp_path))
    shared = after.keys() & before.keys() - {"transformers_version", "rope_parameters", "speculators_config"}
    assert len(shared) > 8
    for key in shared - {"transformer_layer_config", "head_dim", "num_key_value_heads", "initializer_range"}:
        assert after[key] == before[key], key
