"""Acceptance, waste, thresholds and times, against values worked out by hand; and the trace that they come from."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from conftest import prompt, scripted_drafter, tiny_drafter, tiny_target
from hypothesis import given
from hypothesis import strategies as st

from hf_dspark import Round, acceptance_length, trace
from hf_dspark.evaluation.acceptance import (
    accepted_histogram,
    conditional_acceptance,
    judged,
    marginal_acceptance,
    threshold_sweep,
    time_split,
    verification_waste,
)
from hf_dspark.generation.trace import Seconds

# Three whole drafts, one cut short by the end of the text's room, one whose second token ended the text.
ROUNDS = [
    Round([1, 2, 3], [0.9, 0.8, 0.1], 3),
    Round([1, 2, 3], [0.9, 0.3, 0.7], 1),
    Round([1, 2, 3], [0.2, 0.9, 0.9], 0),
    Round([1], [0.6], 1),
    Round([1, 2, 3], [0.5, 0.6, 0.4], 1, ended=True),
]


def whole_drafts(slots: int = 4):
    """Rounds with drafts of `slots` tokens and their confidences."""
    confidences = st.lists(st.floats(0, 1), min_size=slots, max_size=slots)
    return st.lists(
        st.builds(Round, st.just(list(range(slots))), confidences, st.integers(0, slots)), min_size=1, max_size=12
    )


def test_judged_tokens_end_with_the_first_rejected_one():
    assert [judged(a_round) for a_round in ROUNDS] == [
        [True, True, True],
        [True, False],
        [False],
        [True],
        [True, True],
    ]


def test_acceptance_by_position():
    conditional = conditional_acceptance(ROUNDS, 4)
    assert conditional == [4 / 5, 2 / 3, 1.0, None]
    assert marginal_acceptance(conditional) == pytest.approx([4 / 5, 8 / 15, 8 / 15, None])
    assert accepted_histogram(ROUNDS, 3) == [1, 1, 0, 1]


@given(whole_drafts())
def test_marginal_acceptance_is_the_share_of_rounds_that_got_so_far(rounds):
    marginal = marginal_acceptance(conditional_acceptance(rounds, 4))
    share = [sum(a_round.accepted > k for a_round in rounds) / len(rounds) for k in range(4)]
    assert [found or 0 for found in marginal] == pytest.approx(share)
    assert 1 + sum(share) == pytest.approx(acceptance_length(rounds))


def test_verification_waste_counts_everything_that_was_verified():
    assert verification_waste(ROUNDS) == pytest.approx(1 - 7 / 13)  # 3 + 1 + 0 + 1 + 2 of 13
    assert verification_waste([Round([])]) is None


def test_threshold_sweep():
    found = threshold_sweep(ROUNDS, [0.0, 0.5, 0.95])
    assert [step.verified_per_step for step in found] == [13 / 5, (2 + 1 + 0 + 1 + 2) / 5, 0]
    assert [step.tokens_per_step for step in found] == [11 / 5, (3 + 2 + 1 + 2 + 2) / 5, 1]
    assert threshold_sweep([Round([1], [], 1)]) == []


@given(whole_drafts())
def test_a_higher_threshold_never_commits_or_verifies_more(rounds):
    sweep = threshold_sweep(rounds)
    assert sweep[0].tokens_per_step == pytest.approx(acceptance_length(rounds))
    for lower, higher in pairwise(sweep):
        assert higher.tokens_per_step <= lower.tokens_per_step
        assert higher.verified_per_step <= lower.verified_per_step


def test_time_split():
    split = time_split(
        [Round([], seconds=Seconds(0.01, 0.002, 0.03, 0.001)), Round([], seconds=Seconds(verify=0.057))]
    )
    assert (split.draft_ms, split.head_ms, split.verify_ms, split.rest_ms) == pytest.approx((5, 1, 43.5, 0.5))
    assert split.head_share == pytest.approx(0.02) and split.outside_share == pytest.approx(0.03)
    assert time_split([Round([1], [], 1)]) is None


def slow(function, seconds: float):
    def slowed(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)

    return slowed


def test_a_round_says_where_its_time_went(monkeypatch):
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    monkeypatch.setattr(target, "forward", slow(target.forward, 0.03))
    monkeypatch.setattr(drafter, "forward", slow(drafter.forward, 0.02))
    monkeypatch.setattr(drafter.markov_head, "step", slow(drafter.markov_head.step, 0.002))
    with trace(drafter) as rounds:
        begin = time.perf_counter()
        target.generate(prompt(5), assistant_model=drafter, max_new_tokens=20, do_sample=False)
        seconds = time.perf_counter() - begin
    assert sum(a_round.seconds.total for a_round in rounds) < seconds
    whole = [a_round.seconds for a_round in rounds if len(a_round.draft) == 5]
    assert len(whole) > 3
    assert all(found.verify >= 0.03 and found.draft >= 0.02 and found.head >= 0.01 for found in whole)
    shares = time_split(rounds)
    assert shares.rest_ms < shares.head_ms < shares.draft_ms < shares.verify_ms


@pytest.mark.parametrize("where", [8, 10, 11, 14])
def test_a_text_that_ends_within_a_draft(where):
    target = tiny_target("llama", seed=5)
    text = target.generate(prompt(5), max_new_tokens=20, do_sample=False)[0]
    end = text[where].item()
    assert end not in text[5:where].tolist(), "the text ends earlier: choose another place"
    drafter = scripted_drafter(target, text, accuracy=1.0)
    with trace(drafter) as rounds:
        out = target.generate(
            prompt(5), assistant_model=drafter, max_new_tokens=20, do_sample=False, eos_token_id=end, pad_token_id=0
        )
    assert out[0].tolist() == text[: where + 1].tolist()
    drafted = sum(1 + a_round.accepted for a_round in rounds)
    assert drafted == where - 5  # the first token came with the prompt
    assert all(flag for a_round in rounds for flag in judged(a_round)), "a drafted end of text is no rejection"
    assert rounds[-1].ended == ((where - 5) % 6 != 0)  # otherwise it is the target's own token that ends it
