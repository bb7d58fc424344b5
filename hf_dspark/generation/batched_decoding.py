"""Speculative decoding of many sequences at once: each goes on by what is accepted of its own draft."""

from __future__ import annotations

import copy
import inspect

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import (
    BaseStreamer,
    GenerateDecoderOnlyOutput,
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)

from ..compat import CACHE
from ..modeling_dspark import DSparkModel
from ..scheduling.batch import BatchScheduler, EachRow, HardwareAwareBatch
from ..scheduling.hardware_aware import HardwareAware
from ..taps import TargetTaps
from .attention import can_run_ragged, forward_flattened, verifying_attention
from .batch_drafter import BatchDrafter
from .candidate_generator import scheduler_of
from .choice import most_likely
from .draft_context import RaggedContext
from .ending import Ending
from .outputs import GenerationRecord
from .profiler import costs_by_rows
from .ragged_cache import Flattened, RaggedCache
from .row import Row
from .trace import Clock
from .verification import verify

BATCHED = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "inputs_embeds"}
ROW_BY_ROW = ("encoder_input_ids", "generated_ngrams", "prompt_ignore_length")  # what processors keep of each prompt


def batched_decoding(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: DSparkModel,
    model_kwargs: dict,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """
    What [`speculative_decoding`] does for one sequence, for R: prompts (R, length), padded on the left.

    All rows draft in one pass and are verified in one pass over as many tokens as they have together. Rows that have
    ended leave the batch. Processors and stopping criteria are asked about each row's text alone, token by token.
    """
    do_sample, most, prompt_length = generation_config.do_sample, generation_config.max_length, input_ids.shape[1]
    mask, positions = _prompt(input_ids, model_kwargs)
    rows = [
        Row(
            index,
            input_ids[index : index + 1],
            offset=int(positions[index, -1] + 1 - mask[index].sum()),
            logits_processor=_of_row(logits_processor, index, len(input_ids)),
            record=GenerationRecord(generation_config),
            draft=input_ids[:1, :0],
        )
        for index in range(len(input_ids))
    ]
    pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    ends = Ending(stopping_criteria)
    needs_scores = do_sample or bool(logits_processor) or bool(generation_config.return_dict_in_generate)
    cache, context = RaggedCache(len(rows)), RaggedContext(drafter, len(rows))
    scheduler = batch_scheduler_of(drafter, do_sample, len(rows), depth=prompt_length)
    devices = (parameter.device for model in (target, drafter) for parameter in model.parameters())
    clock = Clock(devices, running=drafter.rounds is not None)
    generator = BatchDrafter(drafter, context, scheduler, do_sample, most, clock)

    batch = list(rows)
    with verifying_attention(target), TargetTaps(target, drafter.config.target_layer_ids) as taps:
        chunk_size = generation_config.prefill_chunk_size or mask.shape[1]
        logits = _prefill(target, taps, cache, context, input_ids, mask, positions, model_kwargs, chunk_size)
        features: list[torch.Tensor] = []  # of what was verified, by row
        while True:
            # Commit: what the target says to each draft.
            widths = [1 + row.draft.shape[1] for row in batch]
            if needs_scores:
                logits, best = logits.to(input_ids.device, torch.float32), [None] * len(batch)
            else:
                best = most_likely(logits).T.to(input_ids.device).split(widths, dim=1)
            accepted = [
                _commit(row, row_logits[None], row_best, ends, do_sample, pads, most) - 1
                for row, row_logits, row_best in zip(batch, logits.split(widths), best)
            ]

            # Take back what the target cached of rejected tokens; the rest is context.
            cache.crop([width - 1 - count for width, count in zip(widths, accepted)])
            for place, row_features in enumerate(features):
                context.extend(place, row_features[: 1 + accepted[place]])
            generator.observe(batch, accepted)

            # Rows that have ended leave; without an end-of-sequence token, texts go on until all have ended.
            last = max(row.end or most for row in rows)
            staying = [i for i, row in enumerate(batch) if row.end is None or (not pads and row.length < last)]
            if not staying:
                break
            if len(staying) < len(batch):
                staying = _in_place(staying)
                batch = [batch[i] for i in staying]
                cache.select(staying)
                context.select(staying)
                scheduler.select(staying)

            # Draft, and ask the target about all drafts in one forward.
            generator.draft(batch)
            tokens = Flattened.of([1 + row.draft.shape[1] for row in batch], cache.lengths, target.device)
            candidates = torch.cat([ids for row in batch for ids in (row.text[:, -1:], row.draft)], dim=1)
            offsets = torch.tensor([row.offset for row in batch], device=target.device)
            position_ids = (tokens.columns + offsets[tokens.rows])[None]
            clock.lap("rest")
            with target._optimize_model_for_decode():
                logits = forward_flattened(target, cache, tokens, position_ids, input_ids=candidates.to(target.device))
            clock.lap("verify")
            features = taps.take(drafter.device, drafter.dtype)[0].split(tokens.counts)

    sequences = input_ids.new_full((len(rows), last), generation_config._pad_token_tensor.item() if pads else 0)
    for row in rows:
        sequences[row.index, : row.length] = row.text[0, :last]
    records = [row.record for row in rows]
    return GenerationRecord.of_batch(generation_config, records, last - prompt_length).result(sequences, None)


def batch_scheduler_of(drafter: DSparkModel, do_sample: bool, rows: int, depth: int) -> BatchScheduler:
    """
    The scheduler of a batch of `rows` prompts of `depth` tokens, as `drafter.generation_config` asks for it.

    Raises:
        ValueError: as [`scheduler_of`].
    """
    scheduler = scheduler_of(drafter, do_sample)
    if isinstance(scheduler, HardwareAware):
        return HardwareAwareBatch(
            costs_by_rows(drafter, depth), scheduler.length, do_sample, drafter.experience(do_sample, rows)
        )
    return EachRow(scheduler)


def check_batch(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict,
) -> None:
    """
    Raises:
        ValueError: what in the request cannot be done for several sequences at once, before anything is computed.
    """
    name, cache, one = type(target).__name__, model_kwargs[CACHE], "Generate one sequence at a time"
    if streamer is not None:
        raise ValueError("A streamer takes one sequence, not a batch.")
    if not can_run_ragged(target) or "position_ids" not in inspect.signature(target.forward).parameters:
        raise ValueError(
            f"{name} has layers that cannot tell apart sequences of different lengths in one pass (recurrent or "
            f"convolutional ones, or attention of its own kind). {one}, or without `assistant_model`."
        )
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        raise ValueError(
            "A batch is decoded with a cache of its own, which grows with each sequence: leave "
            f"`cache_implementation` unset and pass no {type(cache).__name__}."
        )
    if cache.get_seq_length():
        raise ValueError(
            f"A batch cannot continue from a cache. {one}, or pass the whole `input_ids` without a cache."
        )
    if generation_config.return_dict_in_generate:
        for output in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, output):
                raise ValueError(f"`{output}` is not available for a batch with a DSpark drafter. {one}.")
    others = [key for key, value in model_kwargs.items() if key not in BATCHED and torch.is_tensor(value)]
    positions = model_kwargs.get("position_ids")
    if others or (positions is not None and positions.dim() != 2):
        raise ValueError(f"A batch takes text only, got {', '.join(others or ['position_ids'])}. {one}.")
    if not _prompt(input_ids, model_kwargs)[0][:, -1].all():
        raise ValueError("A prompt ends in padding: pad batches on the left, with `tokenizer.padding_side = 'left'`.")


