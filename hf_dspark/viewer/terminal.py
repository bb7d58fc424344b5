"""Recordings in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..generation.trace import Alternatives, Round
from .alignment import align, verdict
from .recording import Recording
from .token_text import harmless, visible

# By more than colour: accepted drafts are underlined, and every draft is followed by its mark.
STYLES = {
    "accepted": "blue underline",
    "rejected": "red strike",
    "unjudged": "dim",
    "cut": "dim italic",
    "own": "bold",
}
MARKS = {"accepted": "✓", "rejected": "✗", "unjudged": "–", "cut": "✂"}
LEGEND = {"accepted": "accepted", "rejected": "rejected", "unjudged": "not judged", "cut": "cut by the scheduler"}


def fates(a_round: Round) -> list[str]:
    """What became of each drafted token: accepted, rejected, unjudged or cut."""
    accepted = a_round.accepted + a_round.ended
    verified, drafted = len(a_round.draft), len(a_round.details.drafted)
    rejected = min(1 - a_round.ended, verified - accepted)
    unjudged = verified - accepted - rejected
    return ["accepted"] * accepted + ["rejected"] * rejected + ["unjudged"] * unjudged + ["cut"] * (drafted - verified)


def show(recordings: list[Recording]) -> RenderableType:
    """Everything about one recording, or two side by side."""
    parts: list[RenderableType] = []
    for each in recordings:
        parts += [heading(each), answer(each), Text()]
    if len(recordings) == 2:
        parts += [Text(verdict(*recordings)), side_by_side(*recordings)]
    else:
        parts += [rounds(each) for each in recordings]
    return Group(*parts, legend())


def heading(recording: Recording) -> Text:
    """Who drafted for whom, and how it went."""
    total, seconds = recording.seconds.total, recording.seconds
    text = Text(f"{harmless(recording.label)} for {harmless(recording.target)}\n", style="bold")
    text.append(
        f"{len(recording.answer)} tokens in {len(recording.rounds)} rounds, "
        f"acceptance length {recording.acceptance_length:.2f}",
        style="not bold",
    )
    if total:
        parts = {"drafting": seconds.draft, "heads": seconds.head, "verifying": seconds.verify, "rest": seconds.rest}
        shares = ", ".join(f"{name} {part / total:.0%}" for name, part in parts.items())
        text.append(f"; {total:.2f} s: {shares}", style="not bold")
    return text


def answer(recording: Recording) -> Text:
    """The committed text, by who made each token."""
    text = Text()
    makers = ["own"]
    for a_round in recording.rounds:
        makers += ["accepted"] * a_round.accepted + ["accepted" if a_round.ended else "own"]
    for piece, maker in zip(recording.pieces, makers):
        text.append(harmless(piece), style=STYLES[maker])
    return text


def rounds(recording: Recording) -> Table:
    """One row a round."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("round", justify="right", style="dim")
    table.add_column("drafted, with confidence in %")
    table.add_column("the target's own")
    table.add_column("ms", justify="right")
    for number, a_round in enumerate(recording.rounds, 1):
        milliseconds = f"{1000 * a_round.seconds.total:.0f}"
        table.add_row(str(number), drafts(recording, a_round), said(recording, a_round), milliseconds)
    return table


def side_by_side(left: Recording, right: Recording) -> Table:
    """One row for each piece of text that both made in whole rounds."""
    table = Table(box=None, pad_edge=False, header_style="dim", show_lines=True)
    table.add_column("token", justify="right", style="dim")
    for each in (left, right):
        table.add_column(Text(harmless(each.label)), ratio=1)
    for stretch in align(left, right):
        sides = []
        for recording, (first, stop) in ((left, stretch.left), (right, stretch.right)):
            lines = [
                Text.assemble(drafts(recording, each), "  → ", said(recording, each, instead=False))
                for each in recording.rounds[first:stop]
            ]
            sides.append(Text("\n").join(lines))
        table.add_row(str(stretch.start + 1), *sides)
    return table


def drafts(recording: Recording, a_round: Round) -> Text:
    """The drafted tokens of a round."""
    words = []
    for k, (token, fate) in enumerate(zip(a_round.details.drafted, fates(a_round))):
        confidence = a_round.details.confidence[k : k + 1]
        word = Text(visible(recording.vocabulary[token]), style=STYLES[fate])
        word.append(
            "".join(f" {100 * value:.0f}" for value in confidence) + MARKS[fate], style="not underline not strike"
        )
        words.append(word)
    return Text("  ").join(words) if words else Text("no draft", style="dim")


def said(recording: Recording, a_round: Round, instead: bool = True) -> Text:
    """The target's own token, and what both thought of the slot if a draft was rejected there."""
    if a_round.ended:
        return Text("the text ended", style="dim")
    details, k = a_round.details, a_round.accepted
    text = Text(visible(recording.vocabulary[details.token]), style=STYLES["own"])
    if instead and k < len(a_round.draft):
        for name, some in (("drafter", details.drafter[k]), ("target", details.target[k])):
            text.append(f"\n  {name}: {_top(recording, some)}", style="not bold dim")
    return text


def legend() -> Text:
    """What marks and styles mean."""
    parts: Iterator[Text] = (Text(f"{name} {MARKS[fate]}", style=STYLES[fate]) for fate, name in LEGEND.items())
    return Text.assemble("\nDrafts: ", Text(", ").join(parts), "; ", ("the target's own", STYLES["own"]))


def _top(recording: Recording, some: Alternatives, count: int = 3) -> str:
    return "  ".join(f"{visible(recording.vocabulary[token])} {share:.0%}" for token, share in some[:count])
