"""Schedulers admit a prefix, by the rule they are named after."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_dspark.scheduling.schedulers import ConfidenceThreshold, FixedLength

confidences = st.lists(st.floats(0, 1), min_size=1, max_size=8)


def admitted(scheduler, confidences) -> int:
    for k, confidence in enumerate(confidences):
        if not scheduler.admits(k, confidence):
            return k
    return len(confidences)


@given(confidences, st.integers(0, 8))
def test_fixed_length(confidences, length):
    assert admitted(FixedLength(length), confidences) == min(length, len(confidences))


@given(confidences, st.integers(0, 8), st.floats(0.01, 1))
def test_confidence_threshold(confidences, length, threshold):
    expected = next((k for k, c in enumerate(confidences) if c < threshold), len(confidences))
    assert admitted(ConfidenceThreshold(threshold, length), confidences) == min(length, expected)
