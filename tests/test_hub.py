"""Pushing and loading with the real Hub client, against a Hub on the loopback interface (`hub_server.py`)."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import prompt, tiny_drafter, tiny_target
from hub_server import TOKEN, hub_server
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors.torch import load
from transformers import AutoConfig, AutoModel
from typer.testing import CliRunner

from hf_dspark import DSparkModel
from hf_dspark.cli import app
from hf_dspark.inspection import inspect
from hf_dspark.scheduling.calibration import Calibration
from hf_dspark.scheduling.profile import HardwareProfile

NAME = "tester/drafter"
FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors", "requires_hf_dspark.py"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Where the client finds the Hub, which it reads when it is imported."""
    return {
        "HF_HOME": str(tmp_path_factory.mktemp("home")),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "0",
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory, environment):
    with hub_server(tmp_path_factory.mktemp("hub")) as running:
        environment["HF_ENDPOINT"] = running.url
        yield running


@pytest.fixture(scope="module")
def process(server, environment):
    """A process whose client talks to the server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(torch.set_num_threads, 1).result()
            yield pool


@pytest.fixture
def client(server, process):
    """Calls a function in that process, with an empty Hub to talk to."""
    server.repositories.clear()
    server.requests.clear()
    server.fail = None
    return lambda function, *arguments, **keywords: process.submit(function, *arguments, **keywords).result()


# What runs there


def a_drafter(**fields):
    drafter = tiny_drafter(tiny_target("llama"), **fields)
    drafter.generation_config.num_assistant_tokens = 3
    return drafter


def push(repo_id="drafter", fields=None, **keywords):
    return a_drafter(**(fields or {})).push_to_hub(repo_id, **keywords)


def push_bound(repo_id):
    target = tiny_target("llama")
    drafter = a_drafter()
    target.generate(prompt(5), assistant_model=drafter, max_new_tokens=4, do_sample=False)
    drafter.push_to_hub(repo_id)


def push_target(repo_id, tokenizer):
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tiny_target("llama").push_to_hub(repo_id)
    tokenizer.push_to_hub(repo_id)


def save_and_push(folder, **keywords):
    a_drafter().save_pretrained(folder, push_to_hub=True, **keywords)


def loaded(repo_id, auto=False, offline=False, **keywords):
    """Its weights' sum, its settings, and whether it drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        drafter = (AutoModel if auto else DSparkModel).from_pretrained(repo_id, **keywords)
    assert isinstance(drafter, DSparkModel)
    target = tiny_target("llama")
    text = target.generate(prompt(5), assistant_model=drafter, max_new_tokens=8, do_sample=False)
    return {
        "equal": torch.equal(text, target.generate(prompt(5), max_new_tokens=8, do_sample=False)),
        "norm": drafter.norm.weight.sum().item(),
        "num_assistant_tokens": drafter.generation_config.num_assistant_tokens,
        "block_size": drafter.config.block_size,
        "auto_map": drafter.config.auto_map,
    }


def push_changed(repo_id, norm, **keywords):
    drafter = a_drafter()
    torch.nn.init.constant_(drafter.norm.weight, norm)
    return drafter.push_to_hub(repo_id, **keywords)


def loaded_as_config(repo_id):
    return type(AutoConfig.from_pretrained(repo_id)).__name__


def inspected(repo_id, **keywords):
    """What is said of a drafter, and whether its weights were fetched for that."""
    rows = inspect(repo_id, **keywords)
    return rows, any(Path(HF_HUB_CACHE).glob(f"*{repo_id.split('/')[1]}/**/*.safetensors"))


def push_converted(repo_id, folder):
    """Push, convert from there, and say what the tokens to speculate are."""
    push(repo_id)
    code, output = run_cli("convert", repo_id, folder, "--to", "speculators")
    assert code == 0, output
    return json.loads((folder / "config.json").read_text())["speculators_config"]["proposal_methods"]


def run_code(code):
    exec(compile(code, "card", "exec"), {})


