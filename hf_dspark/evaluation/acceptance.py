"""What was accepted of the drafts, from the rounds of a trace."""

from __future__ import annotations

from collections.abc import Sequence

from ..generation.trace import Round
from .results import ThresholdStep, TimeSplit

THRESHOLDS = tuple(k / 20 for k in range(20))


def judged(a_round: Round) -> list[bool]:
    """For each draft token that the target judged, whether it was accepted; the first rejected one is the last."""
    accepted = a_round.accepted + a_round.ended
    rejected = accepted < len(a_round.draft) and not a_round.ended
    return [True] * accepted + [False] * rejected


def judged_by_position(rounds: Sequence[Round], slots: int) -> list[list[bool]]:
    """[`judged`] of all rounds, for each of the `slots` positions of a block."""
    positions: list[list[bool]] = [[] for _ in range(slots)]
    for a_round in rounds:
        for k, accepted in enumerate(judged(a_round)):
            positions[k].append(accepted)
    return positions


def conditional_acceptance(rounds: Sequence[Round], slots: int) -> list[float | None]:
    """Per position, the share accepted among drafts accepted up to there; `None` where none got so far."""
    return [sum(flags) / len(flags) if flags else None for flags in judged_by_position(rounds, slots)]


def marginal_acceptance(conditional: Sequence[float | None]) -> list[float | None]:
    """Per position, the probability that it and all before it are accepted."""
    marginal: list[float | None] = []
    running: float | None = 1.0
    for share in conditional:
        running = None if running is None or share is None else running * share
        marginal.append(running)
    return marginal


def accepted_histogram(rounds: Sequence[Round], slots: int) -> list[int]:
    """In how many rounds 0, 1, ..., `slots` draft tokens were accepted, of those that drafted and judged them all."""
    counts = [0] * (slots + 1)
    for a_round in rounds:
        if len(a_round.draft) == slots and not a_round.ended:
            counts[a_round.accepted] += 1
    return counts


def verification_waste(rounds: Sequence[Round]) -> float | None:
    """Share of the verified draft tokens that were not committed; `None` without any."""
    verified = sum(len(a_round.draft) for a_round in rounds)
    return 1 - sum(a_round.accepted + a_round.ended for a_round in rounds) / verified if verified else None


def threshold_sweep(rounds: Sequence[Round], thresholds: Sequence[float] = THRESHOLDS) -> list[ThresholdStep]:
    """
    What each confidence threshold would have done to drafts that were verified whole.

    A draft that ends at ℓ commits min(accepted, ℓ) of its tokens and one of the target's own. Empty if no round has
    confidences.
    """
    steps = []
    for threshold in thresholds if any(a_round.confidence for a_round in rounds) else ():
        lengths = [
            next((k for k, c in enumerate(a_round.confidence) if c < threshold), len(a_round.draft))
            for a_round in rounds
        ]
        committed = sum(1 + min(a_round.accepted, length) for a_round, length in zip(rounds, lengths))
        steps.append(ThresholdStep(threshold, committed / len(rounds), sum(lengths) / len(rounds)))
    return steps


def time_split(rounds: Sequence[Round]) -> TimeSplit | None:
    """Mean times of the rounds and their shares; `None` without timed rounds."""
    total = sum(a_round.seconds.total for a_round in rounds)
    if not total:
        return None
    draft, head, verify, rest = (
        sum(getattr(a_round.seconds, part) for a_round in rounds) for part in ("draft", "head", "verify", "rest")
    )
    return TimeSplit(
        rounds=len(rounds),
        draft_ms=1000 * draft / len(rounds),
        head_ms=1000 * head / len(rounds),
        verify_ms=1000 * verify / len(rounds),
        rest_ms=1000 * rest / len(rounds),
        head_share=head / total,
        outside_share=(head + rest) / total,
    )
