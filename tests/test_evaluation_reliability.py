"""Calibration measures against their definitions, and intervals that know what was drawn."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dspark import Round
from hf_dspark.evaluation.reliability import (
    MEASURES,
    area_under_roc,
    brier_score,
    expected_calibration_error,
    reliability_of,
)

tokens = st.lists(
    st.tuples(st.sampled_from([k / 16 for k in range(17)]), st.booleans(), st.integers(1, 3)), min_size=1, max_size=30
)


def arrays(rows) -> tuple[np.ndarray, ...]:
    return tuple(np.array(column, dtype=float) for column in zip(*rows))


@given(tokens)
def test_auc_is_the_share_of_pairs_in_the_right_order(rows):
    pairs = [
        (1.0 if high > low else 0.5 if high == low else 0.0, times * others)
        for (high, accepted, times), (low, rejected, others) in product(rows, rows)
        if accepted and not rejected
    ]
    found = area_under_roc(*arrays(rows))
    if pairs:
        assert found == pytest.approx(np.average([score for score, _ in pairs], weights=[n for _, n in pairs]))
    else:
        assert np.isnan(found)


@given(tokens)
def test_weights_count_tokens(rows):
    confidence, accepted, weights = arrays(rows)
    repeated = [np.repeat(values, weights.astype(int)) for values in (confidence, accepted)]
    for measure in MEASURES:
        assert measure(confidence, accepted, weights) == pytest.approx(
            measure(*repeated, np.ones(len(repeated[0]))), nan_ok=True
        )


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=9))
def test_calibrated_confidences_have_no_error(shares):
    rows = [(min(a, n) / n, k < min(a, n), 1) for a, n in shares for k in range(n)]
    assert expected_calibration_error(*arrays(rows)) == pytest.approx(0, abs=1e-12)


def test_by_hand():
    rows = [(0.12, 0, 1), (0.14, 1, 1), (0.96, 1, 1), (1.0, 0, 1)]  # two bins of two
    # |0.13 - 0.5| and |0.98 - 0.5|, each with half of the tokens
    assert expected_calibration_error(*arrays(rows)) == pytest.approx((0.37 + 0.48) / 2)
    assert brier_score(*arrays(rows)) == pytest.approx((0.12**2 + 0.86**2 + 0.04**2 + 1) / 4)
    assert area_under_roc(*arrays(rows)) == pytest.approx(2 / 4)


def draws(prompts: int, rounds: int, seed: int = 0) -> list[list[Round]]:
    """Drafts of two tokens whose confidences are right, but the prompts of different difficulty."""
    rng = np.random.default_rng(seed)
    found: list[list[Round]] = []
    for _ in range(prompts):
        ease = rng.random()
        found.append([])
        for _ in range(rounds):
            confidence = (ease + rng.random(2)) / 2
            accepted = int((rng.random(2) < confidence).cumprod().sum())
            found[-1].append(Round([1, 2], confidence.tolist(), accepted))
    return found


def test_only_judged_tokens_count():
    rounds = [[Round([1, 2, 3], [0.9, 0.2, 0.7], 1)], [Round([1, 2, 3], [0.8, 0.6, 0.4], 3)]]
    assert [(found.judged, found.accepted) for found in (reliability_of(rounds, slot) for slot in range(3))] == [
        (2, 2),
        (2, 1),
        (1, 1),
    ]
    everything = reliability_of(rounds)
    assert (everything.judged, everything.accepted) == (5, 4)
    assert everything.auc.value == 1.0  # the rejected one has the lowest confidence
    assert reliability_of(rounds, 0).auc.value is None and reliability_of(rounds, 0).auc.interval is None
    assert [(one.confidence, one.acceptance, one.count) for one in reliability_of(rounds, 1).bins] == [
        (0.2, 0.0, 1),
        (0.6, 1.0, 1),
    ]
    assert reliability_of([[Round([])]]).ece.value is None


def test_intervals_are_reproducible_and_hold_the_value():
    found = reliability_of(draws(30, 20), 0)
    assert found == reliability_of(draws(30, 20), 0)
    for measure in (found.auc, found.brier):
        assert measure.interval[0] < measure.value < measure.interval[1]
    assert found.ece.value < 0.1


def test_intervals_are_over_prompts():
    """Seeing every round twice tells nothing new, so the interval stays as wide."""
    once, twice = draws(12, 10), [rounds * 2 for rounds in draws(12, 10)]
    for name in ("ece", "auc", "brier"):
        before, after = (getattr(reliability_of(rounds, 0), name).interval for rounds in (once, twice))
        assert after == pytest.approx(before)
    assert reliability_of(draws(1, 10), 0).brier.interval is None


def test_intervals_cover():
    """Of 95 % intervals for the Brier score, about that share holds what many prompts give."""
    truth = reliability_of(draws(2000, 10, seed=99), 0, count=0).brier.value
    inside = 0
    for seed in range(40):
        low, high = reliability_of(draws(40, 10, seed), 0, count=200).brier.interval
        inside += low <= truth <= high
    assert 33 <= inside <= 40