def run_cli(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    return result.exit_code, result.output


# Round trips


def test_what_is_pushed_is_what_is_loaded(client, server):
    client(push, license="apache-2.0", tags=["maths"], fields={"base_model": "tester/target"})
    files = server.files(NAME)
    assert set(files) == FILES | {".gitattributes"}
    assert server.repositories[NAME].private is False
    assert sum(request.startswith("PUT /lfs/") for request in server.requests) == 1, "weights go by LFS"
    for line in (
        "base_model: tester/target",
        "license: apache-2.0",
        "- maths",
        f'DSparkModel.from_pretrained("{NAME}"',
    ):
        assert line.encode() in files["README.md"]

    server.requests.clear()
    for auto in (False, True):
        found = client(loaded, NAME, auto=auto)
        assert found["equal"] and found["norm"] == 32 and found["num_assistant_tokens"] == 3
    assert client(loaded_as_config, NAME) == "DSparkConfig"
    assert any(request.startswith("GET /lfs/") for request in server.requests)
    assert not any("requires_hf_dspark" in request for request in server.requests), "nothing foreign is run"


def test_the_targets_weights_stay_with_the_target(client, server):
    client(push_bound, "drafter")
    tensors = load(server.files(NAME)["model.safetensors"])
    assert "fc.weight" in tensors and not {"embed_tokens.weight", "lm_head.weight"} & set(tensors)


def test_private_repositories(client, server, tmp_path):
    client(push, private=True)
    assert server.repositories[NAME].private is True
    assert client(loaded, NAME)["equal"]
    with pytest.raises(OSError, match="token"):
        client(loaded, NAME, token=False, cache_dir=tmp_path)


def test_the_code_on_the_card_runs(client, server, tokenizer, tmp_path):
    client(push_target, "target", tokenizer)
    client(push, fields={"base_model": "tester/target"})
    card = server.files(NAME)["README.md"].decode()
    (use,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    client(run_code, use.replace('"Why is the sky blue?"', '"abcdef"').replace("256", "8"))
    (convert,) = re.findall(r"^hf-dspark (convert .*)", card, flags=re.MULTILINE)
    code, output = client(run_cli, *convert.replace(" drafter ", f" {tmp_path / 'drafter'} ").split())
    assert code == 0, output
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    drafter = DSparkModel.from_pretrained(tmp_path / "drafter")  # as a DeepSpec checkpoint
    assert drafter.config.block_size == 5 and drafter.config.has_embed_tokens


def test_a_second_push_replaces_the_first(client, server):
    client(push, max_shard_size="10KB")
    assert "model.safetensors.index.json" in server.files(NAME) and "model.safetensors" not in server.files(NAME)
    assert client(loaded, NAME)["norm"] == 32, "from shards"
    client(push_changed, "drafter", 2.0)
    assert set(server.files(NAME)) == FILES | {".gitattributes"}, "no shards stay behind"
    assert client(loaded, NAME)["norm"] == 64


def test_a_card_that_was_edited_on_the_hub_stays(client, server):
    client(push)
    repository = server.repositories[NAME]
    edited = server.files(NAME)["README.md"].replace(b"# A DSpark drafter", b"# Our drafter")
    repository.commit("main", {**repository.commits[repository.branches["main"]], "README.md": server.store(edited)})
    client(push_changed, "drafter", 2.0)
    assert server.files(NAME)["README.md"] == edited
    assert client(loaded, NAME)["norm"] == 64


def test_a_license_that_was_chosen_on_the_hub_stays(client, server):
    client(push)
    empty = server.store(b"---\nlicense: mit\n---\n")
    server.repositories[NAME].commit("main", {"README.md": empty})
    client(push_changed, "drafter", 2.0)
    assert (
        b"license: mit" in server.files(NAME)["README.md"] and b"# A DSpark drafter" in server.files(NAME)["README.md"]
    )


def test_revisions(client, server):
    client(push)
    first = server.repositories[NAME].branches["main"]
    client(push_changed, "drafter", 2.0, revision="next", commit_message="Twice the norm")
    assert client(loaded, NAME)["norm"] == 32
    assert (
        client(loaded, NAME, revision="next")["norm"] == client(loaded, NAME, auto=True, revision="next")["norm"] == 64
    )
    client(push_changed, "drafter", 3.0)
    assert client(loaded, NAME)["norm"] == 96
    assert client(loaded, NAME, revision=first)["norm"] == 32
    with pytest.raises(OSError, match="nowhere"):
        client(loaded, NAME, revision="nowhere")
    client(push_changed, "drafter", 4.0, create_pr=True)
    assert client(loaded, NAME)["norm"] == 96
    assert client(loaded, NAME, revision="refs/pr/1")["norm"] == 128


def test_subfolders(client, server):
    client(push, fields={"block_size": 4})
    repository = server.repositories[NAME]
    files = repository.commits[repository.branches["main"]]
    repository.commit("main", {f"drafters/small/{path}": entry for path, entry in files.items()})
    for auto in (False, True):
        found = client(loaded, NAME, auto=auto, subfolder="drafters/small")
        assert found["block_size"] == 4 and found["num_assistant_tokens"] == 3
    with pytest.raises(OSError, match=r"config\.json"):
        client(loaded, NAME)


# Folders


def test_a_folder_is_pushed_without_what_is_not_for_others(client, server, tmp_path):
    folder = tmp_path / "run"
    a_drafter().save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps({"steps": 800, "target": "/home/somebody/target"}))
    sets = {"gsm8k": {"greedy": {"acceptance_length": 3.5}}}
    (folder / "eval.json").write_text(json.dumps({"schema_version": 1, "sets": sets}))
    (folder / "data.jsonl").write_text("{}")
    (folder / "speed.png").write_bytes(b"png")
    HardwareProfile().save(folder)
    (folder / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    for name in ("model.safetensors", "loss.png"):
        (folder / "checkpoints" / "checkpoint-1" / name).write_bytes(b"-")
    code, output = client(run_cli, "push", folder, "drafter", "--private", "--license", "mit")
    assert code == 0 and f"{server.url}/{NAME}/commit/" in output
    files = server.files(NAME)
    assert set(files) == FILES | {".gitattributes", "speed.png", "hardware_profile.json"}
    assert b"| steps | 800 |" in files["README.md"] and b"value: 3.5" in files["README.md"]
    assert server.repositories[NAME].private is True
    assert client(loaded, NAME)["equal"]

    edited = (folder / "README.md").read_text().replace("# A DSpark drafter", "# My drafter")
    (folder / "README.md").write_text(edited)
    assert client(run_cli, "push", folder, "drafter")[0] == 0
    assert server.files(NAME)["README.md"].decode() == edited


def push_profile(folder, **keywords):
    try:
        return HardwareProfile.load(folder).push_to_hub(NAME, **keywords)
    except OSError as error:
        return str(error)


def test_a_profile_is_pushed_into_a_drafters_repository(client, server, tmp_path):
    a_drafter().save_pretrained(tmp_path)
    calibration = {"greedy": Calibration.of_temperatures((2.0,) * 5)}
    HardwareProfile(calibration=calibration).save(tmp_path / "other")
    assert "404" in client(push_profile, tmp_path / "other"), "there is no such repository"
    assert client(run_cli, "push", tmp_path, "drafter")[0] == 0
    before = server.files(NAME)
    assert f"{server.url}/{NAME}/commit/" in client(push_profile, tmp_path / "other", commit_message="Calibrated")
    after = server.files(NAME)
    assert after.pop("hardware_profile.json") == (tmp_path / "other" / "hardware_profile.json").read_bytes()
    assert after == before


def test_a_folder_that_holds_no_whole_drafter_is_not_pushed(client, server, tmp_path):
    a_drafter().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "layer_types": None}))
    code, output = client(run_cli, "push", tmp_path, "drafter")
    assert code == 1 and "layers.1" in output
    assert not server.repositories


