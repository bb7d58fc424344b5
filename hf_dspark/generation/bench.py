"""One pass at a time of either model over a context, timed behind what comes before it in generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..compat import CACHE, can_roll_back
from ..modeling_dspark import DSparkModel
from ..scheduling.batch import HardwareAwareBatch
from ..scheduling.costs import RoundCosts
from ..scheduling.hardware_aware import HardwareAware
from ..taps import TargetTaps, last_logits_only
from .attention import forward_flattened
from .batch_drafter import BatchDrafter
from .candidate_generator import DSparkCandidateGenerator
from .draft_context import DraftContext, RaggedContext
from .outputs import GenerationRecord
from .ragged_cache import Flattened, RaggedCache
from .row import Row
from .trace import Clock, Seconds

NEW_CONTEXT = 2  # tokens that a round adds to the drafter's context, about


class Bench:
    """
    Passes over a context, each of which leaves it as it was.

    Args:
        context: token ids (R, depth).
    """

    draft_context: DraftContext | RaggedContext

    def __init__(self, target: PreTrainedModel, drafter: DSparkModel, context: torch.Tensor):
        drafter.bind(target)
        self.target, self.drafter, self.tokens = target, drafter, context
        self.slots = drafter.config.num_draft_tokens
        self.clock = Clock((model.device for model in (target, drafter)), running=True)

    def verify(self, width: int) -> float:
        """
        Seconds of a forward pass of the target over `width` tokens a row, behind a draft, or behind another such pass
        if it is over none.
        """
        if width > 1:
            self._draft(self.slots)
        else:
            self._verify(width)
        return self._verify(width)

    def draft(self, slots: int) -> float:
        """Seconds of drafting so many slots for every row, behind a verification."""
        seconds = self._draft_behind_verification(slots)
        return seconds.draft + seconds.head

    def heads(self, slots: int) -> float:
        """The part of [`draft`] that comes after the backbone."""
        return self._draft_behind_verification(slots).head

    def _draft_behind_verification(self, slots: int) -> Seconds:
        self._verify((self.slots + 1) // 2)
        return self._draft(slots)

    def _draft(self, slots: int) -> Seconds:
        self._extend()
        self.clock.restart()
        self.clock.lap("rest")  # waits for what was going on
        self._propose(slots)
        self._take_back()
        return self.clock.seconds

    def _verify(self, width: int) -> float:
        raise NotImplementedError

    def _propose(self, slots: int) -> None:
        """Draft so many slots, as in generation."""
        raise NotImplementedError

    def _extend(self) -> None:
        """Let the drafter's context grow by as much as in a round."""
        raise NotImplementedError

    def _take_back(self) -> None:
        raise NotImplementedError

    def _seconds(self, work: Callable[[], object]) -> float:
        self.clock.restart()
        self.clock.lap("rest")
        work()
        self.clock.lap("verify")
        return self.clock.seconds.verify


def _worth_it(slots: int, rows: int = 1) -> RoundCosts:
    """Costs by which all slots are drafted, however unlikely, and confidences are read for them."""
    return RoundCosts(draft=0.0, verify=(1.0,) * (rows * slots + 1))


class SingleBench(Bench):
    """
    For one row.

    Raises:
        ValueError: the target's cache cannot be cropped.
    """

    def __init__(self, target: PreTrainedModel, drafter: DSparkModel, context: torch.Tensor):
        super().__init__(target, drafter, context)
        with TargetTaps(target, drafter.config.target_layer_ids) as taps:
            outputs = target(context, use_cache=True, return_dict=True, **last_logits_only(target))
            self.features = taps.take(drafter.device, drafter.dtype)
        self.cache = outputs[CACHE]
        if not can_roll_back(self.cache):
            raise ValueError(f"the {type(self.cache).__name__} of {type(target).__name__} cannot be cropped.")
        self.cache.activate_past_recording()
        self.draft_context: DraftContext = DraftContext(drafter)
        self.draft_context.extend(self.features)

    def _propose(self, slots: int) -> None:
        generator = DSparkCandidateGenerator(
            self.drafter,
            self.draft_context,
            HardwareAware(_worth_it(slots), slots, do_sample=False),
            LogitsProcessorList(),
            do_sample=False,
            max_length=self.tokens.shape[1] + slots + 1,
            clock=self.clock,
        )
        generator.get_candidates(self.tokens)

    def _verify(self, width: int) -> float:
        tokens = self.tokens[:, :1].repeat(1, width)
        seconds = self._seconds(
            lambda: self.target(tokens, use_cache=True, return_dict=True, **{CACHE: self.cache}).logits
        )
        self.cache.crop(-width)
        return seconds

    def _extend(self) -> None:
        self.draft_context.extend(self.features[:, -NEW_CONTEXT:])

    def _take_back(self) -> None:
        self.draft_context.crop(self.tokens.shape[1])


class BatchBench(Bench):
    """For several rows, as batches are decoded; inside [`verifying_attention`]."""

    def __init__(self, target: PreTrainedModel, drafter: DSparkModel, context: torch.Tensor):
        super().__init__(target, drafter, context)
        rows, depth = context.shape
        self.cache = RaggedCache(rows)
        with TargetTaps(target, drafter.config.target_layer_ids) as taps:
            self._forward([depth] * rows, **last_logits_only(target))
            self.features = taps.take(drafter.device, drafter.dtype)[0].split(depth)
        self.draft_context: RaggedContext = RaggedContext(drafter, rows)
        for row, features in enumerate(self.features):
            self.draft_context.extend(row, features)

    def _propose(self, slots: int) -> None:
        rows = [
            Row(index, text[None], 0, LogitsProcessorList(), GenerationRecord(GenerationConfig()), text[None, :0])
            for index, text in enumerate(self.tokens)
        ]
        scheduler = HardwareAwareBatch(lambda rows: _worth_it(slots, rows), slots, do_sample=False)
        most = self.tokens.shape[1] + slots + 1
        BatchDrafter(self.drafter, self.draft_context, scheduler, False, most, self.clock).draft(rows)

    def _verify(self, width: int) -> float:
        """Of so many tokens a row on average, spread over the rows as far as those of drafts can be."""
        further = min(width - 1, self.drafter.config.num_draft_tokens + 1 - width)
        pairs, odd = divmod(len(self.tokens), 2)
        counts = [width - further, width + further] * pairs + [width] * odd
        seconds = self._seconds(lambda: self._forward(counts))
        self.cache.crop(counts)
        return seconds

    def _forward(self, counts: Sequence[int], **inputs) -> torch.Tensor:
        tokens, device = Flattened.of(counts, self.cache.lengths, self.target.device), self.target.device
        ids = torch.cat([ids[:1].repeat(count) for ids, count in zip(self.tokens, counts)])[None].to(device)
        return forward_flattened(self.target, self.cache, tokens, tokens.columns[None], input_ids=ids, **inputs)

    def _extend(self) -> None:
        for row, features in enumerate(self.features):
            self.draft_context.extend(row, features[-NEW_CONTEXT:])

    def _take_back(self) -> None:
        self.draft_context.crop(NEW_CONTEXT)
