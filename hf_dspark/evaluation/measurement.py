"""All ways of decoding side by side: every prompt is answered by each in turn, right after one another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import transformers
from rich.progress import Progress
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.generation import BaseStreamer

from ..devices import device_name
from ..generation.profiler import ensure_costs
from ..generation.trace import Round, acceptance_length, trace
from ..modeling_dspark import DSparkModel
from ..version import __version__
from .acceptance import (
    accepted_histogram,
    conditional_acceptance,
    judged_by_position,
    marginal_acceptance,
    threshold_sweep,
    time_split,
    verification_waste,
)
from .prompts import Conversation, check_text
from .reliability import reliability_of
from .results import FullBlocks, Machine, Report, Results, SetResults, Settings, Speed
from .variants import Variant, variants_for

GREEDY: dict = {"do_sample": False}
SAMPLE: dict = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
SAMPLING = {"greedy": GREEDY, "sample": SAMPLE}


@dataclass
class Answer:
    """
    What one way of decoding made of a prompt.

    Args:
        tokens: the new token ids.
        seconds: how long `generate()` took.
        steps: tokens that each forward pass of the target after the prompt's committed.
        rounds: what the drafter did, if there was one.
    """

    tokens: list[int]
    seconds: float
    steps: list[int]
    rounds: list[Round] = field(default_factory=list)


class StepSizes(BaseStreamer):
    """Counts the tokens of each step of transformers' assisted decoding, which streams them step by step."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.sizes.append(value.numel())

    def end(self) -> None: ...


def evaluate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkModel,
    sets: dict[str, list[Conversation]],
    *,
    max_new_tokens: int = 256,
    baselines: bool = True,
    seed: int = 0,
    target_name: str = "",
    drafter_name: str = "",
) -> Iterator[Report]:
    """
    Measure a drafter on sets of prompts, greedy and sampling at temperature 1.

    Args:
        sets: conversations by the name of their set.
        max_new_tokens: length at which an answer is cut.
        baselines: compare with prompt lookup and with DFlash, too.
        seed: of the sampling; prompt `n` is answered with seed `seed + n`.
        target_name, drafter_name: what the report calls them (default: what they were loaded from).

    Returns:
        An iterator over the report, which grows by one set each time.

    Raises:
        ValueError: the drafter does not fit the target, its settings do not fit the drafter, the target has no chat
            template, or a prompt is random tokens; all before anything is measured.
    """
    drafter.check_target(target)
    ensure_costs(target, drafter)
    variants, reasons = variants_for(target, drafter, baselines)
    check_text(target, tokenizer, sets)
    scheduling = drafter.generation_config
    report = Report(
        target=target_name or target.name_or_path,
        drafter=drafter_name or drafter.name_or_path,
        machine=machine_of(target),
        settings=Settings(
            max_new_tokens=max_new_tokens,
            num_draft_tokens=drafter.config.num_draft_tokens,
            num_assistant_tokens=scheduling.num_assistant_tokens,
            assistant_confidence_threshold=scheduling.assistant_confidence_threshold,
            seed=seed,
        ),
        not_applicable=reasons,
    )

    def reports() -> Iterator[Report]:
        respond = partial(answer, target, tokenizer, drafter)
        for variant in variants.values():
            respond(variant, next(iter(sets.values()))[0], max_new_tokens=16, **GREEDY)  # warm up
        with Progress(transient=True) as progress:
            task = progress.add_task("", total=2 * len(variants) * sum(map(len, sets.values())))
            advance = partial(progress.advance, task)
            for name, conversations in sets.items():
                results = {}
                for regime, sampling in SAMPLING.items():
                    progress.update(task, description=f"{name}, {regime}")
                    this_way = partial(respond, max_new_tokens=max_new_tokens, **sampling)
                    answers = side_by_side(this_way, variants, conversations, seed, advance)
                    results[regime] = summarise(answers, drafter.config.num_draft_tokens, sampling["do_sample"])
                report.sets[name] = SetResults(**results)
                yield report

    return reports()


def side_by_side(
    respond: Callable[[Variant, Conversation], Answer],
    variants: dict[str, Variant],
    conversations: list[Conversation],
    seed: int,
    advance: Callable[[], None],
) -> dict[str, list[Answer]]:
    """The answers of every variant to every conversation, in turns of who is first; `advance` is called for each."""
    answers: dict[str, list[Answer]] = {name: [] for name in variants}
    for number, messages in enumerate(conversations):
        for name in rotated(list(variants), number):
            set_seed(seed + number)
            answers[name].append(respond(variants[name], messages))
            advance()
    return answers


def rotated(items: list, turns: int) -> list:
    """`items`, beginning with another one each time."""
    first = turns % len(items)
    return items[first:] + items[:first]


def answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkModel,
    variant: Variant,
    messages: Conversation,
    **arguments,
) -> Answer:
    """The target's answer to a conversation, decoded one way."""
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(target.device)
    with variant(drafter) as way, trace(drafter) as rounds:
        streamer = StepSizes() if way and way.get("assistant_model") is not drafter else None
        begin = time.perf_counter()
        text = target.generate(**inputs, **way, **arguments, streamer=streamer)
        seconds = time.perf_counter() - begin
    tokens = text[0, inputs["input_ids"].shape[1] :].tolist()
    if streamer is not None:
        steps = streamer.sizes[2:]  # after the prompt, and what its forward pass committed
    elif way:
        steps = [1 + a_round.accepted for a_round in rounds]
    else:
        steps = [1] * (len(tokens) - 1)
    return Answer(tokens, seconds, steps, rounds)


def summarise(answers: dict[str, list[Answer]], slots: int, do_sample: bool) -> Results:
    """The measures of one set, from the answers of every way of decoding; `slots` is the drafter's block of drafts."""
    speeds = {name: speed(of_variant, answers["plain"], do_sample) for name, of_variant in answers.items()}
    ours = speeds["drafter"]
    rounds = [a_round for one in answers["drafter"] for a_round in one.rounds]
    return Results(
        prompts=len(answers["plain"]),
        acceptance_length=ours.acceptance_length,
        tokens_per_second=ours.tokens_per_second,
        plain_tokens_per_second=speeds["plain"].tokens_per_second,
        speedup=ours.speedup,
        speedup_spread=ours.speedup_spread,
        equal=ours.equal,
        verification_waste=verification_waste(rounds),
        time=time_split(rounds),
        full_blocks=full_block_results(answers.get("full_blocks", answers["drafter"]), slots),
        variants=speeds,
    )


def speed(answers: Sequence[Answer], plain: Sequence[Answer], do_sample: bool) -> Speed:
    """Speed of one way of decoding against the plain one on the same prompts."""
    rates, plain_rates = (np.array([len(one.tokens) / one.seconds for one in several]) for several in (answers, plain))
    steps = [size for one in answers for size in one.steps]
    return Speed(
        acceptance_length=sum(steps) / len(steps) if steps else None,
        tokens_per_second=float(np.median(rates)),
        tokens_per_second_spread=spread(rates),
        speedup=float(np.median(rates / plain_rates)),
        speedup_spread=spread(rates / plain_rates),
        equal=None if do_sample else sum(one.tokens == other.tokens for one, other in zip(answers, plain)),
    )


def spread(values: np.ndarray) -> tuple[float, float]:
    """10 % and 90 % quantile."""
    low, high = np.percentile(values, [10, 90])
    return float(low), float(high)


def full_block_results(answers: Sequence[Answer], slots: int) -> FullBlocks:
    """Acceptance by position, confidence and thresholds, from answers that verified all that was drafted."""
    by_prompt = [one.rounds for one in answers]
    rounds = [a_round for several in by_prompt for a_round in several]
    conditional = conditional_acceptance(rounds, slots)
    confident, calibrated = (any(getattr(one, name) for one in rounds) for name in ("confidence", "logit"))
    return FullBlocks(
        acceptance_length=acceptance_length(rounds) if rounds else None,
        verification_waste=verification_waste(rounds),
        judged=[len(flags) for flags in judged_by_position(rounds, slots)],
        conditional_acceptance=conditional,
        marginal_acceptance=marginal_acceptance(conditional),
        accepted_histogram=accepted_histogram(rounds, slots),
        confidence=[reliability_of(by_prompt, slot) for slot in range(slots)] if confident else [],
        confidence_overall=reliability_of(by_prompt) if confident else None,
        threshold_sweep=threshold_sweep(rounds),
        confidence_before=[reliability_of(by_prompt, slot, before=True) for slot in range(slots)]
        if calibrated
        else [],
    )


def machine_of(target: PreTrainedModel) -> Machine:
    """The machine that a model is on."""
    return Machine(
        device=device_name(target.device),
        threads=torch.get_num_threads(),
        dtype=str(target.dtype).removeprefix("torch."),
        torch=torch.__version__,
        transformers=transformers.__version__,
        hf_dspark=__version__,
    )


def summary(report: Report) -> Table:
    """The most important numbers, for the terminal."""
    table = Table(title=f"{report.drafter} with {report.target}")
    for column in ("set", "decoding"):
        table.add_column(column)
    for column in ("acceptance", "plain", "tokens/s", "speed-up", "equal"):
        table.add_column(column, justify="right")
    for name, results in report.sets.items():
        for decoding, found in (("greedy", results.greedy), ("sample", results.sample)):
            low, high = found.speedup_spread
            table.add_row(
                name,
                decoding,
                "–" if found.acceptance_length is None else f"{found.acceptance_length:.2f}",
                f"{found.plain_tokens_per_second:.1f}",
                f"{found.tokens_per_second:.1f}",
                f"{found.speedup:.2f} ({low:.2f}–{high:.2f})",
                "" if found.equal is None else f"{found.equal}/{found.prompts}",
            )
    return table
