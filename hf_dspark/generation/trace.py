"""A record of what a drafter did, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.nn import functional as F
from transformers import LogitsProcessorList

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

    def scaled(self, factor: float) -> Seconds:
        """So many times this: from all rows of a batch to each, or back."""
        return Seconds(self.draft * factor, self.head * factor, self.verify * factor, self.rest * factor)


Alternatives = list[tuple[int, float]]  # token ids and their probabilities, the most likely first


@dataclass
class Details:
    """
    What a trace with alternatives says more about a round. The alternatives of a slot are its most likely tokens after
    the request's processors and, however unlikely, those that were drafted and committed there.

    Args:
        anchor: position of the anchor in the sequence.
        drafted: all token ids that were drafted; those that `Round.draft` lacks were cut by the scheduler.
        confidence: of each of them, and of the token that a scheduler stopped at, if one did.
        drafter: the drafter's alternatives in the slot of each drafted token.
        target: the target's alternatives in the slots of `Round.draft`, each given the drafts before it, and in the
            one behind them.
        token: the id that the round committed last: the target's own, or the draft token that ended the text.
    """

    anchor: int
    drafted: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    drafter: list[Alternatives] = field(default_factory=list)
    target: list[Alternatives] = field(default_factory=list)
    token: int = -1

    def add_draft(self, draft: torch.Tensor, scores: list[torch.Tensor], confidence: list[float], count: int) -> None:
        """Note a draft (1, ℓ), the processed scores (1, V) of each token, and `count` alternatives to it."""
        self.drafted, self.confidence = draft[0].tolist(), confidence
        self.drafter = [likely(score, count, token) for score, token in zip(scores, self.drafted)]

    def add_verdict(
        self,
        input_ids: torch.Tensor,
        draft: torch.Tensor,
        accepted: int,
        logits: torch.Tensor,
        logits_processor: LogitsProcessorList,
        count: int,
    ) -> None:
        """Note what the target said to `draft` (1, ℓ): its logits (1, ℓ + 1, V), and the text (1, length) since."""
        self.token = int(input_ids[0, -1])
        text = torch.cat([input_ids[:, : self.anchor + 1], draft], dim=-1)
        for k in range(logits.shape[1]):
            scores = logits_processor(text[:, : self.anchor + 1 + k], logits[:, k].clone())
            here = draft[0, k : k + 1].tolist() + ([self.token] if k == accepted else [])
            self.target.append(likely(scores, count, *here))


def likely(scores: torch.Tensor, count: int, *tokens: int) -> Alternatives:
    """The `count` most likely tokens by their scores (1, V), and `tokens`."""
    probabilities = F.softmax(scores[0].float(), dim=-1)
    found = dict(zip(*(values.tolist() for values in reversed(probabilities.topk(min(count, len(probabilities)))))))
    found = {token: share for token, share in found.items() if share > 0}
    found.update({token: probabilities[token].item() for token in tokens if token not in found})
    return sorted(found.items(), key=lambda pair: -pair[1])


@dataclass
class Round:
    """
    One draft and its verification.

    Args:
        draft: the token ids sent to verification.
        confidence: the predicted probability of each to be accepted given that those before it were; empty without a
            confidence head or a calibration that does without.
        accepted: how many were accepted and followed by one more token.
        ended: whether the text ended with an accepted draft token, which `accepted` does not count; nothing was said
            of the drafts behind it.
        seconds: where the time went; in a batch, this row's share.
        logit: what the confidence head said of each, where a calibration turns that into the confidence; else empty.
        margin: by how much the likeliest token's logit exceeds the second's, where the calibration reads it.
        details: more of it, in a trace with alternatives; none of a batch.
        row: whose it is in a batch.
    """

    draft: list[int]
    confidence: list[float] = field(default_factory=list)
    accepted: int = 0
    ended: bool = False
    seconds: Seconds = field(default_factory=Seconds)
    logit: list[float] = field(default_factory=list)
    margin: list[float] = field(default_factory=list)
    details: Details | None = None
    row: int = 0

    @classmethod
    def of(
        cls,
        draft: list[int],
        accepted: int,
        last: int,
        seconds: Seconds,
        predicted: Sequence[list[float]],
        details: Details | None = None,
        row: int = 0,
    ) -> Round:
        """
        A round that ended with the token `last`; `predicted` are confidence, logit and margin of all that was drafted,
        of which `draft` is what was verified.
        """
        ended = accepted < len(draft) and draft[accepted] == last
        confidence, logit, margin = (several[: len(draft)] for several in predicted)
        return cls(draft, confidence, accepted, ended, seconds, logit, margin, details, row)


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

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Count nothing of what the block does."""
        begin = time.perf_counter()
        yield
        away = time.perf_counter() - begin
        self._begin += away
        self._last += away


def trace(drafter: DSparkModel, alternatives: int = 0) -> AbstractContextManager[list[Round]]:
    """[`DSparkModel.trace`]: collect every round of the `generate()` calls made inside the `with` block."""
    return drafter.trace(alternatives)


def acceptance_length(rounds: list[Round]) -> float:
    """Mean number of tokens that a verification commits: the accepted drafts and the target's own token."""
    return sum(1 + a_round.accepted for a_round in rounds) / max(len(rounds), 1)
