"""
What verification and drafting cost on a device, as measured there, and what is accepted, on any device.

These classes are the schema of `hardware_profile.json`: every field is a key of the same name. Times are seconds.
Version 2 added `calibration` and `acceptance`, version 3 `first` and `heads` of drafts, version 4 the `overhead` of
batches; files without are read so.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate, combinations, product
from pathlib import Path

import numpy as np
from huggingface_hub import HfApi
from transformers.utils import cached_file

from ..files import write_text
from .calibration import Calibration
from .costs import RoundCosts

SCHEMA_VERSION = 4
PROFILE = "hardware_profile.json"

FLAT = 1e-3  # verification times closer together than that are no measurement: one never repeats so well
CHEAPER = 0.75  # kernels differ, so that a little more work may take a little less time, but no less than this share


@dataclass(frozen=True)
class Timing:
    """
    Repeated times of the same work.

    Args:
        median, p10, p90: of the times, in seconds.
        count: how many there were; 0 of a time that was estimated.
    """

    median: float
    p10: float
    p90: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        p10, median, p90 = map(float, np.percentile(seconds, [10, 50, 90]))
        return cls(median, p10, p90, len(seconds))

    @property
    def spread(self) -> float:
        """(p90 - p10) / median."""
        return (self.p90 - self.p10) / self.median if self.median else 0.0

    @property
    def error(self) -> float:
        """The standard error of the median, relative to it, if times are normal: of those, `spread` is 2.56σ."""
        return 1.25 * self.spread / 2.56 / self.count**0.5 if self.count else 0.0

    def later(self, seconds: float) -> Timing:
        """Of work that takes so much longer."""
        return Timing(self.median + seconds, self.p10 + seconds, self.p90 + seconds, self.count)


@dataclass(frozen=True)
class Identity:
    """
    What a measurement holds for; on anything else it says nothing.

    Args:
        device: name of the accelerators, or of the processor, that the target is on.
        torch: its version.
        threads: CPU threads of torch; `None` on an accelerator.
        dtype: of the target, or `target with drafter` if they differ.
        attention: the target's attention implementation.
        target, drafter: hashes of what in the two configs bears on time.
    """

    device: str
    torch: str
    threads: int | None
    dtype: str
    attention: str
    target: str
    drafter: str


@dataclass(frozen=True)
class VerifyCell:
    """
    The target's forward pass over anchors and drafts. Times include what so many drafts add to the overhead of their
    round.

    Args:
        rows: R, sequences in the batch.
        tokens: B, tokens of all rows together, anchors included.
        depth: tokens of context that each row has.
        time: how long it took.
    """

    rows: int
    tokens: int
    depth: int
    time: Timing

    def __str__(self) -> str:
        rows = f" in {self.rows} rows" if self.rows > 1 else ""
        return f"{self.tokens} token{'s' * (self.tokens > 1)}{rows} at depth {self.depth}"


@dataclass(frozen=True)
class DraftCell:
    """
    The draft of one block for each row: backbone, output head, and the sequential and confidence heads slot by slot.
    Times include what a draft adds to the overhead of its round, however short it is.

    Args:
        rows: R, sequences in the batch.
        time: how long it took.
        first: how long it took for the first slot alone, in a block of no more rows; `None` if that is not known.
        heads: the part of `time` that the heads took; `None` if that is not known.
        overhead: what a round of `generate()` with several rows takes beyond draft and verification; `None` if that is
            not known, and for a single row, for which [`Entry`] has it.
    """

    rows: int
    time: Timing
    first: Timing | None = None
    heads: Timing | None = None
    overhead: Timing | None = None


@dataclass(frozen=True)
class Entry:
    """
    One device, with one target and drafter.

    Args:
        identity: what it holds for.
        verify: a grid of cells: for each depth and number of rows, from one token a row to the widest.
        draft: by the number of rows.
        overhead: what a round of `generate()` takes beyond the two; one sequence.
        estimated: whether nobody measured this, and it was worked out from public figures of the device instead.
    """

    identity: Identity
    verify: list[VerifyCell]
    draft: list[DraftCell]
    overhead: Timing
    estimated: bool = False

    @property
    def depths(self) -> list[int]:
        """The depths that were measured, rising."""
        return sorted({cell.depth for cell in self.verify})

    @property
    def widest(self) -> int:
        """The most tokens a row that were measured."""
        return self._widths[-1]

    def cell(self, rows: int, tokens: int, depth: int) -> VerifyCell | None:
        """The cell of that place, or `None` if it was not measured."""
        places = {(cell.rows, cell.tokens, cell.depth): cell for cell in self.verify}
        return places.get((rows, tokens, depth))

    def verify_seconds(self, tokens: int, rows: int = 1, depth: int = 0) -> float:
        """
        Time to verify `tokens` tokens, all rows together, each row behind `depth` tokens of context.

        It is piecewise linear in tokens a row, rows and depth, and never falls in any of them: below what was measured
        it is that of the least; beyond, it grows with depth as it did last, and with tokens and rows in proportion.
        """
        return float(_within(self._widths, self._curve(rows, depth), tokens / rows))

    def draft_seconds(self, rows: int = 1) -> float:
        """Time to draft a block for each of `rows` rows, interpolated like [`verify_seconds`]."""
        return self._by_rows("time", rows)

    def overhead_seconds(self, rows: int = 1) -> float:
        """What a round takes beyond the two, interpolated like [`verify_seconds`]."""
        known = {1: self.overhead} | {cell.rows: cell.overhead for cell in self.draft if cell.overhead is not None}
        times = _rising([known[measured].median for measured in sorted(known)])
        return float(_within(sorted(known), times, rows))

    def _by_rows(self, name: str, rows: int) -> float:
        """Of the draft cells' times, those of that name, which all of them have."""
        cells = sorted(self.draft, key=lambda cell: cell.rows)
        times = _rising([getattr(cell, name).median for cell in cells])
        return float(_within([cell.rows for cell in cells], times, rows))

    def _draft_shares(self, num_draft_tokens: int, rows: int) -> dict[str, float]:
        """What a row of the block and the heads of a slot add to a draft, as [`RoundCosts`] has them."""
        if num_draft_tokens == 1 or not all(cell.first and cell.heads for cell in self.draft):
            return {}
        head = self._by_rows("heads", rows) / num_draft_tokens
        slot = (self.draft_seconds(rows) - self._by_rows("first", rows)) / (num_draft_tokens - 1)
        return {"row": max(slot - head, 0.0), "head": min(head, max(slot, 0.0))}

    def round_costs(self, num_draft_tokens: int, depth: int = 0, rows: int = 1) -> RoundCosts:
        """
        What a scheduler needs to know for one sequence, or for several together.

        Args:
            num_draft_tokens: γ, the most that a round verifies of a sequence.
            depth: length of the context.
            rows: R, the sequences.
        """
        curve = self._curve(rows, depth)
        widths = (1 + drafts / rows for drafts in range(rows * num_draft_tokens + 1))
        verify = [float(_within(self._widths, curve, width)) for width in widths]
        return RoundCosts(
            draft=self.draft_seconds(rows),
            verify=tuple(accumulate(verify, max)),  # rounding aside, they rise anyway
            overhead=self.overhead_seconds(rows),
            error=float(np.median([cell.time.error for cell in self.verify if cell.rows == 1])),
            **self._draft_shares(num_draft_tokens, rows),
        )

    @cached_property
    def _widths(self) -> list[int]:
        """The numbers of tokens a row that were measured for a single row."""
        return sorted({cell.tokens for cell in self.verify if cell.rows == 1})

    @cached_property
    def _rows(self) -> list[int]:
        return sorted({cell.rows for cell in self.verify})

    @cached_property
    def _times(self) -> np.ndarray:
        """Times by depth, rows and width, never falling along any; between widths that were measured, on a line."""
        times = np.empty((len(self.depths), len(self._rows), len(self._widths)))
        for (i, depth), (j, rows) in product(enumerate(self.depths), enumerate(self._rows)):
            cells = sorted(
                (c for c in self.verify if (c.rows, c.depth) == (rows, depth)), key=lambda cell: cell.tokens
            )
            widths = [cell.tokens / rows for cell in cells]
            times[i, j] = np.interp(self._widths, widths, _rising([cell.time.median for cell in cells]))
        return _rising(times)

    def _curve(self, rows: int, depth: int) -> np.ndarray:
        """Times by width."""
        return _within(self._rows, _rising(_beyond(self.depths, self._times, depth)), rows)

    def check(self) -> None:
        """
        Raises:
            ValueError: these times cannot be those of a machine, and why.
        """
        timings = {f"verifying {cell}": cell.time for cell in self.verify}
        for cell in self.draft:
            parts = {"drafting": cell.time, "drafting one slot": cell.first, "the heads": cell.heads}
            timings |= {f"{part} for {cell.rows} rows": time for part, time in parts.items() if time is not None}
        for work, time in timings.items():
            if not (0 < time.p10 <= time.median <= time.p90 < math.inf):
                raise ValueError(f"{work} has the times {_text(time)}; they have to be positive and in order.")
        overheads = [self.overhead, *(cell.overhead for cell in self.draft if cell.overhead is not None)]
        for time in overheads:
            if not 0 <= time.p10 <= time.median <= time.p90 < math.inf:
                raise ValueError(f"the overhead has the times {_text(time)}; they have to be in order.")
        if not self.estimated and not all(time.count > 0 for time in (*timings.values(), *overheads)):
            raise ValueError("it has times that were never measured, and does not say that it is estimated.")
        self._check_grid()
        if not self.estimated:
            self._check_order()

    def _check_grid(self) -> None:
        places = [(cell.rows, cell.tokens, cell.depth) for cell in self.verify]
        drafts = [cell.rows for cell in self.draft]
        if len(set(places)) < len(places) or len(set(drafts)) < len(drafts):
            raise ValueError("it has a cell twice.")
        if not any(rows == 1 for rows, _, _ in places) or 1 not in drafts:
            raise ValueError("it has no times for a single row.")
        for rows, tokens, depth in places:
            if not 0 < rows <= tokens or depth < 0:
                raise ValueError(f"{tokens} tokens in {rows} rows at depth {depth} cannot be verified.")
        for rows, width, depth in product({rows for rows, _, _ in places}, {1, self.widest}, self.depths):
            if (rows, rows * width, depth) not in places:
                raise ValueError(f"the time of {rows * width} tokens in {rows} rows at depth {depth} is missing.")

    def _check_order(self) -> None:
        times = [cell.time.median for cell in self.verify]
        if self.widest > 1 and max(times) <= min(times) * (1 + FLAT):
            raise ValueError(
                f"it is flat: whatever is verified takes {min(times) * 1e3:.4g} ms. A clock that did not wait for the "
                "device shows this, work does not."
            )
        for one, other in combinations(self.verify, 2):
            for less, more in ((one, other), (other, one)):
                is_more = less.rows <= more.rows and less.tokens <= more.tokens and less.depth <= more.depth
                if is_more and more.time.p90 < CHEAPER * less.time.p10:
                    raise ValueError(
                        f"it is inconsistent: verifying {more} takes {more.time.median * 1e3:.4g} ms, {less} "
                        f"{less.time.median * 1e3:.4g} ms. Measure again while the machine has nothing else to do."
                    )


