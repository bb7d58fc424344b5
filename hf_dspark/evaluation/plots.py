"""Plots of a report. Colours and markers are told apart without colour vision, too."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from ..scheduling.calibration import BINS
from ..scheduling.profile import Entry
from .results import ReliabilityBin, Report, Results
from .variants import LABELS

REGIMES = {"greedy": "greedy", "sample": "temperature 1"}
MARKERS = "osD^vP*X"
STYLE = {
    # The palette of Okabe and Ito.
    "axes.prop_cycle": cycler(
        color=("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
    ),
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.3,
    "legend.fontsize": "small",
}


def save_plots(report: Report, folder: Path) -> None:
    """Draw all plots that there are of a report into PNG files, named after their functions here."""
    with rc_context(STYLE):
        for plot in (speed, acceptance, *((reliability, thresholds) if report.has_confidence else ())):
            plot(report).savefig(folder / f"{plot.__name__}.png", dpi=150)


def _by_set(report: Report, regime: str) -> list[tuple[int, str, Results]]:
    return [(i, name, getattr(results, regime)) for i, (name, results) in enumerate(report.sets.items())]


def _panels(rows: int, columns: int, width: float, height: float, **arguments) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **arguments).tolist()


def _line(axes: Axes, number: int, x: Sequence, y: Sequence, **arguments) -> None:
    axes.plot(
        x, y, color=f"C{number}", marker=MARKERS[number % len(MARKERS)], markersize=5, clip_on=False, **arguments
    )


def _legend(figure: Figure, axes: Axes) -> Legend:
    return figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def acceptance(report: Report) -> Figure:
    """Conditional and marginal acceptance by position."""
    slots = range(1, report.settings.num_draft_tokens + 1)
    figure, panels = _panels(2, 2, 4.2, 3, sharex=True, sharey=True)
    for column, (regime, title) in enumerate(REGIMES.items()):
        for row, kind in enumerate(("conditional", "marginal")):
            axes = panels[row][column]
            for number, name, results in _by_set(report, regime):
                shares = getattr(results.full_blocks, f"{kind}_acceptance")
                _line(axes, number, slots, [float("nan") if share is None else share for share in shares], label=name)
            axes.set(ylim=(0, 1), xticks=slots)
        panels[0][column].set_title(title)
        panels[1][column].set_xlabel("position in the draft")
    panels[0][0].set_ylabel("accepted, given that\nall before it were")
    panels[1][0].set_ylabel("accepted with\nall before it")
    _legend(figure, panels[0][0])
    return figure


def reliability(report: Report) -> Figure:
    """Share accepted against confidence, a panel for each position, all sets together; hollow before calibration."""
    slots = report.settings.num_draft_tokens
    columns = min(slots, 4)
    figure, panels = _panels(-(-slots // columns), columns, 2.6, 2.6, sharex=True, sharey=True)
    for slot, axes in enumerate(axes for row in panels for axes in row):
        if slot >= slots:
            axes.set_axis_off()
            continue
        axes.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1)
        for number, (regime, title) in enumerate(REGIMES.items()):
            for kind, suffix in (("confidence_before", ", before calibration"), ("confidence", "")):
                diagrams = [getattr(results.full_blocks, kind) for _, _, results in _by_set(report, regime)]
                pooled = _pooled([one for diagram in diagrams if diagram for one in diagram[slot].bins])
                if not pooled and suffix:
                    continue
                judged = sum(one.count for one in pooled)
                axes.scatter(
                    [one.confidence for one in pooled],
                    [one.acceptance for one in pooled],
                    s=[8 + 200 * one.count / judged for one in pooled],
                    facecolor="none" if suffix else f"C{number}",
                    edgecolor=f"C{number}",
                    marker=MARKERS[number],
                    alpha=0.7,
                    linewidth=1 if suffix else 0,
                    clip_on=False,
                    label=title + suffix,
                )
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title=f"position {slot + 1}")
        axes.set(xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
        if slot + columns >= slots:  # nothing below
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("confidence")
        if slot % columns == 0:
            axes.set_ylabel("share accepted")
    for handle in _legend(figure, panels[0][0]).legend_handles:
        handle.set_sizes([30])  # type: ignore[union-attr, attr-defined]
    return figure


def _pooled(bins: Sequence[ReliabilityBin]) -> list[ReliabilityBin]:
    """The bins of several diagrams, those of the same confidence put together."""
    alike: dict[int, list[ReliabilityBin]] = defaultdict(list)
    for one in bins:
        alike[min(int(BINS * one.confidence), BINS - 1)].append(one)
    pooled = []
    for several in alike.values():
        count = sum(one.count for one in several)
        confidence = sum(one.count * one.confidence for one in several) / count
        pooled.append(ReliabilityBin(confidence, sum(one.count * one.acceptance for one in several) / count, count))
    return pooled


def thresholds(report: Report) -> Figure:
    """Tokens committed and verified per step against the confidence threshold."""
    figure, panels = _panels(1, 2, 4.2, 3.2, sharey=True)
    for axes, (regime, title) in zip(panels[0], REGIMES.items()):
        for number, name, results in _by_set(report, regime):
            sweep = results.full_blocks.threshold_sweep
            x = [step.threshold for step in sweep]
            _line(axes, number, x, [step.tokens_per_step for step in sweep], label=name)
            axes.plot(x, [step.verified_per_step for step in sweep], color=f"C{number}", linestyle=":")
        axes.set(title=title, xlabel="confidence threshold", ylim=(0, None))
    panels[0][0].set_ylabel("tokens per step\n(dotted: drafts verified)")
    _legend(figure, panels[0][0])
    return figure


def speed(report: Report) -> Figure:
    """Speed of all ways of decoding on every set, with the 10 % and 90 % quantiles over prompts."""
    names = list(report.sets)
    variants = [name for name in LABELS if any(name in results.greedy.variants for results in report.sets.values())]
    height = 0.8 / len(variants)
    figure, panels = _panels(1, 2, 4.6, 1.3 + 0.24 * len(names) * len(variants), sharex=True, sharey=True)
    for axes, (regime, title) in zip(panels[0], REGIMES.items()):
        for number, variant in enumerate(variants):
            found = [(i, results.variants[variant]) for i, _, results in _by_set(report, regime)]
            rates = [one.tokens_per_second for _, one in found]
            axes.barh(
                [i + (number - (len(variants) - 1) / 2) * height for i, _ in found],
                rates,
                height=0.9 * height,
                xerr=(
                    [rate - one.tokens_per_second_spread[0] for rate, (_, one) in zip(rates, found)],
                    [one.tokens_per_second_spread[1] - rate for rate, (_, one) in zip(rates, found)],
                ),
                error_kw={"elinewidth": 1, "ecolor": "0.2"},
                color=f"C{number}",
                label=LABELS[variant],
            )
        axes.set(title=title, xlabel="tokens per second", yticks=range(len(names)), yticklabels=names)
        axes.grid(axis="y", visible=False)
    panels[0][0].invert_yaxis()
    _legend(figure, panels[0][0])
    return figure


def save_steps_per_second(entry: Entry, file: str | os.PathLike) -> None:
    """Draw [`steps_per_second`] into a file of any format that matplotlib knows."""
    with rc_context(STYLE):
        steps_per_second(entry).savefig(file, dpi=150)


def steps_per_second(entry: Entry) -> Figure:
    """SPS(B): rounds a second against the tokens verified in them, with 10 % and 90 % quantile of the verification."""
    figure, [[axes]] = _panels(1, 1, 7, 4)
    curves = sorted({(cell.rows, cell.depth) for cell in entry.verify})
    for number, (rows, depth) in enumerate(curves):
        cells = sorted((c for c in entry.verify if (c.rows, c.depth) == (rows, depth)), key=lambda cell: cell.tokens)
        rest = entry.draft_seconds(rows) + entry.overhead.median
        slow, middle, fast = (
            [1 / (rest + getattr(cell.time, quantile)) for cell in cells] for quantile in ("p90", "median", "p10")
        )
        tokens = [cell.tokens for cell in cells]
        label = f"{rows} row{'s' * (rows > 1)}, depth {depth}"
        _line(axes, number, tokens, middle, label=label)
        axes.fill_between(tokens, slow, fast, color=f"C{number}", alpha=0.2, linewidth=0)
    axes.set(
        title=entry.identity.device + " (estimated)" * entry.estimated,
        xlabel="tokens verified, all rows together",
        ylabel="rounds per second",
        ylim=(0, None),
    )
    _legend(figure, axes)
    return figure