def test_saving_and_pushing_at_once(client, server, tmp_path):
    client(save_and_push, tmp_path / "drafter", private=True)
    assert set(server.files(NAME)) == FILES | {".gitattributes"}
    assert server.repositories[NAME].private is True
    client(save_and_push, tmp_path / "drafter", repo_id="tester/other")
    assert set(server.files("tester/other")) == FILES | {".gitattributes"}
    assert DSparkModel.from_pretrained(tmp_path / "drafter").generation_config.num_assistant_tokens == 3


# When it does not work


def test_an_interrupted_upload_leaves_everything_as_it_was(client, server, tmp_path):
    client(save_and_push, tmp_path / "drafter")
    local = {file.name: file.read_bytes() for file in (tmp_path / "drafter").iterdir()}
    there = server.files(NAME)
    drafter = a_drafter()
    torch.nn.init.constant_(drafter.norm.weight, 0.5)
    drafter.save_pretrained(tmp_path / "drafter")
    local["model.safetensors"] = (tmp_path / "drafter" / "model.safetensors").read_bytes()
    for step in ("PUT /lfs/", f"POST /api/models/{NAME}/commit"):
        server.fail = step
        code, output = client(run_cli, "push", tmp_path / "drafter", "drafter")
        assert code == 1 and "out of order" in output and "Traceback" not in output
        assert server.files(NAME) == there
        assert {file.name: file.read_bytes() for file in (tmp_path / "drafter").iterdir()} == local
    server.fail = None
    client(run_cli, "push", tmp_path / "drafter", "drafter")
    assert client(loaded, NAME)["norm"] == 16


