"""How far confidences can be trusted: calibration error, ranking, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..generation.trace import Round
from .acceptance import judged
from .results import Calibration, Estimate, ReliabilityBin

BINS = 20
RESAMPLES = 500

# A measure of confidences (n,) and acceptances (n,) of 0 or 1, of which each counts as often as weights (n,) say.
Measure = Callable[[np.ndarray, np.ndarray, np.ndarray], float]


def bin_sums(confidence: np.ndarray, accepted: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, ...]:
    """Sums of confidence, acceptance and weight in each of 20 bins of equal width, (20,) each."""
    index = np.minimum((confidence * BINS).astype(int), BINS - 1)
    return tuple(
        np.bincount(index, values, minlength=BINS) for values in (weights * confidence, weights * accepted, weights)
    )


def expected_calibration_error(confidence: np.ndarray, accepted: np.ndarray, weights: np.ndarray) -> float:
    """Mean over tokens of the difference between mean confidence and share accepted in their bin."""
    predicted, observed, count = bin_sums(confidence, accepted, weights)
    return float(np.abs(predicted - observed).sum() / count.sum())


def brier_score(confidence: np.ndarray, accepted: np.ndarray, weights: np.ndarray) -> float:
    """Mean squared difference of confidence and acceptance."""
    return float((weights * (confidence - accepted) ** 2).sum() / weights.sum())


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


MEASURES: tuple[Measure, ...] = (expected_calibration_error, area_under_roc, brier_score)


def estimates(
    confidence: np.ndarray, accepted: np.ndarray, prompt: np.ndarray, resamples: int, seed: int
) -> list[Estimate]:
    """
    Each of `MEASURES` with its 95 % percentile bootstrap interval.

    Whole prompts are drawn, not tokens: those of one text resemble each other, and an interval that took them for
    independent would be too narrow.
    """
    index = np.unique(prompt, return_inverse=True)[1]
    prompts = index.max() + 1
    generator = np.random.default_rng(seed)
    resampled: list[list[float]] = [[] for _ in MEASURES]
    for _ in range(resamples if prompts > 1 else 0):
        weights = np.bincount(generator.integers(prompts, size=prompts), minlength=prompts)[index]
        for values, measure in zip(resampled, MEASURES):
            values.append(measure(confidence, accepted, weights))
    found = []
    for values, measure in zip(resampled, MEASURES):
        value = measure(confidence, accepted, np.ones(len(confidence)))
        defined = [one for one in values if np.isfinite(one)]
        low, high = np.percentile(defined, [2.5, 97.5]).tolist() if defined else (None, None)
        found.append(Estimate(value if np.isfinite(value) else None, (low, high) if defined else None))
    return found


def calibration(
    rounds_by_prompt: Sequence[Sequence[Round]], slot: int | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> Calibration:
    """
    Calibration of the confidences of one slot (from 0) of the block, or of all slots together.

    Args:
        rounds_by_prompt: for each prompt, rounds with confidences that verified whole blocks.
    """
    rows = [
        (confidence, accepted, number)
        for number, rounds in enumerate(rounds_by_prompt)
        for a_round in rounds
        for k, (confidence, accepted) in enumerate(zip(a_round.confidence, judged(a_round)))
        if slot in (None, k)
    ]
    if not rows:
        nothing = Estimate(None, None)
        return Calibration(0, 0, nothing, nothing, nothing, [])
    confidence, accepted, prompt = np.array(sorted(rows)).T  # sorted once, for the sake of every later sort
    ece, auc, brier = estimates(confidence, accepted, prompt, resamples, seed)
    bins = [
        ReliabilityBin(float(predicted / count), float(observed / count), int(count))
        for predicted, observed, count in zip(*bin_sums(confidence, accepted, np.ones(len(rows))))
        if count
    ]
    return Calibration(len(rows), int(accepted.sum()), ece, auc, brier, bins)
