"""Schedulers do what they are named after, lose no more than they say, and leave the target's distribution alone."""

from __future__ import annotations

import copy
import itertools
import math
import random

import pytest
from conftest import tiny_drafter, tiny_target
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_dspark.generation.candidate_generator import scheduler_of
from hf_dspark.scheduling.costs import RoundCosts
from hf_dspark.scheduling.experience import Experience
from hf_dspark.scheduling.hardware_aware import HardwareAware
from hf_dspark.scheduling.ledger import ALLOWANCE, STAKE, Ledger
from hf_dspark.scheduling.schedulers import ConfidenceThreshold, FixedLength, Scheduler

confidences = st.lists(st.floats(0, 1), min_size=1, max_size=8)


def decide(scheduler: Scheduler, confidences, do_sample: bool = True) -> tuple[int, int]:
    """How many tokens a round may draft, and how many it verifies; asked as the candidate generator asks."""
    limit = count = scheduler.limit(len(confidences))
    for k in range(limit):
        if not scheduler.goes_on(k) or not scheduler.admits(k, confidences[k]):
            count = k
            break
    return limit, count if do_sample or not limit else scheduler.keep(count)


@given(confidences, st.integers(0, 8))
def test_fixed_length(confidences, length):
    assert decide(FixedLength(length), confidences)[1] == min(length, len(confidences))


@given(confidences, st.integers(0, 8), st.floats(0.01, 1))
def test_confidence_threshold(confidences, length, threshold):
    expected = next((k for k, c in enumerate(confidences) if c < threshold), len(confidences))
    assert decide(ConfidenceThreshold(threshold, length), confidences)[1] == min(length, expected)


def test_the_drafters_settings_choose_the_scheduler():
    drafter = tiny_drafter(tiny_target("llama"))
    config = drafter.generation_config
    assert scheduler_of(drafter) == FixedLength(5), "nothing is known of this machine"
    drafter.round_costs = RoundCosts(draft=0.1, verify=(1.0,) * 6)
    for do_sample in (False, True):
        scheduler = scheduler_of(drafter, do_sample)
        assert isinstance(scheduler, HardwareAware)
        assert (scheduler.length, scheduler.do_sample) == (5, do_sample)
    config.num_assistant_tokens = 2
    assert scheduler_of(drafter) == FixedLength(2)
    config.assistant_confidence_threshold = 0.4
    assert scheduler_of(drafter) == ConfidenceThreshold(0.4, 2)
    config.num_assistant_tokens = None
    assert scheduler_of(drafter) == ConfidenceThreshold(0.4, 5)


# The distribution of the output, by enumeration. Two tokens, A and B, of probability P in the text and Q in drafts of
# at most two tokens. The first is accepted with probability sum(min(P, Q)) = .8; of the second the confidence says .9
# after A and 0 after B. Verifying 1, 2 or 3 tokens takes 1, 2 or 2.22 seconds. Who looks at the second confidence
# before admitting the first token verifies drafts that begin with A, and drops the others: A gains.

P, Q = (0.7, 0.3), (0.5, 0.5)
STEEP = RoundCosts(draft=0.0, verify=(1.0, 1 / 0.5, 1 / 0.45))
CURVES = {
    "steep": STEEP,
    "flat": RoundCosts(draft=0.1, verify=(1.0, 1.0, 1.0)),
    "cliff": RoundCosts(draft=0.1, verify=(1.0, 1.7, 1.75), error=0.1),
    "late cliff": RoundCosts(draft=0.1, verify=(1.0, 1.05, 2.2)),
    "dear": RoundCosts(draft=0.9, verify=(1.0, 1.1, 1.2), overhead=0.1),
}
ROWS = RoundCosts(draft=0.5, verify=(1.0, 1.05, 1.1), row=0.2, head=0.05)  # what the draft takes depends on its length


def confidence(drafted: tuple[int, ...]) -> float:
    return (0.8, 0.9, 0.0)[0 if not drafted else 1 + drafted[0]]


def causal(scheduler: Scheduler, draft: tuple[int, ...], limit: int) -> int:
    """How many tokens of a draft go to verification when the scheduler is asked as the generator asks."""
    for k in range(limit):
        if not scheduler.goes_on(k) or not scheduler.admits(k, confidence(draft[:k])):
            return k
    return limit


