"""What `hf-dspark inspect` says of a checkpoint, without loading it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, tiny_drafter, tiny_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_formats import JSON, PLAIN, SLIDING, WRITTEN, write, zlab
from transformers import AutoConfig
from typer.testing import CliRunner

from hf_dspark import DSparkModel
from hf_dspark.cli import app
from hf_dspark.inspection import RUNS, inspect


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_target("qwen3", seed=3).save_pretrained(folder)
    return folder


def test_a_drafter_of_speculators():
    rows = inspect(GOLDEN / "speculators_dspark_rnn_pruned")
    assert rows["format"] == "speculators"
    assert rows["block"].startswith("6 rows, 5 drafts; 1 + N")
    assert rows["layers it reads"] == "the outputs of 1, 3; in hidden_states, 2, 4"
    assert rows["sequential head"] == "rnn, rank 12" and rows["confidence head"] == "of hidden state"
    assert rows["draft vocabulary"] == "40 of 64 tokens"
    assert (rows["embeddings"], rows["output head"]) == ("the target's", "its own")
    assert rows["target's size"] == "at least 4 layers, hidden size 64, 64 tokens"
    assert rows["layers 0 to 1"] == "all of the context; the block both ways"
    assert "theta 10000" in rows["rotary embedding"]
    drafter = DSparkModel.from_pretrained(GOLDEN / "speculators_dspark_rnn_pruned")
    size = (GOLDEN / "speculators_dspark_rnn_pruned" / "model.safetensors").stat().st_size
    assert rows["size"] == f"{sum(p.numel() for p in drafter.parameters()):,} parameters, {size:,} bytes"
    assert "pruned vocabulary" in rows["as deepspec"] and rows["as speculators"] == "yes"
    assert rows[RUNS] == "yes"


def test_a_native_drafter_with_windows(tmp_path):
    fields = {**SLIDING, "causal_in_block": [True, False], "base_model": "org/target", "attention_sink_bias": True}
    tiny_drafter(tiny_target("llama"), **fields, attention_bias=True, output_multiplier=0.5).save_pretrained(tmp_path)
    rows = inspect(tmp_path)
    assert rows["format"] == "hf_dspark" and rows["made for"] == "org/target"
    assert rows["block"].startswith("5 rows, 5 drafts; anchor-first")
    assert rows["layers it reads"] == "the outputs of embeddings, 1, 2; in hidden_states, 0, 2, 3"
    assert rows["layer 0"] == "a window of 6 that ends with each row; the block causally"
    assert rows["layer 1"] == "all of the context; the block both ways"
    assert rows["besides"] == "biases in attention, attention sinks, output_multiplier 0.5"
    assert "attention_sink_bias" in rows["as deepspec"] and "output_multiplier" in rows["as speculators"]


def test_what_a_conversion_would_need(tmp_path):
    tiny_drafter(tiny_target("llama"), draft_vocab_size=20).save_pretrained(tmp_path / "pruned")
    assert inspect(tmp_path / "pruned")["as speculators"] == "yes, given the target's lm_head"
    tiny_drafter(tiny_target("llama")).save_pretrained(tmp_path / "whole")
    assert inspect(tmp_path / "whole")["as deepspec"] == "yes, given the target's embed_tokens and lm_head"


@pytest.mark.parametrize(("name", "fields", "foreign", "prefixes"), WRITTEN)
def test_every_format(name, fields, foreign, prefixes, tmp_path):
    layer_ids = [0, 2] if name in ("z-lab DFlash", "transformers Muse Glimmer assistant") else [-1, 1, 2]
    native = tiny_drafter(tiny_target("qwen3"), **{"target_layer_ids": layer_ids, **fields})
    write(tmp_path, foreign(native.config), native, prefixes)
    rows = inspect(tmp_path)
    assert (rows["format"], rows[RUNS]) == (name, "yes")
    assert rows["size"].startswith(
        f"{sum(p.numel() for p in native.state_dict().values() if p.is_floating_point()):,} "
    )


def test_nothing_is_loaded(monkeypatch):
    def forbidden(*arguments, **keywords):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(DSparkModel, "from_pretrained", forbidden)
    monkeypatch.setattr("safetensors.safe_open", forbidden)
    assert inspect(GOLDEN / "deepspec_qwen3_rnn")[RUNS] == "yes"


def test_whether_it_fits_a_target(target_folder, tmp_path):
    tiny_drafter(tiny_target("qwen3")).save_pretrained(tmp_path)
    assert inspect(tmp_path, target_folder)["fits the target"] == "yes"
    for file in target_folder.glob("*.safetensors"):
        file.unlink()  # its config is enough
    reason = inspect(GOLDEN / "deepspec_qwen3_vanilla", target_folder)["fits the target"]
    assert reason.startswith("no") and "hidden size is 32, the drafter expects 64" in reason
    AutoConfig.for_model("t5").save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="T5Config"):
        inspect(tmp_path, tmp_path / "t5")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["Qwen35DSparkModel"]}, "gated queries"),
        ({"model_type": "dspark", "hidden_size": 64}, "fc.weight"),
        ({"model_type": "dspark", "num_hidden_layers": 2**40}, "num_hidden_layers"),
        ({"model_type": "dspark", "vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1}, "cannot be"),
        ({"model_type": "dspark", "hidden_act": "magic"}, "magic"),
        ({"model_type": "dspark", "dtype": -1}, "dtype"),
        ({"model_type": "dspark", "output_multiplier": []}, "output_multiplier"),
    ],
    ids=str,
)
def test_a_drafter_that_does_not_run_here(config, reason, tmp_path):
    native = tiny_drafter(tiny_target("llama"))
    write(tmp_path, config, native)
    rows = inspect(tmp_path)
    assert list(rows) == ["format", RUNS]
    assert rows[RUNS].startswith("no: ") and reason in rows[RUNS]


def run(*arguments) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], env={"COLUMNS": "300"})
    return result.exit_code, result.output


def test_the_command(target_folder, tmp_path):
    code, output = run(GOLDEN / "deepspec_qwen3_gated", "--target", target_folder)
    assert code == 0
    assert "deepspec_qwen3_gated" in output and "gated, rank 16" in output and "does not fit" in output
    code, output = run(tmp_path / "nowhere")
    assert code == 1 and "nowhere" in output
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code, output = run(tmp_path)
    assert code == 1 and "not a drafter in a format" in output


def test_markup_in_a_config_is_text(tmp_path):
    native = tiny_drafter(tiny_target("qwen3"), **PLAIN)
    write(tmp_path, zlab(native.config) | {"[red]evil[/red]": 1}, native)
    code, output = run(tmp_path)
    assert code == 0 and "[red]evil[/red]" in output


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Path]:
    """A checkpoint of each format."""
    folders = []
    for i, (_, fields, foreign, _) in enumerate(WRITTEN):
        folder = tmp_path_factory.mktemp(f"checkpoint{i}")
        native = tiny_drafter(tiny_target("qwen3"), **fields)
        write(folder, foreign(native.config) if i else native.config.to_dict(), native)
        folders.append(folder)
    return folders


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_config_gives_a_table_or_one_error(checkpoints, tmp_path, data):
    folder = data.draw(st.sampled_from(checkpoints))
    config = json.loads((folder / "config.json").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        owner = data.draw(st.sampled_from([config] + [value for value in config.values() if isinstance(value, dict)]))
        name = data.draw(st.sampled_from([*owner, "is_causal", "rope_scaling", "quantization_config"]))
        owner[name] = data.draw(JSON | st.integers(-1, 40))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    try:
        rows = inspect(tmp_path)
    except (ValueError, OSError) as error:
        assert str(error)
        return
    assert rows["format"] and rows[RUNS]
    if rows[RUNS] == "yes":
        with torch.no_grad():
            assert DSparkModel.from_pretrained(tmp_path) is not None


@given(content=JSON)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_in_place_of_a_config(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises((ValueError, OSError)):
        inspect(tmp_path)
