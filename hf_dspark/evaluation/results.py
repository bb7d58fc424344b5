"""What an evaluation found. These classes are the schema of its JSON file: every field is a key of the same name."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field

from ..files import write_text

SCHEMA_VERSION = 1


@dataclass
class Estimate:
    """
    Args:
        value: a measure of the rounds seen; `None` where they do not define it.
        interval: its 95 % confidence interval, from a bootstrap over prompts; `None` with a single prompt.
    """

    value: float | None
    interval: tuple[float, float] | None


@dataclass
class ReliabilityBin:
    """
    Args:
        confidence, acceptance: mean confidence and share accepted of the draft tokens in one bin.
        count: how many they are.
    """

    confidence: float
    acceptance: float
    count: int


@dataclass
class Reliability:
    """
    How well c_k predicts that draft token k is accepted given that all before it were.

    Args:
        judged: draft tokens that the target judged.
        accepted: those of them that it accepted.
        ece: expected calibration error over 20 bins of equal width. Few tokens push it, and its interval, upwards.
        auc: area under the ROC curve.
        brier: mean squared difference of confidence and acceptance.
        log_loss: mean negative log likelihood, in nats.
        bins: the bins of the reliability diagram that are not empty, from low to high confidence.
    """

    judged: int
    accepted: int
    ece: Estimate
    auc: Estimate
    brier: Estimate
    log_loss: Estimate
    bins: list[ReliabilityBin]


@dataclass
class ThresholdStep:
    """
    Args:
        threshold: stop a draft at the first token whose confidence is lower.
        tokens_per_step: tokens that a verification would have committed.
        verified_per_step: draft tokens that it would have been sent.
    """

    threshold: float
    tokens_per_step: float
    verified_per_step: float


@dataclass
class FullBlocks:
    """
    The drafter when everything it drafts is verified, whatever its scheduler says.

    Args:
        acceptance_length: tokens committed per verification.
        verification_waste: share of the verified draft tokens that were not committed.
        judged: per position, draft tokens that the target judged: those behind a rejected one are not.
        conditional_acceptance: per position, share of the judged ones that were accepted.
        marginal_acceptance: per position, probability that it and all before it are accepted; the running product of
            the conditional ones, so that drafts cut short by the end of a text count as far as they went.
        accepted_histogram: in how many rounds 0, 1, ... draft tokens were accepted, among whole drafts.
        confidence: reliability of the confidences per position; empty without any.
        confidence_overall: the same over all positions.
        threshold_sweep: what thresholds on the confidence would have done to the same drafts.
        confidence_before: reliability per position of what the confidence head said; empty unless the drafter comes
            with a calibration of it, which `confidence` is after.
    """

    acceptance_length: float | None
    verification_waste: float | None
    judged: list[int]
    conditional_acceptance: list[float | None]
    marginal_acceptance: list[float | None]
    accepted_histogram: list[int]
    confidence: list[Reliability]
    confidence_overall: Reliability | None
    threshold_sweep: list[ThresholdStep]
    confidence_before: list[Reliability] = field(default_factory=list)


@dataclass
class TimeSplit:
    """
    Where a round spends its time.

    Args:
        rounds: how many were timed.
        draft_ms: the backbone's pass over a block and the output head, mean milliseconds per round.
        head_ms: sequential head, confidence head (asked even where the scheduler does not need it), processors,
            choice of the draft tokens.
        verify_ms: the target's forward pass over the draft.
        rest_ms: judging the draft, stopping criteria, caches, arguments.
        head_share: share of `head_ms` in the round.
        outside_share: share of all that lies outside the draft and verification passes, `head_ms + rest_ms`.
    """

    rounds: int
    draft_ms: float
    head_ms: float
    verify_ms: float
    rest_ms: float
    head_share: float
    outside_share: float


@dataclass
class Speed:
    """
    One way of decoding.

    Args:
        acceptance_length: tokens per forward pass of the target after the prompt's; `None` if there was none.
        tokens_per_second: new tokens per second of `generate()`, median over prompts.
        tokens_per_second_spread: 10 % and 90 % quantile over prompts.
        speedup: ratio to plain `generate()` on the same prompt, median over prompts.
        speedup_spread: 10 % and 90 % quantile over prompts.
        equal: on how many prompts the output equals plain `generate()`'s; `None` when sampling.
    """

    acceptance_length: float | None
    tokens_per_second: float
    tokens_per_second_spread: tuple[float, float]
    speedup: float
    speedup_spread: tuple[float, float]
    equal: int | None


@dataclass
class Results:
    """
    The drafter on one set of prompts, greedy or sampling.

    Args:
        prompts: how many there were.
        acceptance_length, tokens_per_second, speedup, speedup_spread, equal: of the drafter as configured; see
            [`Speed`].
        plain_tokens_per_second: the same without a drafter.
        verification_waste: share of the verified draft tokens that were not committed.
        time: where the rounds of the drafter as configured spend their time; `None` if there was none.
        full_blocks: acceptance by position, confidence and thresholds.
        variants: [`Speed`] of every way of decoding, by its name in [`~hf_dspark.evaluation.variants.VARIANTS`].
    """

    prompts: int
    acceptance_length: float | None
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    speedup_spread: tuple[float, float]
    equal: int | None
    verification_waste: float | None
    time: TimeSplit | None
    full_blocks: FullBlocks
    variants: dict[str, Speed]


@dataclass
class SetResults:
    """
    Args:
        greedy: taking the most likely token.
        sample: sampling at temperature 1 from the whole vocabulary.
    """

    greedy: Results
    sample: Results


@dataclass
class Machine:
    """
    Args:
        device: name of the accelerator or processor.
        threads: CPU threads of torch.
        dtype: of the target.
        torch, transformers, hf_dspark: versions.
    """

    device: str
    threads: int
    dtype: str
    torch: str
    transformers: str
    hf_dspark: str


@dataclass
class Settings:
    """
    Args:
        max_new_tokens: length at which an answer is cut.
        num_draft_tokens: γ, tokens in a block.
        num_assistant_tokens, assistant_confidence_threshold: the drafter's scheduler (`None`: no limit).
        seed: of the sampling.
    """

    max_new_tokens: int
    num_draft_tokens: int
    num_assistant_tokens: int | None
    assistant_confidence_threshold: float | None
    seed: int


@dataclass
class Report:
    """
    Args:
        target, drafter: names of the two models.
        machine, settings: what it was measured on, and how.
        not_applicable: ways of decoding that were left out, and why.
        sets: results by the name of the set.
        schema_version: of this file.
    """

    schema_version: int = field(default=SCHEMA_VERSION, init=False)
    target: str
    drafter: str
    machine: Machine
    settings: Settings
    not_applicable: dict[str, str] = field(default_factory=dict)
    sets: dict[str, SetResults] = field(default_factory=dict)

    @property
    def has_confidence(self) -> bool:
        """Whether the drafter predicts its acceptance."""
        return any(
            blocks.confidence_overall is not None
            for results in self.sets.values()
            for blocks in (results.greedy.full_blocks, results.sample.full_blocks)
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write the JSON file, whole or not at all."""
        write_text(path, json.dumps(asdict(self), indent=2, allow_nan=False) + "\n")
