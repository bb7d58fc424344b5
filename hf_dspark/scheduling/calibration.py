"""From what is known of a slot before its token is drawn to the probability c_k that the token is accepted."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..files import write_text

BINS = 20
TEMPERATURES = np.logspace(-1, 1, 41)
RIDGE = 1.0  # in rounds, about: what a regression stakes on the slot before being right
SURE = 40.0  # logits beyond are as good as certain, and no number for a regression

METHODS = {
    "head": (True, False),
    "temperature": (True, False),
    "logit": (True, False),
    "margin": (False, True),
    "both": (True, True),
}  # whether they read the confidence head's logit, and the margin


@dataclass(frozen=True)
class Calibration:
    """
    c_k = σ(bias_k + logit_weight_k · logit + margin_weight_k · margin), with the logit that the confidence head gives
    slot k and the margin by which the likeliest token leads the second in the slot's logits, behind the sequential
    head. Both depend on x_<k only, so that a scheduler that goes by c_k stays causal.

    Args:
        method: `"head"` as it is; `"temperature"`: of the head's logits, by position (design: paper section 3.3);
            `"logit"`, `"margin"` and `"both"`: logistic regressions by position on what they are named after.
        bias, logit_weight, margin_weight: one for each of the γ positions; 0 for what the method does not read.

    Raises:
        ValueError: these are no such numbers.
    """

    method: str
    bias: tuple[float, ...]
    logit_weight: tuple[float, ...]
    margin_weight: tuple[float, ...]

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"a calibration is one of {', '.join(METHODS)}, not {self.method!r}")
        weights = (self.bias, self.logit_weight, self.margin_weight)
        if len(set(map(len, weights))) > 1 or not all(map(math.isfinite, sum(weights, ()))):
            raise ValueError(f"a calibration has as many finite numbers of each kind as there are positions: {self}")
        if self.method == "temperature" and not all(weight > 0 for weight in self.logit_weight):
            raise ValueError("temperatures have to be positive")

    @classmethod
    def identity(cls, num_draft_tokens: int, method: str = "head") -> Calibration:
        """The confidence head as it is, for γ positions; by another method's name, what that reads is read, too."""
        reads_logit, _ = METHODS[method]
        nothing = (0.0,) * num_draft_tokens
        return cls(method, nothing, (float(reads_logit),) * num_draft_tokens, nothing)

    @classmethod
    def of_temperatures(cls, temperatures: tuple[float, ...]) -> Calibration:
        """σ(logit / T_k)."""
        if not all(temperature > 0 for temperature in temperatures):
            raise ValueError(f"temperatures have to be positive, these are {list(temperatures)}")
        nothing = (0.0,) * len(temperatures)
        return cls("temperature", nothing, tuple(1 / float(temperature) for temperature in temperatures), nothing)

    @property
    def num_draft_tokens(self) -> int:
        return len(self.bias)

    @property
    def reads_logit(self) -> bool:
        return METHODS[self.method][0]

    @property
    def reads_margin(self) -> bool:
        return METHODS[self.method][1]

    @property
    def temperatures(self) -> tuple[float, ...]:
        """
        Raises:
            ValueError: it is more than temperatures.
        """
        if self.method not in ("head", "temperature"):
            raise ValueError(f"A calibration by {self.method} has no temperatures.")
        return tuple(1 / weight for weight in self.logit_weight)

    def __call__(self, slot: int, logit=0.0, margin=0.0):
        """Logit of c_k for slot `slot` (from 0), from numbers, arrays or tensors of one shape."""
        return self.bias[slot] + self.logit_weight[slot] * logit + self.margin_weight[slot] * margin


@dataclass(frozen=True)
class Rows:
    """
    Rounds that verified whole blocks.

    Args:
        logit, margin: what was known of each slot, (N, γ); without confidence head, the former is 0.
        accepted: 1 or 0, and NaN where the target said nothing, behind a rejected token or the text; (N, γ).
        prompt: the number of the prompt, (N,).
    """

    logit: np.ndarray
    margin: np.ndarray
    accepted: np.ndarray
    prompt: np.ndarray

    @property
    def survived(self) -> np.ndarray:
        """Whether a token and all before it were accepted, (N, γ); NaN behind the end of the text."""
        return np.where(np.logical_or.accumulate(self.accepted == 0, axis=1), 0.0, self.accepted)

    def __getitem__(self, index: np.ndarray) -> Rows:
        return Rows(self.logit[index], self.margin[index], self.accepted[index], self.prompt[index])

    def confidence(self, calibration: Calibration) -> np.ndarray:
        """c, (N, γ)."""
        slots = range(self.accepted.shape[1])
        return sigmoid(np.stack([calibration(k, self.logit[:, k], self.margin[:, k]) for k in slots], axis=1))


def sigmoid(logit: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(logit, -SURE, SURE)))


def bin_sums(confidence: np.ndarray, accepted: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, ...]:
    """Sums of confidence, acceptance and weight in each of 20 bins of equal width, (20,) each."""
    index = np.minimum((confidence * BINS).astype(int), BINS - 1)
    return tuple(
        np.bincount(index, values, minlength=BINS) for values in (weights * confidence, weights * accepted, weights)
    )


