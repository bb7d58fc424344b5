"""How long rounds take by the costs, part by part: times that know no noise, of rounds that really were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch

from hf_dspark.generation.batch_drafter import BatchDrafter
from hf_dspark.generation.candidate_generator import DSparkCandidateGenerator
from hf_dspark.generation.draft_block import DraftBlock
from hf_dspark.scheduling.costs import RoundCosts


@dataclass
class Draft:
    """A draft of so many rows, whose blocks have so many slots, of which the heads have come to so many."""

    rows: int
    slots: int
    heads: int = 0


@dataclass
class Work:
    """The drafts of some rounds, and how many tokens of each row every round had to verify."""

    drafts: list[Draft] = field(default_factory=list)
    verified: list[list[int]] = field(default_factory=list)

    def seconds(self, costs: Callable[[int], RoundCosts]) -> float:
        """What it takes by the costs of so many rows."""
        total = 0.0
        for draft in self.drafts:
            of_rows = costs(draft.rows)
            length = (len(of_rows.verify) - 1) // draft.rows
            total += of_rows.draft_without(rows=length - draft.slots, heads=length - draft.heads)
        for lengths in self.verified:
            of_rows = costs(len(lengths))
            total += of_rows.overhead + of_rows.verify[sum(lengths)]
        return total


@contextmanager
def watched() -> Iterator[Work]:
    """The work of all that is generated in the block. Unlike a trace, this reads nothing that nobody else reads."""
    work = Work()
    begin, advance = DraftBlock.__init__, DraftBlock.advance
    draft, of_batch = DSparkCandidateGenerator.get_candidates, BatchDrafter.draft

    def begin_noted(block: DraftBlock, *arguments) -> None:
        begin(block, *arguments)
        work.drafts.append(Draft(*block._hidden.shape[:2]))

    def advance_noted(block: DraftBlock, *arguments) -> None:
        advance(block, *arguments)
        work.drafts[-1].heads += 1

    def draft_noted(generator: DSparkCandidateGenerator, input_ids: torch.Tensor) -> tuple:
        candidates, scores = draft(generator, input_ids)
        work.verified.append([candidates.shape[1] - input_ids.shape[1]])
        return candidates, scores

    def of_batch_noted(drafter: BatchDrafter, rows: list) -> None:
        of_batch(drafter, rows)
        work.verified.append([row.draft.shape[1] for row in rows])

    with ExitStack() as patches:
        for owner, name, noted in (
            (DraftBlock, "__init__", begin_noted),
            (DraftBlock, "advance", advance_noted),
            (DSparkCandidateGenerator, "get_candidates", draft_noted),
            (BatchDrafter, "draft", of_batch_noted),
        ):
            patches.enter_context(patch.object(owner, name, noted))
        yield work
