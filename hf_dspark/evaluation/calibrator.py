"""Calibrates a drafter's confidences on prompts, and judges by prompts that were left out what that is worth."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..files import write_text
from ..generation.trace import Round, acceptance_length
from ..modeling_dspark import DSparkModel
from ..scheduling.calibration import Calibration, Rows, fit, survival_errors
from ..scheduling.profile import Acceptance, HardwareProfile
from .acceptance import conditional_acceptance, judged, marginal_acceptance
from .measurement import SAMPLING, answer, machine_of
from .prompts import Conversation, check_text
from .reliability import RESAMPLES, interval, log_losses, reliability, resamples
from .results import Estimate, Machine, Reliability
from .variants import uncalibrated

FOLDS = 4
WITH_HEAD = ("head", "temperature", "logit", "margin", "both")
WITHOUT_HEAD = ("mean", "margin")


@dataclass
class Candidate:
    """
    One way to predict acceptance, on prompts that it was not fitted to.

    Args:
        overall: reliability over all positions.
        by_position: the same by position.
        survival_ece: by position, expected calibration error of the predicted survival.
        gain: log loss per judged token that it has less than what a drafter does without calibration.
    """

    overall: Reliability
    by_position: list[Reliability]
    survival_ece: list[float]
    gain: Estimate


@dataclass
class Choice:
    """
    One regime.

    Args:
        rounds: whole blocks that were drafted and verified.
        acceptance: what was accepted of them.
        candidates: the ways that were tried: `"head"`, the confidence head as it is; of a drafter without one,
            `"mean"`, the past acceptance by position; and the methods of [`Calibration`].
        chosen: the one that is used.
        calibration: fitted to all prompts; `None` if what there was is best.
        temperatures: those fitted to all prompts, for other engines; `None` without confidence head.
    """

    rounds: int
    acceptance: Acceptance
    candidates: dict[str, Candidate]
    chosen: str
    calibration: Calibration | None
    temperatures: Calibration | None


@dataclass
class CalibrationReport:
    """
    Args:
        target, drafter: names of the two models.
        machine: where the drafts were made.
        greedy, sample: what was found taking the most likely token, and sampling at temperature 1.
        schema_version: of this file.
    """

    schema_version: int = field(default=1, init=False)
    target: str
    drafter: str
    machine: Machine
    greedy: Choice
    sample: Choice

    @property
    def regimes(self) -> dict[str, Choice]:
        return {name: getattr(self, name) for name in SAMPLING}

    def put_into(self, profile: HardwareProfile) -> None:
        """Let a profile carry what was chosen, and the acceptance that was found, in the place of what it had."""
        profile.calibration = {
            name: choice.calibration for name, choice in self.regimes.items() if choice.calibration is not None
        }
        profile.acceptance = {name: choice.acceptance for name, choice in self.regimes.items()}

    def save(self, path: str | os.PathLike) -> None:
        """Write the JSON file, whole or not at all."""
        write_text(path, json.dumps(asdict(self), indent=2, allow_nan=False) + "\n")


def calibrate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkModel,
    sets: dict[str, list[Conversation]],
    *,
    max_new_tokens: int = 256,
    seed: int = 0,
    target_name: str = "",
    drafter_name: str = "",
) -> CalibrationReport:
    """
    Answer prompts with whole blocks, greedy and sampling at temperature 1, and learn from what is accepted.

    Every way to predict acceptance is fitted to three quarters of the prompts and judged on the rest, in turn. From
    the simplest to the one that reads most, each takes the place of the best so far if its log loss is lower there in
    97.5 % of bootstrap samples of the prompts; so what does not help beyond noise is not used.

    Args:
        sets: conversations by the name of their set.
        max_new_tokens: length at which an answer is cut.
        seed: of the sampling; prompt `n` is answered with seed `seed + n`.
        target_name, drafter_name: what the report calls them (default: what they were loaded from).

    Raises:
        ValueError: the drafter does not fit the target, there are too few prompts, one is random tokens, the target
            has no chat template, or no whole block was drafted.
    """
    drafter.check_target(target)
    conversations = [messages for several in sets.values() for messages in several]
    if len(conversations) < FOLDS:
        raise ValueError(f"{len(conversations)} prompts are too few to learn from some and judge by others; use more.")
    check_text(target, tokenizer, sets)
    machine = machine_of(target)
    names = {"target": target_name or target.name_or_path, "drafter": drafter_name or drafter.name_or_path}
    choices = {}
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(SAMPLING) * len(conversations))
        for regime, sampling in SAMPLING.items():
            progress.update(task, description=regime)
            rounds = []
            for number, messages in enumerate(conversations):
                set_seed(seed + number)
                arguments = {"max_new_tokens": max_new_tokens, **sampling}
                rounds.append(answer(target, tokenizer, drafter, uncalibrated, messages, **arguments).rounds)
                progress.advance(task)
            conditions = {
                **names,
                "prompts": ", ".join(sets),
                "num_prompts": len(conversations),
                "max_new_tokens": max_new_tokens,
                "temperature": sampling.get("temperature", 0.0),
                "dtype": machine.dtype,
                "seed": seed,
            }
            choices[regime] = choose(rounds, drafter.config.num_draft_tokens, conditions)
    return CalibrationReport(names["target"], names["drafter"], machine, choices["greedy"], choices["sample"])


def choose(rounds_by_prompt: list[list[Round]], slots: int, conditions: dict) -> Choice:
    """The best way to predict acceptance in one regime, from rounds that recorded margins and logits."""
    every_round = [a_round for rounds in rounds_by_prompt for a_round in rounds]
    rows = rows_of(rounds_by_prompt, slots)
    if not len(rows.prompt):
        raise ValueError(f"No block of {slots} tokens was drafted in these answers; let them be longer.")
    has_head = any(a_round.logit for a_round in every_round)
    methods = WITH_HEAD if has_head else WITHOUT_HEAD
    predicted = {method: held_out(method, rows) for method in methods}
    chosen = methods[0]
    for method in methods[1:]:
        better = gain(rows, predicted[chosen], predicted[method]).interval
        if better is not None and better[0] > 0:
            chosen = method
    conditional = conditional_acceptance(every_round, slots)
    acceptance = Acceptance(
        acceptance_length(every_round),
        tuple(conditional),
        tuple(marginal_acceptance(conditional)),
        len(every_round),
        conditions,
    )
    return Choice(
        rounds=len(rows.prompt),
        acceptance=acceptance,
        candidates={name: judge(rows, one, predicted[methods[0]]) for name, one in predicted.items()},
        chosen=chosen,
        calibration=None if chosen == methods[0] else fit(chosen, rows),
        temperatures=fit("temperature", rows) if has_head else None,
    )


def rows_of(rounds_by_prompt: list[list[Round]], slots: int) -> Rows:
    """Those rounds that drafted the whole block of `slots` tokens, as rows."""
    kept = [
        (a_round.logit or [0.0] * slots, a_round.margin, judged(a_round), number)
        for number, rounds in enumerate(rounds_by_prompt)
        for a_round in rounds
        if len(a_round.draft) == slots
    ]
    accepted = np.full((len(kept), slots), np.nan)
    for row, (_, _, flags, _) in zip(accepted, kept):
        row[: len(flags)] = flags
    logit, margin = (np.array([row[i] for row in kept], dtype=float).reshape(-1, slots) for i in (0, 1))
    return Rows(logit, margin, accepted, np.array([row[3] for row in kept]))


def held_out(method: str, rows: Rows) -> np.ndarray:
    """Confidences (N, γ) of each prompt's rounds, by a fit to the prompts that are not in the same fold."""
    if method == "mean":  # what a regression says that sees nothing
        method, rows = "margin", replace(rows, margin=np.zeros_like(rows.margin))
    confidence = np.empty_like(rows.accepted)
    for fold in range(FOLDS):
        left_out = rows.prompt % FOLDS == fold
        confidence[left_out] = rows[left_out].confidence(fit(method, rows[~left_out]))
    return confidence


