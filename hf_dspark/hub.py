"""What surrounds a drafter's weights on the Hub: its model card, and a stub for those who lack this package."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCardData, metadata_load
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError
from huggingface_hub.utils import is_jinja_available, validate_repo_id
from transformers import PreTrainedModel
from transformers.utils import logging

from .checkpoints import obstacle, read_config, tensor_shapes
from .checkpoints.translation import causal_layers, sliding_layers
from .compat import HTTPError
from .configuration_dspark import DSparkConfig
from .files import write_text
from .scheduling.profile import PROFILE
from .version import __version__

logger = logging.get_logger(__name__)

TEMPLATES = Path(__file__).parent / "templates"
STUB = "requires_hf_dspark.py"
AUTO_MAP = {"AutoConfig": "requires_hf_dspark.DSparkConfig", "AutoModel": "requires_hf_dspark.DSparkModel"}

CARD = "README.md"
REPORT = "eval.json"
TRAINING = "training.json"
WEIGHTS = "model*.safetensors*"
# What of a drafter's folder goes to the Hub; its records are in the card, training state and data stay where they are.
PUBLIC = (CARD, STUB, "config.json", "generation_config.json", PROFILE, WEIGHTS, "LICENSE*", "*.png", "*.svg")

TAGS = ("dspark", "speculative-decoding", "drafter")
MODES = {"greedy": "greedy", "sample": "sampled"}
COLUMNS = {"acceptance_length": ".2f", "tokens_per_second": ".1f", "plain_tokens_per_second": ".1f", "speedup": ".2f"}
CURVE_ROWS = 20


def repository_of(model: PreTrainedModel) -> str | None:
    """The Hub repository that a model was loaded from, or `None` if it came from a folder."""
    try:
        validate_repo_id(model.name_or_path)
    except HFValidationError:
        return None
    return None if Path(model.name_or_path).exists() else model.name_or_path


# Records beside the weights


def read_report(path: str | os.PathLike) -> dict:
    """
    The report that `hf-dspark eval --json` wrote, without this machine's paths.

    Raises:
        ValueError: the file is no such report.
    """
    report = _read_record(path)
    try:
        if report["schema_version"] != 1:
            raise ValueError(f"its schema_version is {report['schema_version']}, this package reads 1")
        modes = [(name, mode, result) for name, found in report["sets"].items() for mode, result in found.items()]
        if not any(mode in MODES for _, mode, _ in modes):
            raise ValueError("it has no set with a greedy or a sampled result")
        for name, mode, result in modes:
            if mode in MODES and not isinstance(result["acceptance_length"], (int, float)):
                raise ValueError(f"the acceptance_length of {name}, {mode}, is {result['acceptance_length']!r}")
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a report of `hf-dspark eval --json`: {reason}.") from error
    return report


def _read_record(path: str | os.PathLike) -> dict:
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file: {error}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return _without_paths(record)


def keep_report(folder: str | os.PathLike, report: dict | None) -> None:
    """Put `report` beside the weights it is about, in the place of one about weights that were there before."""
    file = Path(folder) / REPORT
    if report is not None:
        write_text(file, json.dumps(report, indent=2))
    elif file.exists():
        file.replace(file.with_stem(f"{file.stem}.previous"))


# A path from the root (of a drive) or from the home folder, but not the path of a URL or of a relative name.
_LOCAL_PATH = re.compile(
    r"""(?<![\w.:/\\])(?:file://)?(?:~?/|[A-Za-z]:[/\\])(?:[^\s'"/\\]+[/\\])*([^\s'"/\\]+)[/\\]?"""
)


def _without_paths(value: Any) -> Any:
    """`value` with every local path in it cut down to its last part."""
    if isinstance(value, str):
        return _LOCAL_PATH.sub(r"\1", value)
    if isinstance(value, dict):
        return {name: _without_paths(item) for name, item in value.items()}
    return [_without_paths(item) for item in value] if isinstance(value, list) else value


# The card


