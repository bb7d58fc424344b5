"""Recordings as one HTML file that needs nothing else."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..evaluation.acceptance import conditional_acceptance, judged_by_position
from ..files import write_text
from .alignment import align, verdict
from .recording import Recording, as_json
from .token_text import visible

TEMPLATE = "page.html.jinja"


def write_page(recordings: list[Recording], path: str | os.PathLike) -> None:
    """Write one recording, or two side by side, into an HTML file, whole or not at all."""
    write_text(path, html(recordings))


def html(recordings: list[Recording]) -> str:
    """The text of the page. What the models wrote goes in as JSON, and only as text from there into the page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    two = recordings if len(recordings) == 2 else None
    data = {
        "recordings": [_content(each) for each in recordings],
        "stretches": [asdict(stretch) for stretch in align(*two)] if two else None,
    }
    return environment.get_template(TEMPLATE).render(
        data=data,
        title=recordings[0].prompt or "A drafter's rounds",
        target=recordings[0].target,
        labels=[each.label for each in recordings],
        settings=recordings[0].settings,
        verdict=verdict(*two) if two else None,
    )


def _content(recording: Recording) -> dict:
    """The trace file's content, and what is worked out from it here."""
    content = as_json(recording)
    content["shown"] = {token: visible(text) for token, text in recording.vocabulary.items()}
    content["label"] = recording.label
    content["acceptance_length"] = recording.acceptance_length
    content["conditional"] = conditional_acceptance(recording.rounds, recording.slots)
    content["judged"] = [len(flags) for flags in judged_by_position(recording.rounds, recording.slots)]
    for content_of, a_round in zip(content["rounds"], recording.rounds):  # three digits are enough to look at
        content_of["confidence"] = [round(share, 4) for share in a_round.details.confidence]
        for name in ("drafter", "target"):
            content_of[name] = [[[t, round(p, 4)] for t, p in some] for some in content_of[name]]
        content_of["seconds"] = {name: round(value, 6) for name, value in content_of["seconds"].items()}
    return content
