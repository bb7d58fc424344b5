"""Training data: shards of token ids that a target wrote, beside the settings they were written with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset, load_dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..files import write_text
from .conversations import answered_anew, self_written

SETTINGS = "settings.json"
SHARD_ROWS = 4096


def write_data(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | os.PathLike,
    prompts: str | os.PathLike | None = None,
    split: str = "train",
    tokens: int | None = None,
    **sampling,
) -> int:
    """
    Let the target write training data into `folder`, going on from what is there.

    Args:
        folder: where `shard-*.jsonl` (rows with `input_ids`, `prompt_length`, `temperature`) and `settings.json` go.
        prompts: a jsonl file or the name of a data set whose conversations the target answers anew (see
            [`conversations_of`]); without it, the target writes the questions, too.
        split: the split of the data set.
        tokens: how many tokens the folder shall hold, by default all that the prompts give.
        sampling: arguments of [`self_written`] or [`answered_anew`].

    Under `accelerate launch` every process writes its share of the data. Returns how many tokens the shards of this
    process hold.

    Raises:
        ValueError: the folder holds data of other settings, or neither `prompts` nor `tokens` says where to end.
    """
    if prompts is None and tokens is None:
        raise ValueError("Say how many `tokens` to write, or give `prompts` to answer.")
    state, folder = PartialState(), Path(folder)
    settings = {"target": Path(target.name_or_path).name, "prompts": prompts and Path(prompts).name, "split": split}
    with state.main_process_first():
        _check_settings(folder, {**settings, "processes": state.num_processes, **sampling})
    shards = Shards(folder, state.process_index)
    goal = None if tokens is None else -(-tokens // state.num_processes)
    seed = sampling.pop("seed", 0)
    if prompts is None:
        known = {tuple(row["input_ids"][: row["prompt_length"]]) for row in shards.rows()}
        seed += 1_000_003 * state.process_index + shards.num_rows  # other words than those that are there
        rows = self_written(target, tokenizer, seed=seed, known=known, **sampling)
    else:
        done = {row["conversation"] for row in shards.rows()}
        mine = list(enumerate(conversations_of(prompts, split)))[state.process_index :: state.num_processes]
        rest = [(number, messages) for number, messages in mine if number not in done]
        rows = answered_anew(target, tokenizer, rest, seed=seed, **sampling)
    by_token = goal is not None
    with tqdm(
        desc=f"Writing {folder}",
        unit=" tokens" if by_token else " conversations",
        total=goal if by_token else len(mine),
        initial=shards.num_tokens if by_token else len(mine) - len(rest),
        disable=not state.is_local_main_process,
    ) as progress:
        while not by_token or shards.num_tokens < goal:
            row = next(rows, None)
            if row is None:
                break
            shards.append(row)
            progress.update(len(row["input_ids"]) if by_token else 1)
    return shards.num_tokens


def conversations_of(source: str | os.PathLike, split: str = "train") -> Iterator[list[dict[str, str]]]:
    """
    The conversations of a jsonl file or a data set, each once: rows with `messages` or `conversations` (a list of
    `role` and `content`, or of `from` and `value`), or with a `prompt`.

    Raises:
        ValueError: the rows have none of these.
    """
    if Path(source).suffix in (".json", ".jsonl"):
        dataset = load_dataset("json", data_files=str(source), split="train")
    else:
        dataset = load_dataset(str(source), split=split)
    column = next((name for name in ("messages", "conversations", "prompt") if name in dataset.column_names), None)
    if column is None:
        raise ValueError(
            f"{source} has the columns {dataset.column_names}; one of `messages`, `conversations`, `prompt` is needed."
        )
    seen = set()
    for value in dataset[column]:
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else [_message(m) for m in value]
        said = json.dumps([message for message in messages if message["role"] != "assistant"])
        if said not in seen:
            seen.add(said)
            yield messages


def _message(message: dict[str, str]) -> dict[str, str]:
    role = message.get("role") or message["from"]
    return {
        "role": {"human": "user", "gpt": "assistant"}.get(role, role),
        "content": message["content"] if "content" in message else message["value"],
    }


def load_data(path: str | os.PathLike) -> Dataset:
    """
    The rows of a folder that [`write_data`] wrote, or of a jsonl file with `input_ids`.

    Raises:
        ValueError: there are none.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.glob("shard-*.jsonl"))
    if not files:
        raise ValueError(f"{path} holds no `shard-*.jsonl`; write some with `hf-dspark data`.")
    # The sizes are for the cache of `datasets`: a shard that has grown is read anew.
    files_and_sizes = [(str(file), file.stat().st_size) for file in files]
    rows = Dataset.from_generator(_whole_rows, gen_kwargs={"files": files_and_sizes})
    if "input_ids" not in rows.column_names:
        raise ValueError(f"{path} has the columns {rows.column_names}, but no `input_ids`; see `hf-dspark data`.")
    return rows


def _whole_rows(files: list[tuple[str, int]]) -> Iterator[dict]:
    """The rows of jsonl files, without a last line that is still being written, or never was to its end."""
    for name, _ in files:
        with open(name, encoding="utf-8") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    if line.endswith("\n"):
                        raise
                    continue
                row.pop("conversation", None)  # so that self-written shards and answers to prompts mix
                yield row


class Shards:
    """The shards of one process: rows are appended as they come, and a file of `SHARD_ROWS` rows is full."""

    def __init__(self, folder: Path, process: int):
        self.folder, self.process = folder, process
        self.num_rows = self.num_tokens = 0
        for file in self.files():
            self._cut_off_unfinished_line(file)
        for row in self.rows():
            self._count(row)

    def files(self) -> list[Path]:
        return sorted(self.folder.glob(f"shard-{self.process:03d}-*.jsonl"))

    def rows(self) -> Iterator[dict]:
        for file in self.files():
            with file.open() as lines:
                yield from map(json.loads, lines)

    def append(self, row: dict) -> None:
        file = self.folder / f"shard-{self.process:03d}-{self.num_rows // SHARD_ROWS:05d}.jsonl"
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        self._count(row)

    @staticmethod
    def _cut_off_unfinished_line(file: Path) -> None:
        with file.open("rb+") as lines:
            end = lines.seek(0, os.SEEK_END)
            while end and (lines.seek(end - 1), lines.read(1))[1] != b"\n":
                end -= 1
            lines.truncate(end)

    def _count(self, row: dict) -> None:
        self.num_rows += 1
        self.num_tokens += len(row["input_ids"])


def _check_settings(folder: Path, settings: dict) -> None:
    """Write the settings beside the data, or hold them against those that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads(json.dumps(settings))
    file = folder / SETTINGS
    if not file.exists():
        write_text(file, json.dumps(settings, indent=2) + "\n")
        return
    theirs = json.loads(file.read_text())
    wrong = [
        f"{name} was {theirs.get(name)!r}, not {value!r}"
        for name, value in settings.items()
        if theirs.get(name) != value
    ]
    if wrong:
        raise ValueError(f"{folder} holds data of other settings: {'; '.join(wrong)}. Choose another folder.")