def tokens(rows: Rows, *confidences: np.ndarray) -> Iterator[np.ndarray]:
    """Acceptance, prompt and confidences of the tokens that were judged, each (n,)."""
    is_judged = ~np.isnan(rows.accepted)
    prompt = np.broadcast_to(rows.prompt[:, None], is_judged.shape)
    return (values[is_judged] for values in (rows.accepted, prompt, *confidences))


def gain(rows: Rows, before: np.ndarray, after: np.ndarray) -> Estimate:
    """Mean log loss per token that `after` has less than `before`, with a paired bootstrap over prompts."""
    accepted, prompt, before, after = tokens(rows, before, after)
    gains = log_losses(before, accepted) - log_losses(after, accepted)
    drawn = [float(np.average(gains, weights=weights)) for weights in resamples(prompt, RESAMPLES, seed=0)]
    return Estimate(float(gains.mean()), interval(drawn))


def judge(rows: Rows, confidence: np.ndarray, before: np.ndarray) -> Candidate:
    """What confidences (N, γ) are worth; `before`, those without calibration."""
    accepted, prompt, flat = tokens(rows, confidence)
    by_position = []
    for k in range(confidence.shape[1]):
        here = ~np.isnan(rows.accepted[:, k])
        by_position.append(reliability(confidence[here, k], rows.accepted[here, k], rows.prompt[here]))
    return Candidate(
        overall=reliability(flat, accepted, prompt),
        by_position=by_position,
        survival_ece=survival_errors(confidence, rows.survived),
        gain=gain(rows, before, confidence),
    )


def summary(report: CalibrationReport) -> Table:
    """How every way to predict acceptance does on prompts that it was not fitted to, for the terminal."""
    table = Table(title=f"{report.drafter} with {report.target}, on prompts left out", box=SIMPLE_HEAD)
    table.add_column("confidence")
    for column in ("ECE", "Brier", "NLL", "AUC", "gain in NLL"):
        table.add_column(column, justify="right")
    for regime, choice in report.regimes.items():
        table.add_row(f"[italic]{regime}[/italic]")
        for method, found in choice.candidates.items():
            estimates = (*(getattr(found.overall, name) for name in ("ece", "brier", "log_loss", "auc")), found.gain)
            table.add_row(f"{method}\nused" if method == choice.chosen else method, *map(_cell, estimates))
        table.add_section()
    return table


def _cell(found: Estimate) -> str:
    """A value above its interval, so short that all columns fit into 80."""
    value, *ends = ("–" if x is None else f"{x:.3f}" for x in (found.value, *(found.interval or ())))
    return "\n".join([value, *(["–".join(end.replace("0.", ".", 1) for end in ends)] if ends else [])])