def test_a_wrong_token(client, server, tmp_path):
    with pytest.raises(OSError, match=r"not pushed to drafter.*Invalid credentials.*`hf auth login`"):
        client(push, token="hf_of_nobody")
    assert not server.repositories
    client(push)
    with pytest.raises(OSError, match="Invalid credentials"):
        client(loaded, NAME, token="hf_of_nobody", cache_dir=tmp_path)


def test_somebody_elses_repository(client):
    with pytest.raises(OSError, match=r"somebody/drafter.*rights"):
        client(push, "somebody/drafter")
    with pytest.raises(OSError, match=r"somebody/drafter.*not a valid model identifier"):
        client(loaded, "somebody/drafter")


def test_a_report_is_read_before_anything_is_sent(client, server, tmp_path):
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(ValueError, match="not a report"):
        client(push, report=tmp_path / "report.json")
    assert not server.requests


def test_a_repository_without_a_drafter(client, tokenizer):
    client(push_target, "target", tokenizer)
    with pytest.raises(ValueError, match="not a drafter"):
        client(loaded, "tester/target")


def test_offline(client, server):
    client(push)
    client(loaded, NAME)
    server.requests.clear()
    assert client(loaded, NAME, offline=True)["equal"], "from the cache"
    assert client(loaded, NAME, local_files_only=True)["num_assistant_tokens"] == 3
    with pytest.raises(OSError, match="couldn't connect"):
        client(loaded, "tester/another", offline=True)
    assert not server.requests
    with pytest.raises(OSError, match="offline mode"):
        client(push_offline, "drafter")


def push_offline(repo_id):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        push(repo_id)


# Without the package


def test_the_stub_asks_for_the_package_and_then_gives_its_classes(client, environment, tmp_path):
    client(push)
    code = f"""
import sys
from transformers import AutoModel

class Absent:
    def find_spec(self, name, *args):
        if name.split(".")[0] == "hf_dspark":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

def refusal(**keywords):
    try:
        AutoModel.from_pretrained("{NAME}", **keywords)
    except Exception as error:
        return error

sys.meta_path.insert(0, Absent())
print(repr(refusal(trust_remote_code=True)))
sys.meta_path.pop(0)
print("hf_dspark" in sys.modules, "trust_remote_code" in str(refusal(trust_remote_code=False)))
drafter = AutoModel.from_pretrained("{NAME}", trust_remote_code=True)
import hf_dspark
print(type(drafter) is hf_dspark.DSparkModel, drafter.generation_config.num_assistant_tokens)
drafter.save_pretrained({str(tmp_path)!r})
"""
    environment = {**environment, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "ImportError('This model is a DSpark drafter. To load it, run `pip install hf-dspark`.')",
        "False True",
        "True 3",
    ]
    assert {file.name for file in tmp_path.iterdir()} == FILES, "no source code is copied along"
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModel"] == "requires_hf_dspark.DSparkModel", "the copy stands on its own"


# Without and with the weights


@pytest.mark.parametrize("shards", [1, 3])
def test_a_drafter_on_the_hub_is_inspected_without_its_weights(client, shards):
    keywords = {} if shards == 1 else {"max_shard_size": "20KB"}
    client(push, "inspected", {"base_model": "org/target"}, revision=f"in-{shards}", **keywords)
    rows, fetched = client(inspected, "tester/inspected", revision=f"in-{shards}")
    assert not fetched
    assert rows["runs here"] == "yes" and rows["made for"] == "org/target"
    count = sum(parameter.numel() for parameter in a_drafter().parameters())
    assert rows["size"].startswith(f"{count:,} parameters")


def test_a_drafter_on_the_hub_is_converted(client, tmp_path):
    assert client(push_converted, NAME, tmp_path / "export")[0]["speculative_tokens"] == 5
