"""
Acceptance lengths on many long answers, in minutes: the target answers all prompts side by side without the drafter,
and the drafts that there would have been are held against what it said.

Every round of whole blocks is gone through as in generation. A draft depends on the text before it alone, so it can be
worked out afterwards, for all places at once. A greedy token is accepted where the answer has the same; a sampled one,
given that the answer has x, with the probability min(1, q(x) / p(x)) that speculative sampling leaves for it.

    python tests/benchmarks/acceptance.py gsm8k.jsonl humaneval.jsonl [--target FOLDER] [--drafter FOLDER] [--limit 80]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from hf_dspark.cli import load_both, named_dtype
from hf_dspark.demo import DRAFTER
from hf_dspark.evaluation.prompts import read_sets
from hf_dspark.taps import TargetTaps
from hf_dspark.training.conversations import answered_anew
from hf_dspark.training.objective import DSparkObjective

LIKELIEST = 1024  # tokens to sample from: all but a trace of the distribution
CHUNK = 64  # anchors whose logits are in memory at a time


@dataclass
class Count:
    """Rounds and committed tokens of a set, and how often each slot was reached and accepted."""

    tokens: int = 0
    rounds: int = 0
    reached: list[int] = field(default_factory=lambda: [0] * 64)
    accepted: list[int] = field(default_factory=lambda: [0] * 64)

    def walk(self, accepts: torch.Tensor) -> None:
        """Go through an answer round by round; `accepts` (T, γ) says what a block at each of its tokens would do."""
        place = 0
        while place < len(accepts):
            count = 0
            for slot, accepted in enumerate(accepts[place, : len(accepts) - place - 1].tolist()):
                self.reached[slot] += 1
                if not accepted:
                    break
                self.accepted[slot] += 1
                count += 1
            self.tokens += count + 1
            self.rounds += 1
            place += count + 1


def load(target: str, drafter: str | None, dtype: str) -> tuple:
    """The target, its tokenizer, and the objective of the drafter, which knows what blocks at all places are like."""
    model, tokenizer, draft_model = load_both(target, drafter or DRAFTER, named_dtype(dtype))
    draft_model.bind(model)
    return model, tokenizer, DSparkObjective(draft_model).eval()


def blocks(
    objective: DSparkObjective, ids: torch.Tensor, features: torch.Tensor, prompt_length: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Some tokens (n,) of an answer at a time, and the hidden states (n, B, H) of the blocks that start there."""
    for anchors in torch.arange(prompt_length, ids.shape[1] - 1, device=ids.device).split(CHUNK):
        yield anchors, objective._block_hidden(ids, features, anchors[None])[0]


def chances(objective: DSparkObjective, target: PreTrainedModel, row: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """
    For a block that starts at each token of an answer but the last, (T, γ) each: whether its greedy draft is what the
    answer has, and min(1, q(x) / p(x)).
    """
    drafter = objective.drafter
    ids = torch.tensor([row["input_ids"]], device=target.device)
    with TargetTaps(target, drafter.config.target_layer_ids) as taps:
        log_p = target(ids, use_cache=False).logits[0].float().log_softmax(-1)
        features = taps.take(drafter.device, drafter.dtype)
    log_p = log_p[:-1].gather(-1, ids[0, 1:, None])[:, 0]  # of each next token
    copied = drafter.copy_head.find_all(ids[0]) if drafter.copy_head is not None else None
    parts = []
    slots = torch.arange(drafter.config.num_draft_tokens, device=ids.device)
    for anchors, hidden in blocks(objective, ids, features, row["prompt_length"]):
        hidden = hidden[:, -len(slots) :]
        places = (anchors[:, None] + slots).clamp(max=ids.shape[1] - 2)
        logits = drafter.base_logits(hidden)
        if drafter.markov_head is not None:
            head = drafter.markov_head
            logits = head.logits(logits, head.unroll(head.embed(ids[0, places]), hidden))
        if copied is not None:
            token, repeated = (found[places] for found in copied)
            logits = drafter.copy_head.logits(logits, drafter.draft_ids_of(token), repeated)
        log_q = logits.float().log_softmax(-1)
        said = drafter.draft_ids_of(ids[0, places + 1])
        mine = log_q.gather(-1, said.clamp(min=0)[..., None])[..., 0].masked_fill(said < 0, -torch.inf)
        parts.append((log_q.argmax(-1) == said, (mine - log_p[places]).exp().clamp(max=1)))
    same, chance = (torch.cat(of_chunks) for of_chunks in zip(*parts))
    return same, chance


def answers(target, tokenizer, sets, temperature: float, max_new_tokens: int) -> Iterator[tuple[str, dict]]:
    """The answers to all prompts, each with its set, as they are finished."""
    asked = [(name, messages) for name, conversations in sets.items() for messages in conversations]
    rows = answered_anew(
        target,
        tokenizer,
        [(number, messages) for number, (_, messages) in enumerate(asked)],
        temperatures=(temperature,),
        max_new_tokens=max_new_tokens,
        top_k=LIKELIEST if temperature else 1,
    )
    for row in rows:
        yield asked[row["conversation"]][0], row


@torch.no_grad()
def main(
    prompts: list[Path],
    target: str = "smollm2",
    drafter: str | None = None,
    limit: int = 80,
    max_new_tokens: int = 256,
    dtype: str = "float32",
) -> None:
    model, tokenizer, objective = load(target, drafter, dtype)
    sets = read_sets(prompts, limit)
    torch.manual_seed(0)
    slots = objective.drafter.config.num_draft_tokens
    table = Table("set", "temperature", "tokens", "acceptance length", *(f"slot {k + 1}" for k in range(slots)))
    for temperature in (0.0, 1.0):
        counts: dict[str, Count] = defaultdict(Count)
        for name, row in answers(model, tokenizer, sets, temperature, max_new_tokens):
            if len(row["input_ids"]) - row["prompt_length"] < 2:
                continue
            same, chance = chances(objective, model, row)
            counts[name].walk(same if temperature == 0 else torch.rand_like(chance) < chance)
        for name in sets:
            count = counts[name]
            by_slot = (f"{a / max(r, 1):.2f}" for a, r in zip(count.accepted[:slots], count.reached))
            length = f"{count.tokens / max(count.rounds, 1):.3f}"
            table.add_row(name, f"{temperature:g}", f"{count.tokens:,}", length, *by_slot)
        mean = sum(count.tokens / max(count.rounds, 1) for count in counts.values()) / max(len(counts), 1)
        table.add_row("mean", f"{temperature:g}", "", f"{mean:.3f}", *[""] * slots, end_section=True)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
