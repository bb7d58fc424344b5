"""Measures what rounds cost on this machine: thoroughly for a profile to keep, or quickly at first use."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import constants
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging

from ..devices import device_name
from ..modeling_dspark import DSparkModel
from ..scheduling.costs import RoundCosts
from ..scheduling.estimate import estimate
from ..scheduling.profile import DraftCell, Entry, HardwareProfile, Identity, Timing, VerifyCell
from .attention import attention_for_one, can_run_ragged, own_attention, verifying_attention
from .bench import BatchBench, SingleBench
from .trace import Round, Seconds, trace

logger = logging.get_logger(__name__)

Key = TypeVar("Key", bound=Hashable)

ROWS = (2, 4)
DEPTHS = (64, 1024)
SECONDS = 60.0  # what the passes of a full profile may take, beyond its fewest sweeps
QUICK_SECONDS = 2.0
FULL_SWEEPS, QUICK_SWEEPS = (7, 40), (2, 5)  # fewest and most
ROUNDS, QUICK_ROUNDS = 12, 3  # of generate(), for each prompt
PRECISION = 0.02  # standard error of a median, relative to it, that is good enough
STALE = 1.5  # a pass slower or faster by more than that, beyond the spread, and a table is no longer true


def profile(
    target: PreTrainedModel,
    drafter: DSparkModel,
    prompts: Sequence[torch.Tensor],
    rows: Sequence[int] = ROWS,
    depths: Sequence[int] = DEPTHS,
    seconds: float = SECONDS,
) -> Entry:
    """
    Measure all that an entry holds, on this machine.

    Args:
        prompts: token ids (1, length) of real prompts; rounds of `generate()` are timed on each.
        rows: of the grid, besides one; batches are left out if the target cannot decode any.
        depths: of the grid; those that are beyond the target are cut.
        seconds: when to stop repeating what still is uncertain.

    Raises:
        ValueError: the drafter does not fit the target, the target's cache cannot be cropped, or the times are no
            measurement, and why.
    """
    rows = sorted({1, *rows}) if can_run_ragged(target) else [1]
    with _undisturbed(target, drafter), verifying_attention(target) if max(rows) > 1 else nullcontext():
        return _measure(target, drafter, prompts, rows, depths, FULL_SWEEPS, seconds, ROUNDS)


def quick_profile(target: PreTrainedModel, drafter: DSparkModel) -> Entry:
    """
    Measure what one sequence at one depth costs, in a few seconds. Made-up tokens do: they cost the same time.

    Raises:
        ValueError: as for [`profile`].
    """
    with _undisturbed(target, drafter):
        prompt = _made_up_tokens(target, 8)
        return _measure(target, drafter, [prompt], (1,), DEPTHS[:1], QUICK_SWEEPS, QUICK_SECONDS, QUICK_ROUNDS)


# What costs are known


@dataclass
class _Known:
    """What was found for a drafter and a target as they were then."""

    target: weakref.ref
    state: tuple
    entry: Entry | None

    def holds_for(self, target: PreTrainedModel, state: tuple) -> bool:
        return self.target() is target and self.state == state


_known: weakref.WeakKeyDictionary[DSparkModel, _Known] = weakref.WeakKeyDictionary()
_one_at_a_time = threading.Lock()


def ensure_costs(target: PreTrainedModel, drafter: DSparkModel, depth: int = 0) -> None:
    """
    Set `drafter.round_costs` to what rounds with this target cost on this machine at that depth of context, unless the
    drafter's `generation_config` says how long drafts are.

    They come from the drafter's own profile or from the cache, if one of the two has an entry for exactly this and a
    verification still takes as long; otherwise from a quick profile, which is cached; failing that, from an estimate
    if there are figures for the device, or they are `None`. Costs that were set by hand stay. Nothing of this raises.
    """
    settings = drafter.generation_config
    if settings.num_assistant_tokens is not None or settings.assistant_confidence_threshold:
        return
    state = (target.device, target.dtype, drafter.dtype, own_attention(target.config), torch.get_num_threads())
    known = _known.get(drafter)
    if known is None and drafter.round_costs is not None:
        return
    if known is None or not known.holds_for(target, state):
        with _one_at_a_time:
            known = _known.get(drafter)  # another thread may have been here meanwhile
            if known is None or not known.holds_for(target, state):
                known = _known[drafter] = _Known(weakref.ref(target), state, _find_entry(target, drafter))
    if known.entry is None:
        drafter.round_costs = None
    else:
        drafter.round_costs = known.entry.round_costs(drafter.config.num_draft_tokens, depth)


def costs_by_rows(drafter: DSparkModel, depth: int = 0) -> Callable[[int], RoundCosts]:
    """What rounds of so many rows cost, where `drafter.round_costs` is known: as measured, or in proportion to it."""
    known = _known.get(drafter)
    if known is None or known.entry is None:
        return drafter.round_costs.in_proportion
    return lambda rows: known.entry.round_costs(drafter.config.num_draft_tokens, depth, rows)


def _find_entry(target: PreTrainedModel, drafter: DSparkModel) -> Entry | None:
    identity = identity_of(target, drafter)
    fallback = estimate(identity, _weight_bytes(target), _weight_bytes(drafter), drafter.config.num_draft_tokens)
    try:
        drafter.check_target(target)
        for whose, stored in (("drafter's", drafter.hardware_profile), ("cached", _read_cache(identity))):
            entry = None if stored is None else stored.entry(identity)
            if entry is None:
                continue
            if entry.estimated:
                fallback = entry
            elif (doubt := staleness(entry, target, drafter)) is None:
                return entry
            else:
                logger.warning(f"The {whose} hardware profile is stale: {doubt}. Measuring anew.")
        entry = quick_profile(target, drafter)
    except (ValueError, RuntimeError) as error:  # the latter when memory runs out
        substitute = "without a hardware profile" if fallback is None else "with one estimated from public figures"
        logger.warning(f"Could not measure what rounds cost here, going on {substitute}. Reason: {error}")
        return fallback
    _write_cache(entry)
    return entry


def staleness(entry: Entry, target: PreTrainedModel, drafter: DSparkModel) -> str | None:
    """Why an entry no longer is true, from timing one of its cells again, or `None` if it is."""
    cell = entry.cell(1, entry.widest, entry.depths[0])
    with _undisturbed(target, drafter):
        bench = SingleBench(target, drafter, _made_up_tokens(target, cell.depth))
        seconds = [bench.verify(cell.tokens) for _ in range(3)][1:]
    now = Timing.of(seconds)
    if min(seconds) <= cell.time.p90 * STALE and max(seconds) >= cell.time.p10 / STALE:
        return None
    return f"verifying {cell} takes {now.median * 1e3:.3g} ms, not {cell.time.median * 1e3:.3g} ms"


def _cache_file(identity: Identity) -> Path:
    digest = hashlib.sha256(json.dumps(asdict(identity)).encode()).hexdigest()[:16]
    return Path(constants.HF_HOME) / "hf_dspark" / "profiles" / f"{digest}.json"


def _read_cache(identity: Identity) -> HardwareProfile | None:
    try:
        return HardwareProfile.load(_cache_file(identity))
    except OSError:
        return None
    except ValueError as error:
        logger.warning(f"{error} Measuring anew.")
        return None


def _write_cache(entry: Entry) -> None:
    try:
        HardwareProfile([entry]).save(_cache_file(entry.identity))
    except OSError as error:
        logger.info(f"The quick hardware profile could not be cached, it is measured again next time: {error}")


# What is measured


def identity_of(target: PreTrainedModel, drafter: DSparkModel) -> Identity:
    """What a measurement of these two on this machine holds for."""
    devices = list(dict.fromkeys(parameter.device for parameter in target.parameters()))
    names = [device_name(device) for device in devices]
    dtypes = [str(model.dtype).removeprefix("torch.") for model in (target, drafter)]
    return Identity(
        device=", ".join(f"{names.count(n)} x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names)),
        torch=torch.__version__,
        threads=torch.get_num_threads() if any(device.type == "cpu" for device in devices) else None,
        dtype=" with ".join(dict.fromkeys(dtypes)),
        attention=own_attention(target.config),
        target=_hash(target.config),
        drafter=_hash(drafter.config, type(drafter.config)().to_dict()),
    )


_TIMELESS = ("_name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "base_model", "use_cache")


def _hash(config: PreTrainedConfig, usual: dict | None = None) -> str:
    """Of the fields that are not as in `usual`, so that a release with more of them changes nothing."""
    fields = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in _TIMELESS and "token_id" not in name and value is not None and value != (usual or {}).get(name)
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _weight_bytes(model: PreTrainedModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _made_up_tokens(target: PreTrainedModel, length: int) -> torch.Tensor:
    """Token ids (1, length) from all over the vocabulary, always the same."""
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    return (torch.arange(1, length + 1) * 7919 % vocabulary)[None].to(target.device)


@contextmanager
def _undisturbed(target: PreTrainedModel, drafter: DSparkModel) -> Iterator[None]:
    """As in generation, but the random number generators are left as they were."""
    devices = {model.device for model in (target, drafter) if model.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(list(devices)), attention_for_one(target):
        yield


def _measure(
    target: PreTrainedModel,
    drafter: DSparkModel,
    prompts: Sequence[torch.Tensor],
    rows: Sequence[int],
    depths: Sequence[int],
    sweeps: tuple[int, int],
    seconds: float,
    rounds: int,
) -> Entry:
    most = drafter.config.num_draft_tokens + 1
    longest = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None) or max(depths)
    depths = sorted({max(min(depth, longest - most), 1) for depth in depths})
    text = torch.cat([ids[0] for ids in prompts]).to(target.device)
    text = text.repeat(-(-depths[-1] // len(text)))

    passes: dict[tuple, Callable[[], float]] = {}  # by rows, width and depth, or by a field of a draft cell and rows
    for row_count in rows:
        widths = range(1, most + 1) if row_count == 1 else sorted({1, 2, (most + 1) // 2, most})
        for depth in depths:
            kind = SingleBench if row_count == 1 else BatchBench
            bench = kind(target, drafter, text[None, :depth].repeat(row_count, 1))
            for width in widths:
                passes[row_count, width, depth] = partial(bench.verify, width)
            if depth == depths[0]:
                passes["time", row_count] = partial(bench.draft, most - 1)
                passes["first", row_count] = partial(bench.draft, 1)
                passes["heads", row_count] = partial(bench.heads, most - 1)
    timings = repeat(passes, *sweeps, seconds)

    overheads, of_drafts, of_tokens = {}, {}, {}
    for row_count in rows:
        batches = prompts if row_count == 1 else [prompts[0].repeat(row_count, 1)]
        batches = [batch.to(target.device) for batch in batches]
        plain, shortest, longest = (
            Timing.of([one.rest for batch in batches for one in real_rounds(target, drafter, batch, rounds, length)])
            for length in (0, 1, most - 1)
        )
        # What drafts add to it: something for being there, and something for each of their tokens.
        overheads[row_count] = plain
        of_tokens[row_count] = max(longest.median - shortest.median, 0.0) / max(most - 2, 1)
        of_drafts[row_count] = max(shortest.median - plain.median - of_tokens[row_count], 0.0)
    entry = Entry(
        identity_of(target, drafter),
        verify=[
            VerifyCell(r, r * width, depth, timings[r, width, depth].later(of_tokens[r] * (width - 1)))
            for r, width, depth in (key for key in passes if len(key) == 3)
        ],
        draft=[
            DraftCell(
                rows=r,
                time=timings["time", r].later(of_drafts[r]),
                first=timings["first", r].later(of_drafts[r]),
                heads=timings["heads", r],
                overhead=overheads[r] if r > 1 else None,
            )
            for r in rows
        ],
        overhead=overheads[1],
    )
    entry.check()
    return entry


def repeat(passes: dict[Key, Callable[[], float]], fewest: int, most: int, seconds: float) -> dict[Key, Timing]:
    """
    Times of passes that return their seconds, in sweeps over all of them, in an order that changes, after one to warm
    up: at least `fewest`, then until every median is known to `PRECISION`, or after `most` or so many seconds.
    """
    order, shuffle = list(passes), random.Random(0).shuffle
    samples: dict[Key, list[float]] = {key: [] for key in passes}
    begin = time.perf_counter()
    for key in order:
        passes[key]()
    for sweep in range(1, most + 1):
        shuffle(order)
        for key in order:
            samples[key].append(passes[key]())
        timings = {key: Timing.of(times) for key, times in samples.items()}
        known = max(timing.error for timing in timings.values()) <= PRECISION
        if sweep >= fewest and (known or time.perf_counter() - begin >= seconds):
            break
    return timings


class _Enough(StoppingCriteria):
    """Stops at the first token of the round after so many."""

    def __init__(self, rounds: list[Round], count: int):
        self.rounds, self.count = rounds, count

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        return torch.full((len(input_ids),), len(self.rounds) >= self.count, device=input_ids.device)


def real_rounds(
    target: PreTrainedModel, drafter: DSparkModel, prompts: torch.Tensor, count: int, length: int
) -> list[Seconds]:
    """
    What so many rounds of `generate()` take behind prompts (R, length), all rows together, with drafts of that length,
    after one to warm up.
    """
    rows = len(prompts)
    # Copies that share all weights, so that nobody else sees these settings.
    target, drafter = copy.copy(target), copy.copy(drafter)
    target.generation_config = GenerationConfig()
    drafter.generation_config = GenerationConfig(num_assistant_tokens=length)
    with trace(drafter) as rounds:
        target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            assistant_model=drafter,
            do_sample=False,
            max_new_tokens=(count + 2) * (length + 1),
            stopping_criteria=StoppingCriteriaList([_Enough(rounds, count * rows)]),
        )
    return [one.seconds.scaled(rows) for one in rounds[rows::rows]]
