"""Speculative decoding with a DSpark drafter: of one sequence here, of many by [`batched_decoding`]."""

from __future__ import annotations

import copy

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import (
    BaseStreamer,
    GenerateDecoderOnlyOutput,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)
from transformers.utils import logging

from ..compat import CACHE, can_roll_back
from ..modeling_dspark import DSparkModel
from ..taps import TargetTaps, last_logits_only
from .attention import attention_for_one
from .batched_decoding import batched_decoding, check_batch
from .candidate_generator import DSparkCandidateGenerator, scheduler_of
from .draft_context import DraftContext
from .ending import Ending
from .outputs import GenerationRecord
from .profiler import ensure_costs
from .trace import Clock
from .verification import verify

logger = logging.get_logger(__name__)

STATEFUL_PROCESSORS = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


@torch.no_grad()
def speculative_decoding(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: DSparkModel,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    **model_kwargs,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """
    The decoding method behind `target.generate(..., assistant_model=drafter)`.

    Takes what `generate()` hands to a decoding method and returns what greedy search or sampling would: the same
    tokens, or tokens of the same distribution. Stopping criteria see every token, in order, so nothing is committed
    past the point where they say stop.

    Raises:
        ValueError: the request cannot be decoded speculatively, and why.
    """
    drafter = assistant_model
    check_request(logits_processor, synced_gpus, model_kwargs)
    if len(input_ids) > 1:
        check_batch(target, input_ids, generation_config, streamer, model_kwargs)
    drafter.bind(target)
    ensure_costs(target, drafter, depth=input_ids.shape[1])
    if len(input_ids) > 1:
        return batched_decoding(
            target, input_ids, logits_processor, stopping_criteria, generation_config, drafter, model_kwargs
        )
    scheduler = scheduler_of(drafter, generation_config.do_sample)
    held = model_kwargs[CACHE].get_seq_length()  # positions of an earlier turn
    prompt_mask = model_kwargs.get("attention_mask")
    ends, record = Ending(stopping_criteria), GenerationRecord(generation_config)

    with attention_for_one(target), TargetTaps(target, drafter.config.target_layer_ids) as taps:
        model_kwargs.update(last_logits_only(target))
        outputs = target._prefill(input_ids, generation_config, model_kwargs)
        features = taps.take(drafter.device, drafter.dtype)
        cache = outputs[CACHE]
        check_cache(target, cache)
        cache.activate_past_recording()
        context = opening_context(target, drafter, taps, input_ids, cache, held, features.shape[1], prompt_mask)
        if prompt_mask is not None:
            features = features[:, prompt_mask[0, -features.shape[1] :].bool().to(features.device)]
        devices = (parameter.device for model in (target, drafter) for parameter in model.parameters())
        clock = Clock(devices, running=drafter.rounds is not None)
        generator = DSparkCandidateGenerator(
            drafter,
            context,
            scheduler,
            logits_processor,
            generation_config.do_sample,
            generation_config.max_length,
            clock,
        )
        draft, draft_scores = input_ids[:, :0], None
        while True:
            # Commit: what the target says to the draft.
            width = draft.shape[1] + 1
            logits = outputs.logits[:, -width:].to(input_ids.device, torch.float32)
            committed, finished = 0, False
            for token, scores in verify(
                input_ids, draft, draft_scores, logits, logits_processor, generation_config.do_sample
            ):
                input_ids = torch.cat([input_ids, token], dim=-1)
                record.add(outputs, scores, logits, committed)
                committed += 1
                if streamer is not None:
                    streamer.put(token[0].cpu())
                if finished := ends(input_ids, record.scores):
                    break

            # Take back what the target cached of rejected tokens; the rest is context.
            rejected = width - committed
            cache.crop(-rejected)
            context.extend(features[:, : features.shape[1] - rejected])
            generator.update_candidate_strategy(input_ids, scores, committed - 1, logits)
            if finished:
                break

            # Draft, and ask the target about all of it in one forward.
            model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=committed)
            candidate_ids, draft_scores = generator.get_candidates(input_ids)
            draft = candidate_ids[:, input_ids.shape[1] :]
            inputs = verification_inputs(target, candidate_ids, draft.shape[1], model_kwargs)
            clock.lap("rest")
            with target._optimize_model_for_decode():
                outputs = target(**inputs, return_dict=True)
            clock.lap("verify")
            features = taps.take(drafter.device, drafter.dtype)

    if streamer is not None:
        streamer.end()
    if input_ids.shape[1] == cache.get_seq_length() + 1 and context.length == cache.get_seq_length():
        context.attach(cache, input_ids[:, :-1])
    return record.result(input_ids, cache)