def anticipating(scheduler: Scheduler, draft: tuple[int, ...], limit: int) -> int:
    """Wrong: the best length of the draft, all confidences known; right only when greedy."""
    for k in range(limit):
        scheduler.admits(k, confidence(draft[:k]))
    return scheduler.keep(limit)


def verified(draft: tuple[int, ...]):
    """What verification commits of a draft, with the probability and the number of accepted tokens."""
    mass = 1.0
    residual = [max(p - q, 0) for p, q in zip(P, Q, strict=True)]
    for k, token in enumerate(draft):
        accept = min(1, P[token] / Q[token])
        for other in range(2):
            replaced = mass * (1 - accept) * residual[other] / sum(residual)
            if replaced:
                yield (*draft[:k], other), replaced, k
        mass *= accept
    for last in range(2):
        yield (*draft, last), mass * P[last], len(draft)


def texts(scheduler: Scheduler, choose, length: int, text=(), mass=1.0) -> dict[tuple[int, ...], float]:
    """Exact distribution of the first `length` tokens, over as many rounds as they take."""
    if len(text) >= length:
        return {text[:length]: mass}
    total: dict[tuple[int, ...], float] = {}
    for draft in itertools.product(range(2), repeat=2):
        drafter_mass = mass * Q[draft[0]] * Q[draft[1]]
        before = copy.deepcopy(scheduler)
        limit = before.limit(2)
        count = choose(before, draft, limit) if limit else 0
        for committed, probability, accepted in verified(draft[:count]):
            after = copy.deepcopy(before)
            after.observe(count, accepted, 1.0 + count + len(committed) * text.count(0))
            for end, m in texts(after, choose, length, text + committed, drafter_mass * probability).items():
                total[end] = total.get(end, 0.0) + m
    return total


def shift(distribution: dict[tuple[int, ...], float], length: int) -> float:
    """Largest difference from the target's distribution of texts."""
    return max(
        abs(distribution.get(text, 0.0) - P[0] ** text.count(0) * P[1] ** text.count(1))
        for text in itertools.product(range(2), repeat=length)
    )


