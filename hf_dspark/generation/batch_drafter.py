"""Drafts for many rows: one backbone pass, then the slots of all blocks left to right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from ..modeling_dspark import DSparkModel
from ..scheduling.batch import BatchScheduler
from ..scheduling.calibration import Calibration
from .choice import choose
from .draft_block import DraftBlock
from .draft_context import RaggedContext
from .row import Row
from .trace import Clock, Round


class BatchDrafter:
    """
    Drafts for the rows of a batch with a [`DSparkModel`], as [`DSparkCandidateGenerator`] does for one.

    Args:
        drafter: the drafter, bound to the target.
        context: what it knows of the rows, kept up to date by the decoding loop.
        scheduler: says how far each draft goes.
        do_sample: draw the draft tokens, or take the most likely.
        max_length: length at which a sequence ends.
        clock: times the rounds.
    """

    def __init__(
        self,
        drafter: DSparkModel,
        context: RaggedContext,
        scheduler: BatchScheduler,
        do_sample: bool,
        max_length: int,
        clock: Clock,
    ):
        self.drafter = drafter
        self.context = context
        self.scheduler = scheduler
        self.do_sample = do_sample
        self.max_length = max_length
        self.clock = clock
        self._confidences: list[list[float]] | None = None  # by row; nothing drafted yet
        self._logits: list[list[float]] = []
        self._margins: list[list[float]] = []

    @torch.no_grad()
    def draft(self, rows: Sequence[Row]) -> None:
        """Set the draft (1, ℓ) of each row and, when sampling, its scores (1, ℓ, V)."""
        self.clock.lap("rest")
        self._confidences = [[] for _ in rows]
        self._logits, self._margins = [[] for _ in rows], [[] for _ in rows]
        tokens: list[list[torch.Tensor]] = [[] for _ in rows]
        scores: list[list[torch.Tensor]] = [[] for _ in rows]
        limits = self.scheduler.limits([max(self.max_length - row.length - 1, 0) for row in rows])
        if any(limits):
            self._fill(rows, limits, tokens, scores)
        counts = [len(drafted) for drafted in tokens]
        if any(limits) and not self.do_sample:
            counts = self.scheduler.keep(counts)
        for row, drafted, drawn_from, count in zip(rows, tokens, scores, counts):
            row.draft = torch.cat([row.text[:, :0], *drafted[:count]], dim=1)
            row.draft_scores = torch.stack(drawn_from, dim=1) if drawn_from else None
        self.clock.lap("head")

    def _fill(self, rows: Sequence[Row], limits: Sequence[int], tokens: list[list], scores: list[list]) -> None:
        device = self.drafter.device
        anchors = torch.cat([row.text[:, -1] for row in rows]).to(device)
        text = anchors[:, None]
        if self.drafter.copy_head is not None:
            texts = [row.text[0].to(device) for row in rows]
            text = pad_sequence(texts, batch_first=True, padding_value=-1, padding_side="left")
        block = DraftBlock(self.drafter, self.context.block_hidden(anchors[:, None], max(limits)), text)
        self.clock.lap("draft")
        going, previous = list(range(len(rows))), anchors  # the rows that still draft, and their last tokens

        def go_on(stay: Sequence[bool]) -> None:
            nonlocal going, previous
            if not all(stay):
                kept = torch.tensor([i for i, stays in enumerate(stay) if stays], dtype=torch.long, device=device)
                going, previous = [going[i] for i in kept.tolist()], previous[kept]
                block.select(kept)

        is_read = self.scheduler.reads_confidence or self.drafter.rounds is not None
        calibration = self.drafter.calibration(self.do_sample) if is_read else None
        for slot in range(max(limits)):
            go_on([slot < limits[place] for place in going])
            if not going or not self.scheduler.goes_on(slot):
                break
            block.advance(previous)
            go_on(self.scheduler.admits(slot, going, self._read_confidences(calibration, slot, block, going)))
            if not going:
                break
            allowed, chosen, drawn_from = self._choose(
                [rows[place] for place in going], [tokens[place] for place in going], block.logits()
            )
            go_on(allowed)
            for place, token, score in zip(going, chosen.split(1), drawn_from.split(1)):
                tokens[place].append(token)
                if self.do_sample:
                    scores[place].append(score)
            previous = chosen[:, 0].to(device)

    def _read_confidences(
        self, calibration: Calibration | None, slot: int, block: DraftBlock, going: Sequence[int]
    ) -> Sequence[float | None]:
        """c_k of each row that still drafts, before x_k is drawn."""
        if calibration is None:
            return [None] * len(going)
        is_traced = self.drafter.rounds is not None and calibration.method != "head"
        known = block.read(calibration, and_logit=is_traced)
        confidences = calibration(slot, **known).sigmoid().tolist()
        for place, confidence in zip(going, confidences):
            self._confidences[place].append(confidence)
        if is_traced:
            for name, rows in (("logit", self._logits), ("margin", self._margins)):
                for place, value in zip(going, known[name].tolist() if name in known else []):
                    rows[place].append(value)
        return confidences

    def _choose(
        self, rows: Sequence[Row], drafted: Sequence[list[torch.Tensor]], logits: torch.Tensor
    ) -> tuple[list[bool], torch.Tensor, torch.Tensor]:
        """Which rows have a token for the slot, those tokens (n, 1) and their processed scores (n, V)."""
        return choose(
            self.drafter,
            logits.to(rows[0].text.device),
            [row.logits_processor for row in rows],
            lambda i: torch.cat([rows[i].text, *drafted[i]], dim=1),
            self.do_sample,
        )

    def observe(self, rows: Sequence[Row], accepted: Sequence[int]) -> None:
        """Tell the scheduler and the trace how the last round ended, and start the clock for the next."""
        if self._confidences is not None:
            self.clock.lap("rest")
            lengths = [row.draft.shape[1] for row in rows]
            self.scheduler.observe(lengths, accepted, self.clock.elapsed())
            if self.drafter.rounds is not None:
                seconds = self.clock.seconds.scaled(1 / len(rows))
                for row, *predicted, count in zip(rows, self._confidences, self._logits, self._margins, accepted):
                    draft, last = row.draft[0].tolist(), int(row.text[0, -1])
                    self.drafter.rounds.append(Round.of(draft, count, last, seconds, predicted, row=row.index))
        self.clock.restart()