@dataclass(frozen=True)
class Acceptance:
    """
    What the target accepted where the drafter's whole blocks were verified.

    Args:
        acceptance_length: tokens committed per verification.
        conditional_acceptance: per position, the share accepted given that all before it were; `None` where no draft
            got so far.
        marginal_acceptance: per position, the probability that it and all before it are accepted.
        rounds: how many there were.
        conditions: under which that was found: names of models and prompts, settings.
    """

    acceptance_length: float
    conditional_acceptance: tuple[float | None, ...]
    marginal_acceptance: tuple[float | None, ...]
    rounds: int
    conditions: dict[str, str | int | float]


@dataclass
class HardwareProfile:
    """
    Entries for any number of devices, targets and drafters; each identity has one. Beside them, what depends on the
    drafter but not on the device.

    Args:
        entries: in no particular order.
        calibration: how confidences follow from what is known of a slot, by `"greedy"` and `"sample"`; where one of
            them is missing, the confidence head's are used as they are.
        acceptance: what was found when that was fitted, by the same names.
        schema_version: of this file.
    """

    schema_version: int = field(default=SCHEMA_VERSION, init=False)
    entries: list[Entry] = field(default_factory=list)
    calibration: dict[str, Calibration] = field(default_factory=dict)
    acceptance: dict[str, Acceptance] = field(default_factory=dict)

    def entry(self, identity: Identity) -> Entry | None:
        """The entry for exactly this, or `None`."""
        return next((entry for entry in self.entries if entry.identity == identity), None)

    def add(self, entry: Entry) -> None:
        """
        Add an entry, in the place of the one that its identity had.

        Raises:
            ValueError: its times cannot be those of a machine.
        """
        entry.check()
        self.entries = [other for other in self.entries if other.identity != entry.identity] + [entry]

    def check_positions(self, num_draft_tokens: int) -> None:
        """
        Raises:
            ValueError: a calibration is not for γ positions.
        """
        for regime, calibration in self.calibration.items():
            if calibration.num_draft_tokens != num_draft_tokens:
                raise ValueError(
                    f"Its calibration ({regime}) has {calibration.num_draft_tokens} positions, the drafter drafts "
                    f"{num_draft_tokens} tokens: it belongs to another one. Run `hf-dspark calibrate` for this one."
                )

    def save(self, path: str | os.PathLike) -> Path:
        """Write `hardware_profile.json` into a folder, or a file named `*.json`, whole or not at all; returns it."""
        file = _file(path)
        write_text(file, self._json())
        return file

    @classmethod
    def load(cls, path: str | os.PathLike) -> HardwareProfile:
        """
        Read what [`save`] wrote, from a folder or a file named `*.json`.

        Raises:
            OSError: there is no such file.
            ValueError: it is no hardware profile, or one that cannot be true, and why.
        """
        file = _file(path)
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["schema_version"] not in range(1, SCHEMA_VERSION + 1):
                raise ValueError(
                    f"its schema_version is {content['schema_version']}, this package reads up to {SCHEMA_VERSION}"
                )
            profile = cls()
            for entry in content["entries"]:
                profile.add(_entry(entry))
            if content["schema_version"] > 1:
                profile.calibration = _by_regime(Calibration, content["calibration"])
                profile.acceptance = _by_regime(Acceptance, content["acceptance"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{file} is not a hardware profile: {reason}") from error
        return profile

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike, **hub_arguments) -> HardwareProfile:
        """
        The profile beside a drafter, in a folder or a Hub repository.

        Raises:
            OSError: there is none.
            ValueError: as for [`load`].
        """
        file = cached_file(path, PROFILE, **hub_arguments)
        return cls.load(file)

    def push_to_hub(self, repo_id: str, **kwargs) -> str:
        """
        Upload the profile into a drafter's repository, in the place of the one there; to add to that one, load it with
        [`from_pretrained`] first.

        Args:
            repo_id: `organization/name`.
            kwargs: `token`, `revision`, `create_pr` and `commit_message`, as
                [`~huggingface_hub.HfApi.upload_file`] takes them.

        Returns:
            The address of the commit.

        Raises:
            OSError: the Hub refused.
        """
        api = HfApi(library_name="hf_dspark", token=kwargs.pop("token", None))
        content = self._json().encode()
        kwargs = {"commit_message": "Upload hardware profile", **kwargs}
        return str(api.upload_file(path_or_fileobj=content, path_in_repo=PROFILE, repo_id=repo_id, **kwargs))

    def _json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"


def _file(path: str | os.PathLike) -> Path:
    return Path(path) if Path(path).suffix == ".json" else Path(path) / PROFILE


def _entry(content: dict) -> Entry:
    return Entry(
        **content
        | {
            "identity": Identity(**content["identity"]),
            "verify": [VerifyCell(**cell | {"time": Timing(**cell["time"])}) for cell in content["verify"]],
            "draft": [_draft_cell(**cell) for cell in content["draft"]],
            "overhead": Timing(**content["overhead"]),
        }
    )


def _draft_cell(rows: int, **timings: dict | None) -> DraftCell:
    return DraftCell(rows, **{name: None if time is None else Timing(**time) for name, time in timings.items()})


def _by_regime(kind: type, content: dict) -> dict:
    """Fields that are lists in JSON are tuples."""
    if unknown := content.keys() - {"greedy", "sample"}:
        raise ValueError(f"it has a {kind.__name__.lower()} for {', '.join(unknown)}, not for greedy or sample")
    return {
        regime: kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
        for regime, fields in content.items()
    }


def _text(time: Timing) -> str:
    return f"p10 {time.p10}, median {time.median}, p90 {time.p90}"


def _rising(table: np.ndarray | Sequence[float]) -> np.ndarray:
    """What never falls along any axis: along each in turn, which keeps the order along the others."""
    table = np.asarray(table)
    for axis in range(table.ndim):
        table = np.apply_along_axis(_isotonic, axis, table)
    return table


def _isotonic(times: np.ndarray) -> np.ndarray:
    """
    The sequence that never falls and is nearest to `times`, by squares: each of its values is the largest, over where
    a stretch around the place may begin, of the smallest, over where it may end, of the means of such stretches.
    """
    begins, ends = np.arange(len(times))[:, None], np.arange(len(times))
    sums = np.append(0.0, times.cumsum())
    means = np.where(begins <= ends, (sums[1:] - sums[:-1, None]) / np.maximum(ends + 1 - begins, 1), np.inf)
    smallest = np.minimum.accumulate(means[:, ::-1], axis=1)[:, ::-1]
    return np.where(begins <= ends, smallest, -np.inf).max(axis=0)


def _beyond(xs: Sequence[int], table: np.ndarray, x: float) -> np.ndarray:
    """Piecewise linear along the first axis; constant before the first x, at the last slope beyond the last."""
    if len(xs) == 1 or x <= xs[0]:
        return table[0]
    end = min(bisect_left(xs, x), len(xs) - 1)
    share = (x - xs[end - 1]) / (xs[end] - xs[end - 1])
    return table[end - 1] + share * (table[end] - table[end - 1])


def _within(xs: Sequence[int], table: np.ndarray, x: float) -> np.ndarray:
    """Piecewise linear along the first axis; constant before the first x, in proportion to x beyond the last."""
    return _beyond(xs, table, min(x, xs[-1])) * max(x / xs[-1], 1.0)