def model_card(
    folder: str | os.PathLike,
    repository: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
) -> str:
    """
    The card of the drafter in `folder`, from its config, its weights, and its `training.json` and `eval.json` if it
    has them.

    Args:
        repository: where the drafter is or will be on the Hub (default: the folder's name).
        base_model: the target's repository on the Hub, if the config does not say.
        license: one of the Hub's license identifiers.
        tags: more tags than a drafter has anyway.

    Raises:
        ValueError: one of the records is not what it should be.
    """
    import jinja2

    folder = Path(folder)
    config = DSparkConfig.from_dict(read_config(folder))
    if base_model is not None:
        config = DSparkConfig.from_dict(config.to_dict() | {"base_model": base_model})
    repository = repository or folder.resolve().name
    report = read_report(folder / REPORT) if (folder / REPORT).exists() else {"sets": {}}
    training = _read_record(folder / TRAINING) if (folder / TRAINING).exists() else {}
    results = [
        (name, MODES[mode], _in_whole_blocks(found[mode]))
        for name, found in report["sets"].items()
        for mode in MODES
        if mode in found
    ]
    metadata = ModelCardData(
        base_model=config.base_model,
        library_name="hf_dspark",
        pipeline_tag="text-generation",
        license=license,
        tags=[*TAGS, *tags],
        model_name=repository.split("/")[-1],
        eval_results=_eval_results(results) or None,
    )
    template = jinja2.Template(
        (TEMPLATES / "model_card.md").read_text(encoding="utf-8"), trim_blocks=True, lstrip_blocks=True
    )
    text = template.render(
        metadata=metadata.to_yaml(),
        target=config.base_model,
        repository=repository,
        config=config,
        obstacles=_obstacles(config),
        export_format=_export_format(config),
        for_sglang=config.backbone == "qwen3" and _export_format(config) == "deepspec",
        architecture=_architecture(config, tensor_shapes(folder)),
        results=[
            [_cell(name), mode, _cell(result.get("prompts")), *(_cell(result.get(c), f) for c, f in COLUMNS.items())]
            for name, mode, result in results
        ],
        conditions=[
            f"{_words(name)} {_cell(value)}"
            for part in ("settings", "machine")
            for name, value in (report.get(part) or {}).items()
        ],
        command=training.get("command"),
        recipe={_words(k): _cell(v) for k, v in training.items() if k not in ("command", "curve")},
        curve=_curve(training.get("curve")),
    )
    return _signed(text + "\n")


def _in_whole_blocks(result: dict) -> dict:
    """A result with the acceptance length of whole blocks, which is the drafter's own, not its scheduler's."""
    whole = (result.get("full_blocks") or {}).get("acceptance_length")
    return result if whole is None else result | {"acceptance_length": whole}


def _eval_results(results: Sequence[tuple[str, str, dict]]) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=name,
            dataset_name=name,
            metric_type=metric,
            metric_name=f"{_words(metric)}, {mode}",
            metric_value=round(result[metric], 3),
        )
        for name, mode, result in results
        for metric in ("acceptance_length", "speedup")
        if _is_finite(result.get(metric))
    ]


