"""The ways of decoding that are compared: plain, the drafter, and what else could be done on the same prompts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from ..backbone.context_cache import ContextCache
from ..compat import DFlashTokenCandidateGenerator
from ..generation.candidate_generator import scheduler_of
from ..modeling_dspark import DSparkModel, DSparkOutput
from ..scheduling.calibration import Calibration
from ..scheduling.profile import HardwareProfile
from ..scheduling.schedulers import FixedLength

# A way of decoding gives, as long as its block lasts, the arguments that `target.generate()` takes for it.
Variant = Callable[[DSparkModel], AbstractContextManager[dict]]


@contextmanager
def plain(drafter: DSparkModel) -> Iterator[dict]:
    """`generate()` without a drafter."""
    yield {}


@contextmanager
def as_configured(drafter: DSparkModel) -> Iterator[dict]:
    """The drafter with its own scheduler."""
    yield {"assistant_model": drafter}


@contextmanager
def full_blocks(drafter: DSparkModel) -> Iterator[dict]:
    """The drafter, verifying all that it drafts."""
    whole = {"num_assistant_tokens": drafter.config.num_draft_tokens, "assistant_confidence_threshold": None}
    with _replaced(drafter.generation_config, **whole):
        yield {"assistant_model": drafter}


@contextmanager
def uncalibrated(drafter: DSparkModel) -> Iterator[dict]:
    """[`full_blocks`], recording what confidences can be worked out from: logits of the head, if any, and margins."""
    method = "margin" if drafter.confidence_head is None else "both"
    nothing = Calibration.identity(drafter.config.num_draft_tokens, method)
    profile = _calibrated(drafter, {"greedy": nothing, "sample": nothing})
    with _replaced(drafter, hardware_profile=profile), full_blocks(drafter) as way:
        yield way


@contextmanager
def head_off(drafter: DSparkModel) -> Iterator[dict]:
    """The drafter without sequential, copy and confidence heads, as DFlash would draft; otherwise as configured."""
    with (
        _replaced(drafter, markov_head=None, candidate_selector=None, copy_head=None, confidence_head=None),
        _replaced(drafter, hardware_profile=_calibrated(drafter, {}), _experience={}),
        _replaced(drafter.generation_config, assistant_confidence_threshold=None),
    ):
        yield {"assistant_model": drafter}


@contextmanager
def prompt_lookup(drafter: DSparkModel) -> Iterator[dict]:
    """transformers' prompt lookup, as many tokens a round as the drafter's block has."""
    yield {"prompt_lookup_num_tokens": drafter.config.num_draft_tokens}


@contextmanager
def transformers_dflash(drafter: DSparkModel) -> Iterator[dict]:
    """The drafter's backbone in transformers' own DFlash generator, which verifies whole blocks."""
    yield {"assistant_model": DFlashBackbone(drafter), "speculation_type": "dflash"}


VARIANTS: dict[str, Variant] = {
    "plain": plain,
    "drafter": as_configured,
    "full_blocks": full_blocks,
    "head_off": head_off,
    "prompt_lookup": prompt_lookup,
    "transformers_dflash": transformers_dflash,
}
LABELS = {
    "plain": "plain generate()",
    "drafter": "drafter, as configured",
    "full_blocks": "drafter, full blocks",
    "head_off": "drafter, sequential head off",
    "prompt_lookup": "prompt lookup",
    "transformers_dflash": "DFlash of transformers",
}
BASELINES = ("head_off", "prompt_lookup", "transformers_dflash")


def variants_for(
    target: PreTrainedModel, drafter: DSparkModel, baselines: bool = True
) -> tuple[dict[str, Variant], dict[str, str]]:
    """Those of [`VARIANTS`] that there are for a drafter, by name, and for the others the reason why not."""
    reasons = {}
    if scheduler_of(drafter) == FixedLength(drafter.config.num_draft_tokens):
        reasons["full_blocks"] = "The drafter as configured verifies full blocks already."
    if baselines and not drafter.sequential_head and not drafter.copy_head:
        reasons["head_off"] = "The drafter has no sequential head."
    if baselines and (misfit := dflash_misfit(target, drafter)):
        reasons["transformers_dflash"] = misfit
    left_out = reasons.keys() | (set() if baselines else BASELINES)
    return {name: variant for name, variant in VARIANTS.items() if name not in left_out}, reasons


def dflash_misfit(target: PreTrainedModel, drafter: DSparkModel) -> str | None:
    """Why transformers' DFlash generator cannot run a drafter on a target; `None` if it can."""
    config = drafter.config
    if DFlashTokenCandidateGenerator is None:
        return "This release of transformers has no DFlash generator."
    if config.sample_from_anchor:
        return "It leaves the anchor's slot of a block unused, from which this drafter drafts its first token."
    if config.draft_vocab_size < config.vocab_size:
        return "It has no draft vocabulary: it drafts with the target's whole output head."
    if config.has_embed_tokens or config.has_lm_head:
        return "It drafts with the target's embeddings and output head, this drafter has its own."
    if config.output_multiplier != 1 or config.final_logit_softcapping is not None:
        return "It takes the output head's logits as they are, this drafter scales or caps them."
    if config.input_embedding_scale not in (None, 1):
        return "It embeds a block as the target does, this drafter scales the embeddings."
    if config.input_embedding_scale == 1 and type(target.get_input_embeddings()) is not nn.Embedding:
        return "It scales the embeddings of a block as the target scales its own, this drafter does not."
    if config.target_layer_ids[0] < 0:
        return "It cannot read the target's embedding output, this drafter does."
    if config.target_layer_ids[-1] == target.config.get_text_config(decoder=True).num_hidden_layers - 1:
        return "It reads the target's last layer behind the final norm, this drafter before it."
    return None


class DFlashBackbone(nn.Module):
    """The drafter as the assistant that transformers' DFlash generator takes: no heads, embedded blocks, one text."""

    def __init__(self, drafter: DSparkModel):
        super().__init__()
        self.config = copy.deepcopy(drafter.config)
        self.config.layer_types = []  # the generator's own cache, which would hold blocks, too, stays without layers
        self._backbone = copy.copy(drafter)
        self._backbone.embed = lambda embeddings: embeddings  # type: ignore[method-assign, assignment]
        self._cache = ContextCache()

    @property
    def device(self) -> torch.device:
        return self._backbone.device

    def forward(
        self, noise_embeds: torch.Tensor, context_hidden_states: torch.Tensor, position_ids: torch.Tensor, **theirs
    ) -> DSparkOutput:
        """Final hidden states of one block (1, B, hidden_size); `theirs` is the generator's mask and cache."""
        return self._backbone(noise_embeds, context_hidden_states, position_ids, cache=self._cache)


def _calibrated(drafter: DSparkModel, calibration: dict[str, Calibration]) -> HardwareProfile:
    """The drafter's profile with another calibration."""
    return replace(drafter.hardware_profile or HardwareProfile(), calibration=calibration)


@contextmanager
def _replaced(owner: object, **attributes) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
