"""A hardware profile, measured on prompts and put on the terminal."""

from __future__ import annotations

import torch
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from ..scheduling.profile import Entry, Timing


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> torch.Tensor:
    """Token ids (1, length) of a prompt, in the target's chat template if it has one."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt").input_ids
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]


def summary(entry: Entry) -> Table:
    """All times of an entry, for the terminal."""
    table = Table(title=entry.identity.device + " (estimated)" * entry.estimated)
    table.add_column("work")
    for column in ("rows", "tokens", "depth", "ms", "p10–p90", "repeats"):
        table.add_column(column, justify="right")

    def add(work: str, rows: int, tokens: str, depth: str, time: Timing) -> None:
        low, middle, high = (f"{seconds * 1e3:.2f}" for seconds in (time.p10, time.median, time.p90))
        table.add_row(work, str(rows), tokens, depth, middle, f"{low}–{high}", str(time.count))

    for cell in entry.verify:
        add("verify", cell.rows, str(cell.tokens), str(cell.depth), cell.time)
    for draft in entry.draft:
        parts = {"draft": draft.time, "draft of one slot": draft.first, "heads in a draft": draft.heads}
        parts["overhead"] = entry.overhead if draft.rows == 1 else draft.overhead
        for work, time in parts.items():
            if time is not None:
                add(work, draft.rows, "", "", time)
    return table
