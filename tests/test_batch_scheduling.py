"""Schedules of many rows: the best of all when greedy, causal when sampling, shorter as there are more."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduling import CURVES, ROWS, P, Q, confidence, slots_of, verified
from test_scheduling import decide as decide_one

from hf_dspark.scheduling.batch import BatchScheduler, EachRow, HardwareAwareBatch, allot
from hf_dspark.scheduling.costs import RoundCosts
from hf_dspark.scheduling.experience import Experience
from hf_dspark.scheduling.hardware_aware import HardwareAware
from hf_dspark.scheduling.schedulers import ConfidenceThreshold, FixedLength


def decide(scheduler: BatchScheduler, confidences, do_sample: bool = True, rooms=None) -> tuple[list[int], list[int]]:
    """How many tokens of each row a round may draft, and verifies; asked as the drafter asks."""
    limits = scheduler.limits(rooms or [len(row) for row in confidences])
    counts, going = [0] * len(limits), list(range(len(limits)))
    for k in range(max(limits)):
        going = [row for row in going if k < limits[row]]
        if not going or not scheduler.goes_on(k):
            break
        admitted = scheduler.admits(k, going, [confidences[row][k] for row in going])
        going = [row for row, yes in zip(going, admitted, strict=True) if yes]
        for row in going:
            counts[row] = k + 1
        if not going:
            break
    return limits, counts if do_sample or not any(limits) else scheduler.keep(counts)


# The optimum


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(0, 1), min_size=9, max_size=9),
    st.floats(0.1, 3),
)
def test_the_allotment_is_the_best_of_all(confidences, steps, rate):
    survivals = np.cumprod(confidences, axis=1)
    seconds = np.cumsum([1.0, *steps])
    lengths = allot(survivals, seconds, rate)

    def value(lengths):
        tokens = sum(row[:n].sum() for row, n in zip(survivals, lengths, strict=True))
        return tokens - rate * seconds[sum(lengths)]

    best = max(value(lengths) for lengths in itertools.product(range(4), repeat=len(survivals)))
    assert value(lengths) == pytest.approx(best)


def test_rows_without_a_token_get_none():
    survivals = np.array([[0.9, 0.8], [0.9, -1.0], [-1.0, -1.0]])
    assert allot(survivals, np.zeros(7), 1.0).tolist() == [2, 1, 0]


@settings(max_examples=30, deadline=None)
@given(st.booleans(), st.integers(0, 10**6), st.sampled_from(sorted(CURVES)))
def test_a_batch_of_one_is_scheduled_as_one_sequence(do_sample, seed, curve):
    costs, draw = CURVES[curve], random.Random(seed)
    one, many = HardwareAware(costs, 2, do_sample), HardwareAwareBatch(lambda rows: costs, 2, do_sample)
    for _ in range(60):
        confidences = [draw.random() for _ in range(draw.choice((1, 2, 2, 2)))]
        limit, count = decide_one(one, confidences, do_sample)
        assert decide(many, [confidences], do_sample) == ([limit], [count])
        accepted, seconds = draw.randint(0, count), draw.uniform(0.5, 2)
        one.observe(count, accepted, seconds)
        many.observe([count], [accepted], seconds)


@given(st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=5), min_size=1, max_size=4), st.floats(0.01, 1))
def test_each_row_for_itself(confidences, threshold):
    assert decide(EachRow(FixedLength(3)), confidences)[1] == [min(3, len(row)) for row in confidences]
    expected = [next((k for k, c in enumerate(row) if c < threshold), len(row)) for row in confidences]
    assert decide(EachRow(ConfidenceThreshold(threshold, 8)), confidences)[1] == expected


# The distribution of two rows' output, by enumeration; tokens and confidences as in test_scheduling. A row that keeps
# its token because of what follows it, in itself or in its neighbour, gains one of the two.


def causal(scheduler: BatchScheduler, drafts, limits) -> list[int]:
    counts, going = [0, 0], [0, 1]
    for k in range(max(limits)):
        if not scheduler.goes_on(k):
            break
        asked = [confidence(drafts[row][:k]) for row in going]
        going = [row for row, yes in zip(going, scheduler.admits(k, going, asked), strict=True) if yes]
        for row in going:
            counts[row] = k + 1
        if not going:
            break
    return counts


def anticipating(scheduler: BatchScheduler, drafts, limits) -> list[int]:
    """Wrong: all confidences are known before the first token is kept; right only when greedy."""
    for k in range(max(limits)):
        scheduler.admits(k, [0, 1], [confidence(draft[:k]) for draft in drafts])
    return scheduler.keep(limits)


def first_tokens(scheduler: BatchScheduler, choose) -> dict[tuple[int, int], float]:
    """Exact joint distribution of the tokens that two rows commit first in a round."""
    total: dict[tuple[int, int], float] = {}
    pairs = list(itertools.product(range(2), repeat=2))
    for drafts in itertools.product(pairs, repeat=2):
        mass = np.prod([Q[token] for draft in drafts for token in draft])
        asked = copy.deepcopy(scheduler)
        limits = asked.limits([2, 2])
        counts = choose(asked, drafts, limits) if any(limits) else [0, 0]
        outcomes = [list(verified(draft[:count])) for draft, count in zip(drafts, counts, strict=True)]
        for (one, p, _), (other, q, _) in itertools.product(*outcomes):
            key = one[0], other[0]
            total[key] = total.get(key, 0.0) + mass * p * q
    return total


def shift(distribution) -> float:
    pairs = itertools.product(range(2), repeat=2)
    return max(abs(distribution.get((one, other), 0.0) - P[one] * P[other]) for one, other in pairs)


STEEP = RoundCosts(draft=0.0, verify=(1.0, 1.45, 1.9, 2.0, 2.05))  # of two rows, by draft tokens of both


def costs_of_two(curve: RoundCosts):
    return curve.in_proportion if len(curve.verify) == 3 else lambda rows: curve


def scheduler_of(curve: RoundCosts, rounds: int, do_sample: bool = True) -> HardwareAwareBatch:
    """After so many rounds of a past that it has learned from."""
    scheduler, draw = HardwareAwareBatch(costs_of_two(curve), 2, do_sample), random.Random(rounds)
    for _ in range(rounds):
        first = [draw.choice((0.7, 0.8, 0.9)) for _ in range(2)]
        _, counts = decide(scheduler, [[c, draw.choice((0.0, 0.9))] for c in first], do_sample)
        scheduler.observe(counts, [draw.randint(0, count) for count in counts], draw.uniform(0.5, 3))
    return scheduler


@pytest.mark.parametrize("curve", [STEEP, ROWS, *CURVES.values()], ids=["steep for two", "rows", *CURVES])
@pytest.mark.parametrize("rounds", [0, 1, 7, 40])
def test_two_rows_have_the_targets_distribution(curve, rounds):
    assert shift(first_tokens(scheduler_of(curve, rounds), causal)) < 1e-12


def test_the_schedule_of_two_rows_depends_on_the_confidences_of_both():
    """So the enumeration is of a scheduler that decides something."""
    lengths = set()
    for drafts in itertools.product(itertools.product(range(2), repeat=2), repeat=2):
        scheduler = scheduler_of(STEEP, 0)
        limits = scheduler.limits([2, 2])
        lengths.add(tuple(causal(scheduler, drafts, limits)))
    assert len(lengths) > 2


def test_a_schedule_that_looks_ahead_is_caught():
    assert shift(first_tokens(scheduler_of(STEEP, 0, do_sample=False), anticipating)) > 0.02


# Load


def linear(rows: int) -> RoundCosts:
    """A machine that verifies two tokens for nothing and is busy beyond."""
    verify = tuple(1.0 + 0.12 * max(rows + drafts - 2, 0) for drafts in range(5 * rows + 1))
    return RoundCosts(draft=0.1 + 0.02 * rows, verify=verify)


def play(scheduler, rows: int, length: int, accuracy: float, costs=linear) -> tuple[float, float]:
    """Mean verified length, and tokens per second until texts of that length have ended, confidences being true."""
    draw, left, lengths, seconds = random.Random(0), [length] * rows, [], 0.0
    while left:
        confidences = [[min(max(draw.gauss(accuracy, 0.2), 0.02), 0.98) for _ in range(5)] for _ in left]
        limits, counts = decide(scheduler, confidences, scheduler.do_sample, rooms=[tokens - 1 for tokens in left])
        accepted = []
        for row, count in zip(confidences, counts, strict=True):
            accepted.append(next((k for k in range(count) if draw.random() > row[k]), count))
        here = costs(len(left))
        spent = here.verify[sum(counts)] + here.overhead + (here.draft if any(limits) else 0)
        scheduler.observe(counts, accepted, spent)
        lengths += counts
        seconds += spent
        left = [tokens - 1 - more for tokens, more in zip(left, accepted, strict=True)]
        scheduler.select([row for row, tokens in enumerate(left) if tokens > 0])
        left = [tokens for tokens in left if tokens > 0]
    return sum(lengths) / len(lengths), rows * length / seconds


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_busier_the_less_of_each_row(do_sample):
    lengths = [play(HardwareAwareBatch(linear, 5, do_sample), rows, 150, 0.7)[0] for rows in (1, 2, 4, 16)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 1.5 * lengths[-1]


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("do_sample", [False, True])
def test_never_much_worse_than_plain_or_any_fixed_length(rows, do_sample):
    length = 9600 // rows
    for accuracy in (0.1, 0.5, 0.8):
        _, ours = play(HardwareAwareBatch(linear, 5, do_sample), rows, length, accuracy)
        fixed = []
        for drafts in range(6):
            scheduler = EachRow(FixedLength(drafts))
            scheduler.do_sample = True
            fixed.append(play(scheduler, rows, length, accuracy)[1])
        assert ours > 0.97 * max(fixed)


@pytest.mark.parametrize(("rooms", "more"), [((100, 100), False), ((60, 40), True), ((600, 580), False)])
def test_rows_that_are_behind_get_more(rooms, more):
    """The others would have to wait for them, unless there is time to catch up."""
    costs = RoundCosts(draft=0.2, verify=(1.0, *(1.1 + 0.1 * n for n in range(10))))
    scheduler = HardwareAwareBatch(lambda rows: costs, 5, do_sample=False)
    _, counts = decide(scheduler, [[0.7] * 5] * 2, False, rooms=list(rooms))
    assert min(counts) > 0 and (counts[0] > counts[1]) == more


def test_rows_that_are_slow_get_more():
    """Drafts of one text are as good as they look, and always short; so it takes longer for as much as is left."""
    costs = RoundCosts(draft=0.2, verify=tuple(1 + 0.1 * n for n in range(11)))
    scheduler, draw = HardwareAwareBatch(lambda rows: costs, 5, do_sample=False), random.Random(0)
    for _ in range(60):
        confidences = [[0.7, 0.1, 0.1, 0.1, 0.1], [0.7] * 5]
        _, counts = decide(scheduler, confidences, False, rooms=[200, 200])
        right = [[draw.random() < c for c in row[:count]] for row, count in zip(confidences, counts, strict=True)]
        scheduler.observe(counts, [[*row, False].index(False) for row in right], 1.2 + 0.1 * sum(counts))
    counts = [0, 0]
    while not any(counts):
        _, counts = decide(scheduler, [[0.7] * 5] * 2, False, rooms=[200, 200])
    assert counts[0] >= counts[1] + 2


@pytest.mark.parametrize("do_sample", [False, True])
def test_heads_come_to_no_slot_where_nothing_is_expected_of_any_row(do_sample):
    costs = RoundCosts(0.3, tuple(1 + 0.05 * n for n in range(13)), head=0.05)

    def heads_run(*likely: int) -> int:
        scheduler, most = HardwareAwareBatch(lambda rows: costs, 6, do_sample), 0
        slots = slots_of(scheduler)
        for _ in range(60):
            slots.clear()
            confidences = [[0.9] * count + [0.02] * (6 - count) for count in likely]
            _, counts = decide(scheduler, confidences, do_sample, rooms=[100, 100])
            scheduler.observe(counts, [min(pair) for pair in zip(counts, likely, strict=True)], 1.4)
            most = len(slots) or most
        return most

    assert heads_run(1, 2) == 2 and heads_run(5, 5) >= 5


def test_batches_that_gain_only_for_some_rows_lose_three_percent_at_most():
    """Drafts of all rows but one are right, and none of that one, which the batch waits for."""
    costs = RoundCosts(draft=0.4, verify=tuple(1 + 0.02 * n for n in range(21)))
    experience, seconds = Experience(5), 0.0
    for _ in range(20):
        scheduler, left = HardwareAwareBatch(lambda rows: costs, 5, True, experience), np.full(4, 60)
        while len(left):
            limits, counts = decide(scheduler, [[0.6] * 5] * len(left), True, rooms=(left - 1).tolist())
            accepted = [0 if row == 0 else min(2, count) for row, count in enumerate(counts)]
            spent = costs.verify[sum(counts)] + (costs.draft if any(limits) else 0)
            scheduler.observe(counts, accepted, spent)
            staying = np.flatnonzero(left > 1 + np.array(accepted))
            scheduler.select(staying.tolist())
            left, seconds = (left - 1 - accepted)[staying], seconds + spent
    assert seconds < 1.03 * 20 * 60


@pytest.mark.parametrize("do_sample", [False, True])
def test_what_confidences_of_a_text_are_worth_is_its_own(do_sample):
    """All have the same confidences; those of one text are right, and nothing comes of the others', wherever it is."""
    costs = RoundCosts(draft=0.3, verify=tuple(1 + 0.1 * n for n in range(16)))
    scheduler, texts = HardwareAwareBatch(lambda rows: costs, 5, do_sample), ["right", "wrong", "wrong"]
    for _ in range(60):
        _, counts = decide(scheduler, [[0.6] * 5] * 3, do_sample)
        scheduler.observe(counts, [count * (text == "right") for count, text in zip(counts, texts, strict=True)], 1.5)
    scheduler.select([2, 0])
    while True:
        limits, (wrong, right) = decide(scheduler, [[0.6] * 5] * 2, do_sample)
        if any(limits):  # no round to compare with
            break
        scheduler.observe([0, 0], [0, 0], 1.0)
    assert right >= wrong + 3