def _architecture(config: DSparkConfig, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    own = [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" in shapes]
    head = f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none"
    longest = config.copy_ngram_size
    if config.selector_rank:
        head = f"candidate selector, rank {config.selector_rank}, top {config.selector_top_k}"
    return {
        "parameters": f"{sum(math.prod(shape) for name, shape in shapes.items() if name != 'd2t'):,}",
        "draft layers": str(config.num_hidden_layers),
        "tokens drafted at once": str(config.num_draft_tokens),
        "sequential head": head,
        **({"copy head": f"copies behind repetitions of up to {longest} tokens"} if longest else {}),
        "confidence head": "yes" if config.enable_confidence_head else "no",
        "target layers read": ", ".join(map(str, config.target_layer_ids)),
        "draft vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens",
        "embeddings": "its own" if "embed_tokens" in own else "the target's",
        "output head": "its own" if "lm_head" in own else "the target's",
    }


def _export_format(config: DSparkConfig) -> str:
    """The format in which other engines take this drafter: DeepSpec's has no pruned vocabulary."""
    return "speculators" if config.draft_vocab_size < config.vocab_size else "deepspec"


def _obstacles(config: DSparkConfig) -> list[str]:
    """What keeps vLLM from drafting with an export of this drafter as it is meant."""
    name = _export_format(config)
    if (reason := obstacle(name, config)) is not None:
        return [reason.rstrip(".")]
    causal, sliding = causal_layers(config), sliding_layers(config)
    found = {
        "vLLM's `dspark` method is for drafters with a sequential head, which this one lacks": not config.markov_rank,
        f"its sequential head is {config.markov_head_type}, vLLM knows the vanilla one": bool(config.markov_rank)
        and config.markov_head_type != "vanilla",
        "vLLM takes the blocks of sliding layers for causal, which they are not here": name == "speculators"
        and causal != sliding,
    }
    return [words for words, is_there in found.items() if is_there]


def _curve(points: list[dict] | None) -> list[list[str]]:
    """Header and rows of at most `CURVE_ROWS` points, the last one among them."""
    if not points:
        return []
    columns = list(dict.fromkeys(name for point in points for name in point))
    kept = points[:: -math.ceil(len(points) / CURVE_ROWS)][::-1]
    styles = {name: ".2f" if name.endswith("acceptance_length") else None for name in columns}
    rows = [[_cell(point.get(name), style) for name, style in styles.items()] for point in kept]
    return [[_words(name) for name in columns], *rows]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _cell(value: Any, style: str | None = None) -> str:
    """`value` as it stands in a Markdown table."""
    if value is None or (style and not _is_finite(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "; ".join(f"{_words(name)} {_cell(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if isinstance(value, (int, float)):
        return format(value, style or ("," if isinstance(value, int) else ".4g"))
    return " ".join(str(value).split()).replace("|", "\\|")


_SIGNATURE = re.compile(r"\n<!-- Written by hf_dspark [^ ]+ \((\w+)\); once edited, it is left as it is\. -->\n*\Z")


def _signed(card: str) -> str:
    return (
        f"{card}\n<!-- Written by hf_dspark {__version__} ({_digest(card)}); once edited, it is left as it is. -->\n"
    )


def _digest(card: str) -> str:
    return hashlib.sha256(card.encode()).hexdigest()[:16]


def is_edited(card: str | os.PathLike) -> bool:
    """Whether somebody wrote or changed the card in this file; one with nothing but metadata does not count."""
    if not Path(card).exists():
        return False
    text = Path(card).read_text(encoding="utf-8")
    signature = _SIGNATURE.search(text)
    if signature is None:
        return bool(re.sub(r"\A\s*---\n.*?\n---\s*", "", text, flags=re.DOTALL).strip())
    return signature[1] != _digest(text[: signature.start()])


def _metadata(card: str | Path) -> dict:
    return (metadata_load(card) or {}) if Path(card).exists() else {}


def write_card(
    folder: str | os.PathLike,
    repository: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
) -> None:
    """
    Write [`model_card`] as `README.md` in `folder`, unless there is one that somebody has edited.

    What the old card says of base model and license stays if nothing else is given. Without jinja2 nothing is written.
    """
    file = Path(folder) / CARD
    if is_edited(file):
        logger.warning(f"{file} has been edited and stays as it is. Delete it to have it written anew.")
        return
    if not is_jinja_available():
        logger.warning("No model card is written without jinja2: `pip install 'hf-dspark[report]'`.")
        return
    old = _metadata(file)
    base_model = base_model or read_config(folder).get("base_model") or old.get("base_model")
    write_text(file, model_card(folder, repository, base_model, license or old.get("license"), tags))


# The Hub


def push(
    folder: str | os.PathLike,
    repo_id: str,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    **card_arguments,
) -> str:
    """
    Upload the drafter in `folder` with its card. The repository is made if it is not there; weights that it held
    before are replaced, a card in it that somebody has edited is left alone.

    Args:
        repo_id: `name`, or `organization/name`.
        private: whether a new repository is private (default: as the organization has it).
        revision: a branch, made if it is not there (default: `main`).
        create_pr: open a pull request instead of committing.
        card_arguments: `base_model`, `license` and `tags`, as [`model_card`] takes them.

    Returns:
        The address of the commit.

    Raises:
        OSError: the Hub refused, or could not be reached.
    """
    api = HfApi(library_name="hf_dspark", library_version=__version__, token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        theirs = None
        with suppress(RemoteEntryNotFoundError):
            theirs = api.hf_hub_download(repo_id, CARD, revision=revision)
        if theirs and not card_arguments.get("license"):
            card_arguments["license"] = _metadata(theirs).get("license")
        write_card(folder, repo_id, **card_arguments)
        keep_theirs = theirs and is_edited(theirs) and not is_edited(Path(folder) / CARD)
        commit = api.upload_folder(
            folder_path=Path(folder),
            repo_id=repo_id,
            allow_patterns=list(PUBLIC),
            ignore_patterns=["*/*", *([CARD] if keep_theirs else [])],
            delete_patterns=WEIGHTS,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message or "Upload DSpark drafter",
            commit_description=commit_description,
        )
    except (HTTPError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        reason = getattr(cause, "server_message", None) or cause
        refused = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
        advice = " Log in with `hf auth login`, or pass a `token` that may write there." if refused else ""
        raise OSError(f"The drafter was not pushed to {repo_id} at {api.endpoint}: {reason}.{advice}") from error
    return str(commit)