SCHEDULERS = {
    "fixed": lambda: FixedLength(2),
    "threshold": lambda: ConfidenceThreshold(0.5, 2),
    **{name: lambda costs=costs: HardwareAware(costs, 2, do_sample=True) for name, costs in CURVES.items()},
    "dear rows": lambda: settled(HardwareAware(ROWS, 2, do_sample=True), 1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_enumerated_texts_have_the_targets_distribution(name):
    assert shift(texts(SCHEDULERS[name](), causal, 3), 3) < 1e-12


def test_the_steep_schedule_depends_on_the_confidences():
    """So the enumeration is of a scheduler that decides something."""
    lengths = []
    for first in (0, 1):
        scheduler = HardwareAware(STEEP, 2, do_sample=True)
        lengths.append(causal(scheduler, (first, 0), scheduler.limit(2)))
    assert lengths == [2, 1]


def test_a_scheduler_that_looks_ahead_is_caught():
    def impatient() -> HardwareAware:  # stakes nothing on what later drafts may bring
        return HardwareAware(STEEP, 2, do_sample=False)

    distribution = texts(impatient(), anticipating, 1)
    assert distribution[(0,)] == pytest.approx(0.85)
    assert shift(texts(impatient(), anticipating, 3), 3) > 0.05


# What is chosen.


def play(
    scheduler: HardwareAware, costs: RoundCosts, accepts, rounds: int, confidences, noise: float = 0.0, reading=0.0
) -> list:
    """
    Decode on a machine of such `costs`, where a draft takes `reading` longer for each round without one before it, and
    `accepts(round)` drafts are right; (committed, seconds, limit) a round.
    """
    played, missed, draw = [], 0, random.Random(0)
    for place in range(rounds):
        limit, count = decide(scheduler, confidences, scheduler.do_sample)
        accepted = min(count, accepts(place))
        left_out = (len(costs.verify) - 1 - limit) * costs.row
        seconds = costs.verify[count] + costs.overhead + (costs.draft - left_out + reading * missed if limit else 0)
        missed = 0 if limit else missed + 1
        scheduler.observe(count, accepted, seconds * draw.lognormvariate(0, noise))
        played.append((1 + accepted, seconds, limit))
    return played


def settled(scheduler: HardwareAware, accepted: int) -> HardwareAware:
    """After a while in which so many tokens of each draft were right, as was foreseen."""
    sure = [1.0 if k < accepted else 0.01 for k in range(scheduler.length)]
    play(scheduler, scheduler.costs, lambda _: accepted, 100, sure)
    return scheduler


def draft_length(scheduler: HardwareAware, confidences) -> int:
    limit, count = decide(scheduler, confidences, scheduler.do_sample)
    while limit == 0:  # a round to compare with
        scheduler.observe(0, 0, scheduler.plain)
        limit, count = decide(scheduler, confidences, scheduler.do_sample)
    return count


@pytest.mark.parametrize("do_sample", [False, True])
def test_length_follows_confidence_and_costs(do_sample):
    cheap = RoundCosts(draft=0.2, verify=(1.0, 1.01, 1.02, 1.03, 1.04))
    dear = RoundCosts(draft=0.2, verify=(1.0, 1.3, 1.6, 1.9, 2.2))
    unsure = [0.9, 0.6, 0.2, 0.1]
    assert draft_length(settled(HardwareAware(cheap, 4, do_sample), 2), unsure) >= 3
    assert draft_length(settled(HardwareAware(dear, 4, do_sample), 2), unsure) in (1, 2)
    assert draft_length(settled(HardwareAware(dear, 4, do_sample), 2), [0.99, 0.99, 0.99, 0.99]) == 4


@pytest.mark.parametrize("do_sample", [False, True])
def test_crosses_a_cliff(do_sample):
    """The second token alone does not pay for the step that its verification takes; with the others it does."""
    cliff = RoundCosts(draft=0.1, verify=(1.0, 1.7, 1.75, 1.8, 1.85))
    scheduler = settled(HardwareAware(cliff, 4, do_sample), 3)
    assert scheduler.rate * 1.7 > 1 + 0.8, "the first step pays by itself: this tests nothing"
    assert draft_length(scheduler, [0.8, 0.9, 0.9, 0.9]) == 4
    assert draft_length(scheduler, [0.05, 0.9, 0.9, 0.9]) == 0


def test_greedy_sees_what_sampling_may_not():
    cliff = RoundCosts(draft=0.1, verify=(1.0, 1.0, 1.8, 1.85, 1.9))
    doubtful_late = [0.99, 0.99, 0.01, 0.01]
    assert draft_length(settled(HardwareAware(cliff, 4, do_sample=False), 4), doubtful_late) == 1
    assert draft_length(settled(HardwareAware(cliff, 4, do_sample=True), 4), doubtful_late) >= 2


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("bias", [-2.0, 2.0])
def test_confidences_far_from_true_cost_little(do_sample, bias):
    """Where what a text's drafts are like contradicts the confidences, the text is right."""
    costs = RoundCosts(draft=0.25, verify=tuple(1 + 0.04 * n for n in range(7)))

    def rate(bias: float) -> float:
        scheduler, draw, tokens, seconds = HardwareAware(costs, 6, do_sample), random.Random(0), 0, 0.0
        for _ in range(400):
            logits = [draw.gauss(0.8, 1.5) for _ in range(6)]
            right = [draw.random() < 1 / (1 + math.exp(-logit)) for logit in logits]
            limit, count = decide(scheduler, [1 / (1 + math.exp(-logit - bias)) for logit in logits], do_sample)
            accepted = min(count, [*right, False].index(False))
            spent = costs.verify[count] + (costs.draft if limit else 0)
            scheduler.observe(count, accepted, spent)
            tokens, seconds = tokens + 1 + accepted, seconds + spent
        return tokens / seconds

    assert rate(bias) > 0.97 * rate(0.0)


def test_noisy_savings_are_no_reason_to_cut():
    steady = RoundCosts(draft=0.2, verify=(1.0, 1.1, 1.2, 1.3, 1.4))
    noisy = RoundCosts(draft=0.2, verify=steady.verify, error=0.9)
    unsure = [0.9, 0.4, 0.3, 0.3]
    assert draft_length(settled(HardwareAware(steady, 4, do_sample=False), 2), unsure) < 4
    assert draft_length(settled(HardwareAware(noisy, 4, do_sample=False), 2), unsure) == 4


@pytest.mark.parametrize("do_sample", [False, True])
def test_rows_of_a_block_are_computed_as_far_as_they_are_worth_it(do_sample):
    """All of them now and then, so that it shows when they are worth it again."""
    costs = RoundCosts(draft=0.7, verify=(1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06), row=0.08)
    scheduler = HardwareAware(costs, 6, do_sample)
    short = play(scheduler, costs, lambda _: 2, 200, [0.99, 0.98, 0.01, 0.01, 0.01, 0.01])
    limits = [limit for *_, limit in short[100:] if limit]
    assert sorted(set(limits)) == [2, 6] and limits.count(6) < len(limits) / 10
    long = play(scheduler, costs, lambda _: 6, 500, [0.95] * 6)
    assert sum(limit == 6 for *_, limit in long[-100:]) > 90

    whole = RoundCosts(draft=0.7, verify=costs.verify)
    rounds = play(HardwareAware(whole, 6, do_sample), whole, lambda _: 2, 100, [0.9] * 6)
    assert {limit for *_, limit in rounds} <= {0, 6}


def slots_of(scheduler) -> list[int]:
    """The slots that the heads come to from now on, filled as they do."""
    slots, admits = [], scheduler.admits

    def noted(slot: int, *others):
        slots.append(slot)
        return admits(slot, *others)

    scheduler.admits = noted
    return slots


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("head", [0.0, 0.02])
def test_heads_come_to_no_slot_where_nothing_is_expected(head, do_sample):
    """Where they take no time, greedy drafts look at all confidences."""
    hopeless, late = [0.9, 0.02, 0.02, 0.02], [0.05, 1.0, 1.0, 1.0]
    costs = RoundCosts(draft=0.3, verify=(1.0, 1.05, 1.1, 1.15, 1.2), head=head)
    scheduler = settled(HardwareAware(costs, 4, do_sample), 2)
    slots = slots_of(scheduler)
    count = draft_length(scheduler, hopeless)
    assert len(slots) == (2 if head or do_sample else 4)
    if not do_sample:
        assert count == 1
    assert draft_length(scheduler, late) in (0, 4)
    if not head and not do_sample:
        assert draft_length(scheduler, [1.0] * 4) == 4


@pytest.mark.parametrize("do_sample", [False, True])
def test_slots_that_were_hopeless_are_looked_at_again(do_sample):
    costs = RoundCosts(draft=0.2, verify=(1.0, 1.05, 1.1, 1.15, 1.2), head=0.03)
    scheduler = HardwareAware(costs, 4, do_sample)
    short = play(scheduler, costs, lambda _: 1, 300, [0.8, 0.01, 0.01, 0.01])
    assert sum(committed == 2 for committed, *_ in short[-50:]) > 40
    long = play(scheduler, costs, lambda _: 4, 300, [0.8, 0.95, 0.95, 0.95])
    assert sum(committed == 5 for committed, *_ in long[-50:]) > 40


def test_without_confidence_head_past_acceptance_decides():
    dear = RoundCosts(draft=0.05, verify=(1.0, 1.2, 1.4, 1.6, 1.8))
    scheduler = HardwareAware(dear, 4, do_sample=True)
    play(scheduler, dear, lambda r: r % 4 > 0, 400, [None] * 4)  # the first token is right three times in four
    assert draft_length(scheduler, [None] * 4) == 1


# What it costs to be wrong.


def slowdown(rounds, plain: float) -> float:
    return sum(r[1] for r in rounds) / (sum(r[0] for r in rounds) * plain)


@settings(max_examples=20, deadline=None)
@example(draft=0.05, slope=0.0, wrongly_sure=1.0, noise=0.0859375, do_sample=False)  # dearer by less than the noise
@example(draft=0.15, slope=0.0, wrongly_sure=0.7, noise=0.1, do_sample=True)
@example(draft=1.875, slope=0.4375, wrongly_sure=1.0, noise=0.0, do_sample=False)  # a draft loses four plain rounds
@given(
    draft=st.floats(0.05, 2),
    slope=st.floats(0, 0.5),
    wrongly_sure=st.floats(0.5, 1),
    noise=st.floats(0, 0.1),
    do_sample=st.booleans(),
)
def test_useless_drafts_cost_their_allowance_and_a_few_rounds(draft, slope, wrongly_sure, noise, do_sample):
    """
    Beyond what may be lost, that is what two drafts in a row take behind a pause; where the clock is noisy, drafts may
    also look cheaper than they are until the next comparison.
    """
    costs = RoundCosts(draft=draft, verify=tuple(1 + slope * n for n in range(6)), overhead=0.05)
    scheduler = HardwareAware(costs, 5, do_sample)
    rounds = play(scheduler, costs, lambda _: 0, 1000, [wrongly_sure] * 5, noise)
    lost = (costs.draft + costs.verify[5] - costs.verify[0]) / scheduler.plain  # by a round, in plain ones
    assert slowdown(rounds, scheduler.plain) < 1 + ALLOWANCE + (STAKE + 2 * lost) / 1000 + 2 * noise**2


def test_drafts_that_turn_bad_and_good_again():
    costs = RoundCosts(draft=0.2, verify=(1.0, 1.02, 1.04, 1.06, 1.08))
    scheduler = HardwareAware(costs, 4, do_sample=True)
    good = play(scheduler, costs, lambda _: 3, 100, [0.9] * 4)
    assert slowdown(good, scheduler.plain) < 0.35
    bad = play(scheduler, costs, lambda _: 0, 400, [0.9] * 4)
    assert slowdown(bad, scheduler.plain) < 1.065, "no more than what was gained before, and the allowance"
    assert 0 < sum(limit > 0 for *_, limit in bad[100:]) < 300 / 10, "probes, now and then"
    again = play(scheduler, costs, lambda _: 3, 100, [0.9] * 4)
    assert slowdown(again, scheduler.plain) < 0.5


def test_a_request_knows_what_earlier_ones_learned():
    """Draft tokens are right less often than is assumed at first: only the first one pays."""
    dear, experience = RoundCosts(draft=0.05, verify=(1.0, 1.2, 1.4, 1.6, 1.8)), Experience(4)
    earlier = HardwareAware(dear, 4, True, experience)
    play(earlier, dear, lambda r: r % 4 > 0, 400, [None] * 4)
    assert draft_length(HardwareAware(dear, 4, True, experience), [None] * 4) == 1
    assert draft_length(HardwareAware(dear, 4, True), [None] * 4) > 1, "nobody told this one"


def test_a_request_owes_nothing_for_those_before():
    costs, experience = RoundCosts(draft=0.2, verify=(1.0, 1.02, 1.04, 1.06, 1.08)), Experience(4)
    play(HardwareAware(costs, 4, True, experience), costs, lambda _: 3, 40, [0.9] * 4)
    bad = HardwareAware(costs, 4, True, experience)
    while bad.limit(100):  # until it is in debt
        play(bad, costs, lambda _: 0, 1, [0.9] * 4)
    good = HardwareAware(costs, 4, True, experience)
    assert slowdown(play(good, costs, lambda _: 3, 40, [0.9] * 4), good.plain) < 0.4


@pytest.mark.parametrize("rounds", [10, 40])
def test_short_requests_that_never_gain_lose_three_percent_at_most(rounds):
    """All together, though each might take another try for free."""
    costs, experience = RoundCosts(draft=0.4, verify=(1.0, 1.02, 1.04, 1.06, 1.08)), Experience(4)
    played = []
    for _ in range(1000 // rounds):
        scheduler = HardwareAware(costs, 4, True, experience)
        played += play(scheduler, costs, lambda _: 0, rounds, [0.9] * 4)
    assert slowdown(played, scheduler.plain) < 1.03 and any(limit for *_, limit in played[-200:])


@pytest.mark.parametrize("do_sample", [False, True])
def test_what_a_drafter_has_to_read_after_a_pause_is_no_measure_of_its_drafts(do_sample):
    costs = RoundCosts(draft=0.2, verify=(1.0, 1.02, 1.04, 1.06, 1.08))
    scheduler = HardwareAware(costs, 4, do_sample)
    bad = play(scheduler, costs, lambda _: 0, 1000, [0.9] * 4, reading=0.01)
    pauses = "".join("d" if limit else "." for *_, limit in bad).strip("d").split("d")
    assert max(map(len, pauses)) > 20, "nothing to read after these"
    assert slowdown(bad, scheduler.plain) < 1.03 and scheduler.price == pytest.approx(1, abs=0.05)
    good = play(scheduler, costs, lambda _: 3, 200, [0.9] * 4, reading=0.01)
    assert slowdown(good[100:], scheduler.plain) < 0.4


def test_what_can_never_pay_is_never_drafted():
    costs = RoundCosts(draft=6.0, verify=(1.0, 1.0, 1.0, 1.0, 1.0))
    assert {HardwareAware(costs, 4, do_sample).limit(100) for do_sample in (False, True)} == {0}


def test_no_draft_for_the_last_word():
    costs = RoundCosts(draft=0.8, verify=(1.0, 1.0, 1.0, 1.0, 1.0))
    scheduler = settled(HardwareAware(costs, 4, do_sample=True), 4)
    assert scheduler.limit(0) == 0
    assert scheduler.limit(1) == 0, "one token more does not pay for the draft"
    assert scheduler.limit(4) == 4


def test_measured_times_correct_the_profile():
    """A profile that takes drafting for cheap, on a machine where it is not, and the other way round."""
    told = RoundCosts(draft=0.1, verify=(1.0, 1.0, 1.0))
    found = RoundCosts(draft=1.0, verify=(1.0, 1.0, 1.0))
    scheduler = HardwareAware(told, 2, do_sample=True)
    rounds = play(scheduler, found, lambda r: r % 2, 1000, [0.5] * 2)
    assert scheduler.price > 1.5
    assert slowdown(rounds[200:], scheduler.plain) < 1.03

    scheduler = HardwareAware(found, 2, do_sample=True)
    play(scheduler, told, lambda r: r % 2, 1000, [0.5] * 2)
    assert scheduler.price < 0.75


@pytest.mark.parametrize("do_sample", [False, True])
def test_rounds_to_compare_with_become_rare_even_where_drafts_gain_little(do_sample):
    costs = RoundCosts(draft=0.4, verify=(1.0, 1.01, 1.02, 1.03, 1.04))
    rounds = play(HardwareAware(costs, 4, do_sample), costs, lambda r: r % 2, 600, [0.5, 0.1, 0.1, 0.1], noise=0.05)
    assert sum(limit == 0 for *_, limit in rounds[:30]) >= 2, "soon at first"
    assert sum(limit == 0 for *_, limit in rounds[100:]) <= 500 / 25


def test_load_that_slows_everything_changes_nothing():
    costs = RoundCosts(draft=0.3, verify=(1.0, 1.1, 1.2, 1.3, 1.4))
    loaded = RoundCosts(draft=0.9, verify=tuple(3 * t for t in costs.verify))
    here, there = (HardwareAware(costs, 4, do_sample=True) for _ in range(2))
    idle = play(here, costs, lambda r: r % 4, 500, [0.7] * 4)
    busy = play(there, loaded, lambda r: r % 4, 500, [0.7] * 4)
    assert [r[2] for r in idle] == [r[2] for r in busy]


@pytest.mark.parametrize(
    "costs",
    [
        RoundCosts(draft=0.1, verify=(1.0, 1.0)),
        RoundCosts(draft=0.1, verify=(0.0, 1.0, 1.0)),
        RoundCosts(draft=float("nan"), verify=(1.0, 1.0, 1.0)),
    ],
    ids=str,
)
def test_costs_that_are_none_are_refused(costs):
    with pytest.raises(ValueError, match="Measure them again"):
        HardwareAware(costs, 2, do_sample=False)


def test_comparisons_never_run_out():
    """However many there have been; here almost every other round is one."""
    ledger = Ledger()
    for _ in range(3000):
        ledger.book(drafted=True, tokens=1.0, spent=1.0, slowness=1.0)
        ledger.book(drafted=False, tokens=1.0, spent=1.0, slowness=1.1)
        assert ledger.allows()
    assert ledger.price == pytest.approx(1 / 1.1, rel=0.02)
