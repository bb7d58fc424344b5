"""Two recordings of one prompt, side by side."""

from __future__ import annotations

from dataclasses import dataclass

from .recording import Recording


@dataclass
class Stretch:
    """
    A piece of the answer that both recordings made in whole rounds.

    Args:
        start, stop: its place in the answer, in tokens; behind the first difference `stop` is the longer one's end.
        left, right: the rounds of the two recordings that made it, (first, behind the last).
    """

    start: int
    stop: int
    left: tuple[int, int]
    right: tuple[int, int]


def common_tokens(left: Recording, right: Recording) -> int:
    """How many tokens both answers begin with."""
    differ = (k for k, (one, other) in enumerate(zip(left.answer, right.answer)) if one != other)
    return next(differ, min(len(left.answer), len(right.answer)))


def align(left: Recording, right: Recording) -> list[Stretch]:
    """
    Cut two recordings wherever both end a round after the same text.

    What follows the last such place, be it that the answers differ or that one of them ends there, is one stretch.
    """
    common = common_tokens(left, right)
    ends = [{end: number for number, end in enumerate(each.ends, 1)} for each in (left, right)]
    stretches, start, last = [], 1, (0, 0)
    for stop in sorted(ends[0].keys() & ends[1].keys()):
        if stop > common:
            break
        here = ends[0][stop], ends[1][stop]
        stretches.append(Stretch(start, stop, (last[0], here[0]), (last[1], here[1])))
        start, last = stop, here
    whole = len(left.rounds), len(right.rounds)
    if last != whole:
        stop = max(len(left.answer), len(right.answer))
        stretches.append(Stretch(start, stop, (last[0], whole[0]), (last[1], whole[1])))
    return stretches


def verdict(left: Recording, right: Recording) -> str:
    """How far the two answers are the same, in words."""
    common = common_tokens(left, right)
    tokens = f"{common} token{'s' if common != 1 else ''}"
    if common == len(left.answer) == len(right.answer):
        return f"Both answers are the same {tokens}, aligned by position."
    if common in (len(left.answer), len(right.answer)):
        return f"One answer ends after {tokens}, up to which they are the same."
    return f"The answers are the same for {tokens} and differ from there on, where nothing is aligned."
