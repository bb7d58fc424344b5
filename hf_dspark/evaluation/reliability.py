"""How far confidences can be trusted: calibration error, ranking, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..generation.trace import Round
from ..scheduling.calibration import bin_sums, expected_calibration_error, sigmoid
from .acceptance import judged
from .results import Estimate, Reliability, ReliabilityBin

RESAMPLES = 500
CERTAIN = 1e-6  # no confidence counts as closer to 0 or 1 in the log loss

# A measure of confidences (n,) and acceptances (n,) of 0 or 1, of which each counts as often as weights (n,) say.
Measure = Callable[[np.ndarray, np.ndarray, np.ndarray], float]


def brier_score(confidence: np.ndarray, accepted: np.ndarray, weights: np.ndarray) -> float:
    """Mean squared difference of confidence and acceptance."""
    return float((weights * (confidence - accepted) ** 2).sum() / weights.sum())


def log_losses(confidence: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Negative log likelihood of each acceptance, in nats."""
    confidence = confidence.clip(CERTAIN, 1 - CERTAIN)
    return -np.where(accepted > 0, np.log(confidence), np.log1p(-confidence))


def log_loss(confidence: np.ndarray, accepted: np.ndarray, weights: np.ndarray) -> float:
    """Mean negative log likelihood of the acceptances, in nats."""
    return float((weights * log_losses(confidence, accepted)).sum() / weights.sum())


def area_under_roc(confidence: np.ndarray, accepted: np.ndarray, weights: np.ndarray) -> float:
    """
    Probability that an accepted token has a higher confidence than a rejected one, ties counting half; NaN unless
    there are both.
    """
    order = np.argsort(confidence, kind="stable")
    confidence = confidence[order]
    ties = np.flatnonzero(np.diff(confidence, prepend=-1))  # where each run of equal confidences starts
    positive = np.add.reduceat((weights * accepted)[order], ties)
    negative = np.add.reduceat((weights * (1 - accepted))[order], ties)
    pairs = positive.sum() * negative.sum()
    below = negative.cumsum() - negative
    return float((positive * (below + negative / 2)).sum() / pairs) if pairs else float("nan")


MEASURES: tuple[Measure, ...] = (expected_calibration_error, area_under_roc, brier_score, log_loss)


def resamples(prompt: np.ndarray, count: int, seed: int) -> Iterator[np.ndarray]:
    """
    Bootstrap weights of tokens (n,), given the prompt that each belongs to; nothing where there is a single prompt.

    Whole prompts are drawn, not tokens: those of one text resemble each other, and an interval that took them for
    independent would be too narrow.
    """
    index = np.unique(prompt, return_inverse=True)[1]
    prompts = index.max() + 1
    generator = np.random.default_rng(seed)
    for _ in range(count if prompts > 1 else 0):
        yield np.bincount(generator.integers(prompts, size=prompts), minlength=prompts)[index]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % percentile interval of bootstrapped values, as far as they are defined."""
    defined = [value for value in values if np.isfinite(value)]
    return tuple(np.percentile(defined, [2.5, 97.5]).tolist()) if defined else None


def reliability(
    confidence: np.ndarray, accepted: np.ndarray, prompt: np.ndarray, count: int = RESAMPLES, seed: int = 0
) -> Reliability:
    """
    How far confidences (n,) can be trusted.

    Args:
        accepted: 0 or 1, (n,).
        prompt: what is drawn in the bootstrap, (n,).
        count: of its samples.
    """
    if not len(confidence):
        nothing = Estimate(None, None)
        return Reliability(0, 0, nothing, nothing, nothing, nothing, [])
    order = np.lexsort((prompt, accepted, confidence))  # sorted once, for the sake of every later sort
    confidence, accepted, prompt = confidence[order], accepted[order], prompt[order]
    once = np.ones(len(confidence))
    weightings = list(resamples(prompt, count, seed))

    def estimate(measure: Measure) -> Estimate:
        value = measure(confidence, accepted, once)
        drawn = [measure(confidence, accepted, weights) for weights in weightings]
        return Estimate(value if np.isfinite(value) else None, interval(drawn))

    bins = [
        ReliabilityBin(float(predicted / size), float(observed / size), int(size))
        for predicted, observed, size in zip(*bin_sums(confidence, accepted, once))
        if size
    ]
    return Reliability(
        judged=len(confidence),
        accepted=int(accepted.sum()),
        ece=estimate(expected_calibration_error),
        auc=estimate(area_under_roc),
        brier=estimate(brier_score),
        log_loss=estimate(log_loss),
        bins=bins,
    )


def reliability_of(
    rounds_by_prompt: Sequence[Sequence[Round]],
    slot: int | None = None,
    before: bool = False,
    count: int = RESAMPLES,
) -> Reliability:
    """
    Reliability of the confidences of one slot (from 0) of the block, or of all slots together.

    Args:
        rounds_by_prompt: for each prompt, rounds with confidences that verified whole blocks.
        before: of what the confidence head said before it was calibrated, instead.
        count: samples of the bootstrap.
    """
    rows = [
        (confidence, accepted, number)
        for number, rounds in enumerate(rounds_by_prompt)
        for a_round in rounds
        for k, (confidence, accepted) in enumerate(
            zip(sigmoid(np.array(a_round.logit)) if before else a_round.confidence, judged(a_round))
        )
        if slot in (None, k)
    ]
    confidence, accepted, prompt = np.array(rows, dtype=float).reshape(-1, 3).T
    return reliability(confidence, accepted, prompt, count)