def check_request(logits_processor: LogitsProcessorList, synced_gpus: bool, model_kwargs: dict) -> None:
    """
    Raises:
        ValueError: what in the request speculative decoding cannot do, before anything is computed.
    """
    if synced_gpus:
        raise ValueError("A DSpark drafter does not work with `synced_gpus` (FSDP or ZeRO-3 generation).")
    if not model_kwargs.get("use_cache") or model_kwargs.get(CACHE) is None:
        raise ValueError("A DSpark drafter needs the target's cache: call `generate()` with `use_cache=True`.")
    for processor in logits_processor:
        if isinstance(processor, STATEFUL_PROCESSORS):
            raise ValueError(
                f"{type(processor).__name__} keeps a state of its own from token to token and cannot judge drafts "
                "that may be rejected. Generate without `assistant_model`, or without this processor."
            )


def check_cache(target: PreTrainedModel, cache: Cache) -> None:
    """
    Raises:
        ValueError: the cache, filled by the prompt, has no exact way back.
    """
    if not can_roll_back(cache):
        raise ValueError(
            f"{type(target).__name__} with a {type(cache).__name__} cannot take back tokens that were cached and then "
            "rejected, which speculative decoding needs. Use a dynamic cache (leave `cache_implementation` unset); a "
            "model with recurrent layers has none that can: generate without `assistant_model`."
        )


def opening_context(
    target: PreTrainedModel,
    drafter: DSparkModel,
    taps: TargetTaps,
    input_ids: torch.Tensor,
    cache: Cache,
    held: int,
    prefilled: int,
    prompt_mask: torch.Tensor | None,
) -> DraftContext:
    """
    The drafter's context for the `held` positions that the target's cache held before the `prefilled` ones.

    It is what the earlier turn left on the cache; failing that, the target reads these positions once more; failing
    that, because their token ids were not passed, the context starts after them.
    """
    if not held:
        return DraftContext(drafter)
    known = input_ids[:, :held] if input_ids.shape[1] == held + prefilled else None
    padded = prompt_mask is not None and not prompt_mask.all()
    context = None if padded else DraftContext.detach(cache, drafter, held, known)
    if context is not None:
        return context
    if known is None:
        logger.warning_once(
            "The cache holds tokens that this drafter has not seen and whose ids were not passed, so it drafts "
            "without them. Pass the whole `input_ids` for better drafts."
        )
        return DraftContext(drafter, start=held)
    context = DraftContext(drafter)
    mask = None if prompt_mask is None else prompt_mask[:, :held]
    target(known.to(target.device), attention_mask=mask, use_cache=False, **last_logits_only(target))
    features = taps.take(drafter.device, drafter.dtype)
    context.extend(features if mask is None else features[:, mask[0].bool().to(features.device)])
    return context


def verification_inputs(
    target: PreTrainedModel, candidate_ids: torch.Tensor, draft_length: int, model_kwargs: dict
) -> dict:
    """What the target reads for one forward over the anchor and its draft, `candidate_ids[:, -draft_length - 1 :]`."""
    model_kwargs = copy.copy(model_kwargs)
    # Each reaches as far as the anchor, whether `candidate_ids` begins with the text or later.
    if (mask := model_kwargs.get("attention_mask")) is not None:
        model_kwargs = _prepare_attention_mask(model_kwargs, mask.shape[1] + draft_length, False)
    if (token_types := model_kwargs.get("token_type_ids")) is not None:
        model_kwargs = _prepare_token_type_ids(model_kwargs, token_types.shape[1] + draft_length)
    if (position_ids := model_kwargs.get("position_ids")) is not None:
        model_kwargs = _prepare_position_ids(model_kwargs, position_ids.shape[-1] + draft_length, False)
    inputs = target.prepare_inputs_for_generation(
        candidate_ids, next_sequence_length=draft_length + 1, is_first_iteration=False, **model_kwargs
    )
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = draft_length + 1
    return inputs
