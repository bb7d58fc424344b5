"""Drafts for speculative decoding: one backbone pass, then the block's tokens left to right."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList
from transformers.generation import CandidateGenerator

from ..modeling_dspark import DSparkModel
from ..scheduling.calibration import Calibration
from ..scheduling.hardware_aware import HardwareAware
from ..scheduling.schedulers import ConfidenceThreshold, FixedLength, Scheduler
from .choice import choose
from .draft_block import DraftBlock
from .draft_context import DraftContext
from .trace import Clock, Details, Round


def scheduler_of(drafter: DSparkModel, do_sample: bool = False) -> Scheduler:
    """
    The scheduler of a request, as `drafter.generation_config` asks for it.

    `assistant_confidence_threshold` stops drafts by confidence, `num_assistant_tokens` alone fixes their length; with
    neither, it is what pays on this machine if `drafter.round_costs` tells what a round costs here, and else the
    whole block.

    Args:
        drafter: the drafter.
        do_sample: whether the request samples.

    Raises:
        ValueError: a confidence threshold for a drafter without confidences, a length that it cannot draft, or a
            calibration for another length.
    """
    config, most = drafter.generation_config, drafter.config.num_draft_tokens
    length = most if config.num_assistant_tokens is None else config.num_assistant_tokens
    if not 0 <= length <= most:
        raise ValueError(f"`num_assistant_tokens` is {length}, this drafter drafts 0 to {most} tokens.")
    threshold = config.assistant_confidence_threshold
    calibration = drafter.calibration(do_sample)
    if threshold:
        if calibration is None:
            raise ValueError(
                "`assistant_confidence_threshold` needs a drafter with a confidence head, or one that `hf-dspark "
                "calibrate` gave confidences; unset it, or limit `num_assistant_tokens` instead."
            )
        return ConfidenceThreshold(threshold, length)
    if config.num_assistant_tokens is None and drafter.round_costs is not None:
        return HardwareAware(drafter.round_costs, length, do_sample, drafter.experience(do_sample))
    return FixedLength(length)


class DSparkCandidateGenerator(CandidateGenerator):
    """
    Drafts with a [`DSparkModel`].

    The scores that come with a draft are the request's own processed scores; their softmax is the distribution q that
    the tokens were drawn from, in float32. Processors are asked about prefixes that may be rejected later, so they
    have to depend on the token ids they are given and on nothing else.

    Args:
        drafter: the drafter, bound to the target.
        context: what it knows of the sequence, kept up to date by the decoding loop.
        scheduler: says how far each draft goes.
        logits_processor: the processors and warpers of this request.
        do_sample: draw the draft tokens, or take the most likely.
        max_length: length at which the sequence ends.
        clock: times the rounds.
    """

    def __init__(
        self,
        drafter: DSparkModel,
        context: DraftContext,
        scheduler: Scheduler,
        logits_processor: LogitsProcessorList,
        do_sample: bool,
        max_length: int,
        clock: Clock,
    ):
        self.drafter = drafter
        self.device = drafter.device
        self.context = context
        self.scheduler = scheduler
        self.logits_processor = logits_processor
        self.do_sample = do_sample
        self.max_length = max_length
        self.clock = clock
        self._draft: torch.Tensor | None = None  # nothing drafted yet
        self._confidences: list[float] = []
        self._details: Details | None = None
        self._logits: list[float] = []
        self._margins: list[float] = []

    @torch.no_grad()
    def get_candidates(self, input_ids: torch.Tensor, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Draft behind `input_ids` (1, length), whose last token is the anchor.

        Returns:
            The sequence with the draft (1, length + ℓ), and when sampling the scores (1, ℓ, V) of the draft, `None` if
            it is empty.
        """
        self.clock.lap("rest")
        start = input_ids.shape[1]
        self._draft, self._confidences, self._logits, self._margins = input_ids[:, :0], [], [], []
        self._details = Details(start - 1) if self.drafter.alternatives else None
        limit = self.scheduler.limit(max(self.max_length - start - 1, 0))  # verification adds a token of its own
        if not limit:
            return input_ids, None
        text = input_ids.to(self.device)
        block = DraftBlock(self.drafter, self.context.block_hidden(text[:, -1:], limit), text)
        self.clock.lap("draft")

        scores: list[torch.Tensor] = []
        calibration = self._calibration()
        for k in range(limit):
            if not self.scheduler.goes_on(k):
                break
            block.advance(input_ids[:, -1].to(self.device))
            if not self.scheduler.admits(k, self._confidence(calibration, k, block)):
                break
            token, score = self._choose(input_ids, block.logits())
            if token is None:
                break
            input_ids = torch.cat([input_ids, token], dim=-1)
            scores.append(score)
        if self._details is not None:
            with self.clock.stopped():
                self._details.add_draft(input_ids[:, start:], scores, self._confidences, self.drafter.alternatives)
        if not self.do_sample:
            input_ids = input_ids[:, : start + self.scheduler.keep(len(scores))]
        self.clock.lap("head")
        self._draft = input_ids[:, start:]
        return input_ids, torch.stack(scores, dim=1) if self.do_sample and scores else None

    def _calibration(self) -> Calibration | None:
        """How confidences are worked out, if somebody reads them: on an accelerator each costs a wait."""
        is_read = self.scheduler.reads_confidence or self.drafter.rounds is not None
        return self.drafter.calibration(self.do_sample) if is_read else None

    def _confidence(self, calibration: Calibration | None, slot: int, block: DraftBlock) -> float | None:
        """c_k, before x_k is drawn."""
        if calibration is None:
            return None
        is_traced = self.drafter.rounds is not None and calibration.method != "head"
        known = block.read(calibration, and_logit=is_traced)
        confidence = calibration(slot, **known).sigmoid().item()
        self._confidences.append(confidence)
        if is_traced:
            for name, values in (("logit", self._logits), ("margin", self._margins)):
                values += known[name].tolist() if name in known else []
        return confidence

    def _choose(self, input_ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The token (1, 1) of one slot and its processed scores (1, V); no token where they allow none."""
        logits, processors = logits.to(input_ids.device), [self.logits_processor]
        _, token, scores = choose(self.drafter, logits, processors, lambda _: input_ids, self.do_sample)
        return (token, scores) if len(token) else (None, scores)

    def update_candidate_strategy(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor | None,
        num_matches: int,
        logits: torch.Tensor | None = None,
    ):
        """
        Tell the scheduler and the trace how the last round ended, and start the clock for the next. Only a trace with
        alternatives reads `logits`, what the target said in the slots of the draft and behind them, (1, ℓ + 1, V).
        """
        if self._draft is not None:
            self.clock.lap("rest")
            self.scheduler.observe(self._draft.shape[1], num_matches, self.clock.elapsed())
            if self.drafter.rounds is not None:
                if self._details is not None:
                    count = self.drafter.alternatives
                    self._details.add_verdict(
                        input_ids, self._draft, num_matches, logits, self.logits_processor, count
                    )
                draft, last = self._draft[0].tolist(), int(input_ids[0, -1])
                predicted = self._confidences, self._logits, self._margins
                self.drafter.rounds.append(
                    Round.of(draft, num_matches, last, self.clock.seconds, predicted, self._details)
                )
        self.clock.restart()
