"""Sets of prompts: what they are read from, and what is no prompt."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

Conversation = list[dict[str, str]]

RANDOM_TOKENS = (
    "Acceptance on random tokens says nothing about text: what a target makes of them is far easier or harder to "
    "draft. Use prompts that somebody wrote."
)
SHORTEST, LONGEST = 32, 64  # tokens of a prompt that tell whether it is text; of shorter ones it is taken for granted
RANDOM_SHARE = 0.75  # of the surprise at uniformly drawn tokens; text of any kind, code and tables too, is below half


def read_sets(files: list[Path], limit: int | None = None) -> dict[str, list[Conversation]]:
    """
    [`read_prompts`] of every file, by the file's name.

    Raises:
        ValueError: two sets would have the same name, or a file cannot be read as prompts.
    """
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        raise ValueError(f"The file names sets; rename one of two that are called the same: {', '.join(names)}.")
    return {file.stem: read_prompts(file, limit) for file in files}


def read_prompts(path: str | os.PathLike, limit: int | None = None) -> list[Conversation]:
    """
    The first `limit` conversations of a jsonl file with rows `{"messages": [...]}` or `{"prompt": "..."}`.

    Raises:
        ValueError: a row is neither, or there is none.
    """
    conversations: list[Conversation] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if len(conversations) == limit:
            break
        if line.strip():
            try:
                conversations.append(_conversation(json.loads(line)))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not conversations:
        raise ValueError(f'{path} holds no prompts. Write rows {{"messages": [...]}} or {{"prompt": "..."}}.')
    return conversations


def _conversation(row: object) -> Conversation:
    if not isinstance(row, dict):
        raise ValueError(f"a row is an object with `messages` or `prompt`, not {type(row).__name__}.")
    if "messages" in row:
        messages = row["messages"]
        if not messages or not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ValueError('`messages` is a list of {"role": "...", "content": "..."}, in words.')
        return messages
    if isinstance(row.get("prompt"), str) and row["prompt"].strip():
        return [{"role": "user", "content": row["prompt"]}]
    if "input_ids" in row or isinstance(row.get("prompt"), list):
        raise ValueError(f"token ids instead of text. {RANDOM_TOKENS}")
    raise ValueError(f"a row needs `messages`, or `prompt` in words; it has {sorted(row)}.")


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(part), str) for part in ("role", "content"))


def check_text(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sets: dict[str, list[Conversation]]
) -> None:
    """
    Refuse prompts that are random tokens: those that surprise the target about as much as tokens drawn uniformly from
    its vocabulary do, by the mean negative log likelihood of its own forward pass.

    Raises:
        ValueError: which prompt is no text; or that the target has no chat template to put prompts in.
    """
    if tokenizer.chat_template is None:
        raise ValueError("The target's tokenizer has no chat template, which says how prompts are put to the target.")
    generator = torch.Generator().manual_seed(0)
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    at_random = surprise(target, torch.randint(vocabulary, (1, LONGEST), generator=generator))
    for name, conversations in sets.items():
        for number, messages in enumerate(conversations, 1):
            text = "\n".join(message["content"] for message in messages)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[:, :LONGEST]
            if ids.shape[1] >= SHORTEST and (found := surprise(target, ids)) > RANDOM_SHARE * at_random:
                raise ValueError(
                    f"Prompt {number} of {name} looks like random tokens: it surprises the target ({found:.1f} nats a "
                    f"token) about as much as tokens drawn at random ({at_random:.1f}). {RANDOM_TOKENS}"
                )


@torch.no_grad()
def surprise(target: PreTrainedModel, input_ids: torch.Tensor) -> float:
    """Mean negative log likelihood, in nats, of the tokens (1, n) after the first."""
    input_ids = input_ids.to(target.device)
    log_probabilities = target(input_ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return -log_probabilities.gather(-1, input_ids[:, 1:, None].to(log_probabilities.device)).mean().item()