def test_rows_of_blocks_without_confidences():
    costs = RoundCosts(1.2, tuple(2 + 0.02 * n for n in range(13)), row=0.15)
    scheduler = HardwareAwareBatch(lambda rows: costs, 6, do_sample=True)
    limits = []
    for _ in range(300):
        limit, counts = decide(scheduler, [[None] * 6] * 2, True)
        scheduler.observe(counts, [min(count, 2) for count in counts], 3.0)
        limits.append(max(limit))
    assert limits[-50:].count(2) > 40


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("do_sample", [False, True])
def test_rows_of_blocks_are_computed_as_far_as_they_are_worth_it(rows, do_sample):
    def costs(rows: int) -> RoundCosts:
        return RoundCosts(
            0.6 * rows, tuple(rows + 0.02 * n for n in range(6 * rows + 1)), row=0.05 * rows, head=0.03 * rows
        )

    scheduler = HardwareAwareBatch(costs, 6, do_sample)
    for likely, expected in ((2, 2), (6, 6)):
        confidences = [[0.95] * likely + [0.05] * (6 - likely)] * rows
        limits = []
        for _ in range(500):
            limit, counts = decide(scheduler, confidences, do_sample)
            here = costs(rows)
            left_out = (6 - max(limit)) * (here.row + here.head)
            spent = here.verify[sum(counts)] + (here.draft - left_out if any(limit) else 0)
            scheduler.observe(counts, [min(count, likely) for count in counts], spent)
            limits.append(max(limit))
        drafted = [limit for limit in limits[-100:] if limit]
        assert drafted.count(expected) > 0.85 * len(drafted) > 50


def test_costs_in_proportion():
    one = RoundCosts(draft=0.5, verify=(1.0, 1.2, 1.6), overhead=0.1, row=0.05, head=0.02)
    three = one.in_proportion(3)
    assert (three.draft, three.overhead, three.row, three.head) == pytest.approx((1.5, 0.3, 0.15, 0.06))
    assert three.verify == pytest.approx((3.0, 3.2, 3.4, 3.6, 4.0, 4.4, 4.8))
    assert one.in_proportion(1) == one
