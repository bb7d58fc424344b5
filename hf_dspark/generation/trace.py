"""A record of what a drafter did, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..modeling_dspark import DSparkModel


@dataclass
class Seconds:
    """
    Where the time of a round went.

    Args:
        draft: the backbone's pass over the block, with the output head.
        head: the sequential and confidence heads, processors and choice of every draft token.
        verify: the target's forward pass over the draft.
        rest: everything else: judging the draft, stopping criteria, caches, arguments.
    """

    draft: float = 0.0
    head: float = 0.0
    verify: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        return self.draft + self.head + self.verify + self.rest

    def share(self, rows: int) -> Seconds:
        """What of this one of so many rows takes."""
        return Seconds(self.draft / rows, self.head / rows, self.verify / rows, self.rest / rows)


@dataclass
class Round:
    """
    One draft and its verification.

    Args:
        draft: the token ids sent to verification.
        confidence: the predicted probability of each to be accepted given that those before it were; empty without a
            confidence head.
        accepted: how many were accepted and followed by one more token.
        ended: whether the text ended with an accepted draft token, which `accepted` does not count; nothing was said
            of the drafts behind it.
        seconds: where the time went; in a batch, this row's share.
        row: whose it is in a batch.
    """

    draft: list[int]
    confidence: list[float] = field(default_factory=list)
    accepted: int = 0
    ended: bool = False
    seconds: Seconds = field(default_factory=Seconds)
    row: int = 0


class Clock:
    """
    Says where the time of a round goes. Only a running clock waits for the accelerators, at the end of each part.

    Args:
        devices: those that the parts run on.
        running: whether anybody wants to know.
    """

    def __init__(self, devices: Iterable[torch.device], running: bool):
        self._devices = {device for device in devices if device.type not in ("cpu", "meta")} if running else set()
        self._running = running
        self.restart()

    def restart(self) -> None:
        """Begin a round."""
        self.seconds, self._begin = Seconds(), time.perf_counter()
        self._last = self._begin

    def elapsed(self) -> float:
        """Seconds since the round began; known of every clock, running or not."""
        return time.perf_counter() - self._begin

    def lap(self, part: Literal["draft", "head", "verify", "rest"]) -> None:
        """Count the time since the last lap as `part` of the round's `seconds`."""
        if not self._running:
            return
        for device in self._devices:
            torch.accelerator.synchronize(device)
        now = time.perf_counter()
        setattr(self.seconds, part, getattr(self.seconds, part) + now - self._last)
        self._last = now


def round_of(
    draft: list[int], confidence: list[float], accepted: int, last: float, seconds: Seconds, row: int = 0
) -> Round:
    """The round that ended with the token `last` after so many accepted ones; that token may be a draft itself."""
    ended = accepted < len(draft) and draft[accepted] == last
    return Round(draft, confidence[: len(draft)], accepted, ended, seconds, row)


@contextmanager
def trace(drafter: DSparkModel) -> Iterator[list[Round]]:
    """Collect every round of the `generate()` calls made inside the `with` block; yields the list they go to."""
    outer, drafter.rounds = drafter.rounds, []
    try:
        yield drafter.rounds
    finally:
        drafter.rounds = outer


def acceptance_length(rounds: list[Round]) -> float:
    """Mean number of tokens that a verification commits: the accepted drafts and the target's own token."""
    return sum(1 + a_round.accepted for a_round in rounds) / max(len(rounds), 1)