def _prompt(input_ids: torch.Tensor, model_kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Which columns of the prompts are tokens, and their positions, both (R, columns)."""
    embeddings = model_kwargs.get("inputs_embeds")
    shape = (input_ids if embeddings is None else embeddings).shape[:2]
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    mask = torch.ones(shape, dtype=torch.bool, device=input_ids.device) if mask is None else mask.bool()
    positions = (mask.cumsum(-1) - 1 if positions is None else positions).expand(shape)
    return mask, positions


def _prefill(
    target: PreTrainedModel,
    taps: TargetTaps,
    cache: RaggedCache,
    context: RaggedContext,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    model_kwargs: dict,
    chunk_size: int,
) -> torch.Tensor:
    """Have both models read the prompts, so many columns at a time; the logits (R, V) of their last tokens."""
    embeddings = model_kwargs.get("inputs_embeds")
    name, prompt = ("input_ids", input_ids) if embeddings is None else ("inputs_embeds", embeddings)
    for ids, part, places in zip(*(columns.split(chunk_size, dim=1) for columns in (prompt, mask, positions))):
        counts = part.sum(-1).tolist()
        if not any(counts):
            continue
        tokens = Flattened.of(counts, cache.lengths, target.device)
        inputs = {name: ids[part][None].to(target.device)}
        if target._supports_logits_to_keep():
            inputs["logits_to_keep"] = tokens.last()
        logits = forward_flattened(target, cache, tokens, places[part][None].to(target.device), **inputs)
        if "logits_to_keep" not in inputs:
            logits = logits[tokens.last()]
        features = taps.take(context.device, context.dtype)[0].split(counts)
        for place, row_features in enumerate(features):
            context.extend(place, row_features)
    return logits


def _in_place(staying: list[int]) -> list[int]:
    """The same places, in an order in which those that can stay where they are do."""
    moving = [place for place in staying if place >= len(staying)]
    return [place if place in staying else moving.pop() for place in range(len(staying))]


def _commit(
    row: Row,
    logits: torch.Tensor,
    best: torch.Tensor | None,
    ends: Ending,
    do_sample: bool,
    pads: bool,
    most: int,
) -> int:
    """
    Add to a row what the target, of logits (1, ℓ + 1, V), says to its draft; how many tokens. `best` (1, ℓ + 1) are
    the most likely, where nothing else is asked for.
    """
    committed = 0
    for token, scores in verify(row.text, row.draft, row.draft_scores, logits, row.logits_processor, do_sample, best):
        row.text = torch.cat([row.text, token], dim=-1)
        row.record.add(None, scores, logits, committed)
        committed += 1
        if row.end is None and ends(row.text, row.record.scores):
            row.end = row.length
        if row.end is not None and (pads or row.length >= most):
            break
    return committed


def _of_row(processors: LogitsProcessorList, index: int, rows: int) -> LogitsProcessorList:
    """The processors as they are for one row: some know the place of a row in the batch, or the prompts of all."""
    return LogitsProcessorList(_processor_of_row(processor, index, rows) for processor in processors)


def _processor_of_row(processor: LogitsProcessor, index: int, rows: int) -> LogitsProcessor:
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(index, ids), num_beams=1)
    own = {name: value for name in ROW_BY_ROW if hasattr(value := getattr(processor, name, None), "__len__")}
    if own:
        processor = copy.copy(processor)
        for name, values in own.items():
            place = index * len(values) // rows
            setattr(processor, name, values[place : place + 1])
        if hasattr(processor, "batch_size"):
            processor.batch_size = 1
    return processor
