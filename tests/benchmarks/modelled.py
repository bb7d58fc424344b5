"""How long rounds take by the costs, part by part: times that know no noise, of rounds that really were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from unittest.mock import patch

from hf_dspark.generation.draft_block import DraftBlock
from hf_dspark.generation.trace import Round
from hf_dspark.scheduling.costs import RoundCosts


@dataclass
class Draft:
    """A draft of so many rows, whose blocks have so many slots, of which the heads have come to so many."""

    rows: int
    slots: int
    heads: int = 0


@contextmanager
def watched_drafts() -> Iterator[list[Draft]]:
    """The drafts of all that is generated in the block."""
    drafts: list[Draft] = []
    begin, advance = DraftBlock.__init__, DraftBlock.advance

    def begin_noted(block: DraftBlock, *arguments) -> None:
        begin(block, *arguments)
        drafts.append(Draft(*block._hidden.shape[:2]))

    def advance_noted(block: DraftBlock, *arguments) -> None:
        advance(block, *arguments)
        drafts[-1].heads += 1

    with patch.object(DraftBlock, "__init__", begin_noted), patch.object(DraftBlock, "advance", advance_noted):
        yield drafts


def modelled_seconds(drafts: Sequence[Draft], rounds: Sequence[Round], costs: Callable[[int], RoundCosts]) -> float:
    """What `drafts` and the `rounds` of their trace take by the costs of so many rows."""
    total = 0.0
    for draft in drafts:
        of_rows = costs(draft.rows)
        length = (len(of_rows.verify) - 1) // draft.rows
        total += of_rows.draft_without(rows=length - draft.slots, heads=length - draft.heads)
    for _, together in groupby(rounds, key=lambda a_round: id(a_round.seconds)):  # the rows of a batch share theirs
        lengths = [len(a_round.draft) for a_round in together]
        of_rows = costs(len(lengths))
        total += of_rows.overhead + of_rows.verify[sum(lengths)]
    return total
