"""A report to read: Markdown with plots, beside the JSON that both are made from."""

from __future__ import annotations

import os
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..files import written_together
from .plots import REGIMES, save_plots
from .results import Estimate, Report
from .variants import LABELS

TEMPLATE = "report.md.jinja"


def write_report(report: Report, folder: str | os.PathLike) -> None:
    """Write `report.md`, its plots and `eval.json` into a folder; each file appears only when it is whole."""
    with written_together(folder) as scratch:
        save_plots(report, scratch)
        (scratch / "report.md").write_text(markdown(report), encoding="utf-8")
        report.save(scratch / "eval.json")


def markdown(report: Report) -> str:
    """The text of a report."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it writes Markdown
    )
    environment.filters.update(number=number, percent=percent, spread=spread, estimate=estimate)
    return environment.get_template(TEMPLATE).render(report=report, labels=LABELS, regimes=REGIMES)


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def spread(interval: tuple[float, float] | None, digits: int = 2) -> str:
    return "" if interval is None else f" ({interval[0]:.{digits}f}–{interval[1]:.{digits}f})"


def estimate(found: Estimate) -> str:
    return number(found.value, 3) + spread(found.interval, 3)