def expected_calibration_error(confidence: np.ndarray, accepted: np.ndarray, weights: np.ndarray) -> float:
    """Mean over tokens of the difference between mean confidence and share accepted in their bin."""
    predicted, observed, count = bin_sums(confidence, accepted, weights)
    return float(np.abs(predicted - observed).sum() / count.sum()) if count.any() else 0.0


def survival_errors(confidence: np.ndarray, survived: np.ndarray) -> list[float]:
    """Expected calibration error of a_k = c_1 · … · c_k by position, from c and [`Rows.survived`], (N, γ) each."""
    survival = confidence.cumprod(axis=1)
    return [_survival_error(a, flags) for a, flags in zip(survival.T, survived.T)]


def _survival_error(survival: np.ndarray, survived: np.ndarray) -> float:
    known = ~np.isnan(survived)
    return expected_calibration_error(survival[known], survived[known], np.ones(known.sum()))


# Fits


def fit(method: str, rows: Rows) -> Calibration:
    """The calibration by that method, fitted to rounds that verified whole blocks."""
    if method == "head":
        return Calibration.identity(rows.accepted.shape[1])
    return fit_temperatures(rows) if method == "temperature" else fit_regressions(method, rows)


def fit_temperatures(rows: Rows) -> Calibration:
    """
    Sequential temperature scaling: position by position, the temperature with the least expected calibration error of
    the survival a_k, earlier positions fixed (design: paper section 3.3). Of equals, the one closest to 1.
    """
    from_one = sorted(TEMPERATURES, key=lambda temperature: abs(math.log(temperature)))
    survival, temperatures = np.ones(len(rows.prompt)), []
    for logit, survived in zip(rows.logit.T, rows.survived.T):

        def error(temperature: float, earlier=survival, logit=logit, survived=survived) -> float:
            return _survival_error(earlier * sigmoid(logit / temperature), survived)

        temperatures.append(min(from_one, key=error))
        survival = survival * sigmoid(logit / temperatures[-1])
    return Calibration.of_temperatures(tuple(temperatures))


def fit_regressions(method: str, rows: Rows) -> Calibration:
    """
    Logistic regressions by position, to the tokens that were judged. Each is drawn a little to the one before it, so
    that positions which few drafts reach take after those that many do.
    """
    features = np.stack([np.ones_like(rows.logit), rows.logit, rows.margin]).clip(-SURE, SURE)
    read = np.array([True, *METHODS[method]])
    weights, fitted = np.zeros(3), []
    for k, accepted in enumerate(rows.accepted.T):
        judged = ~np.isnan(accepted)
        weights = weights.copy()
        weights[read] = _regress(features[read][:, judged, k].T, accepted[judged], weights[read])
        fitted.append(weights.tolist())
    return Calibration(method, *map(tuple, zip(*fitted)))


def _regress(features: np.ndarray, accepted: np.ndarray, prior: np.ndarray, steps: int = 50) -> np.ndarray:
    """Weights (d,) of least log loss, and squared distance from `prior`, for features (n, d), by Newton's method."""

    def loss(weights: np.ndarray) -> float:
        z = features @ weights
        return float(np.logaddexp(0, z).sum() - accepted @ z + RIDGE / 2 * ((weights - prior) ** 2).sum())

    weights = prior
    for _ in range(steps):
        predicted = sigmoid(features @ weights)
        slope = features.T @ (predicted - accepted) + RIDGE * (weights - prior)
        curvature = (features.T * (predicted * (1 - predicted))) @ features + RIDGE * np.eye(len(prior))
        step = np.linalg.solve(curvature, slope)
        length = 1.0
        while loss(weights - length * step) > loss(weights) and length > 1e-4:
            length /= 2
        weights = weights - length * step
        if np.abs(length * step).max() < 1e-8:
            break
    return weights


# Files of other engines


def read_temperatures(file: str | os.PathLike, num_draft_tokens: int) -> Calibration:
    """
    Read a temperature file of SGLang (`temperatures`) or TensorRT-LLM (`sts_temperatures`, or the same name).

    Args:
        num_draft_tokens: γ of the drafter.

    Raises:
        OSError: there is no such file.
        ValueError: it is no such file, or one for another number of positions.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        name = "temperatures" if "temperatures" in content else "sts_temperatures"
        calibration = Calibration.of_temperatures(tuple(map(float, content[name])))
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{file} is not a temperature file: {reason}.") from error
    if calibration.num_draft_tokens != num_draft_tokens:
        raise ValueError(
            f"{file} has {calibration.num_draft_tokens} temperatures, this drafter drafts {num_draft_tokens} tokens."
        )
    return calibration


def write_temperatures(
    file: str | os.PathLike,
    calibration: Calibration,
    dataset: str = "",
    num_samples: int = 0,
    ece_before: list[float] | None = None,
    ece_after: list[float] | None = None,
) -> None:
    """
    Write a temperature file in SGLang's spelling, which TensorRT-LLM reads, too.

    Args:
        calibration: by temperature.
        dataset: what it was fitted on.
        num_samples: how many rounds that were.
        ece_before, ece_after: expected calibration error of the survival, by position.

    Raises:
        ValueError: `calibration` is more than temperatures.
    """
    content = {
        "temperatures": calibration.temperatures,
        "dataset": dataset,
        "num_samples": num_samples,
        "ece_before": ece_before or [],
        "ece_after": ece_after or [],
    }
    write_text(file, json.dumps(content, indent=2) + "\n")
