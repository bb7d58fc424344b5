"""
Recordings of what a drafter did, and the trace files that keep them.

A trace file is JSON:

| key | what it holds |
|---|---|
| `format` | `"hf-dspark trace"` |
| `version` | 1 |
| `recordings` | one or more recordings, to be seen side by side; of each: |
| … `target`, `drafter`, `method` | names of the two models; how the drafter was run |
| … `settings` | arguments of `generate()`, as names and values |
| … `slots` | γ, tokens that the drafter drafts at most |
| … `prompt` | what was asked, as text (empty if it is not known) |
| … `start` | position of the answer in the sequence, that is the length of the prompt in tokens |
| … `answer` | token ids of the answer; the first comes from the target's pass over the prompt, before any round |
| … `pieces` | the text that each of them adds; `""` inside a character that several tokens make up |
| … `vocabulary` | text of every token id in the file, by id; bytes that are no text by themselves as `<F0 9F>` |
| … `rounds` | the rounds in order; of each: |
| …… `drafted` | token ids that were drafted |
| …… `verified` | how many of them were verified, from the left; the others were cut by the scheduler |
| …… `accepted` | how many were accepted and followed by one more token |
| …… `ended` | whether the text ended with an accepted draft token, which `accepted` does not count |
| …… `token` | the id committed last: the target's own, or the draft token that ended the text |
| …… `confidence` | predicted acceptance of each drafted token (see below) |
| …… `drafter` | for each drafted token the drafter's alternatives: `[token id, probability]`, most likely first |
| …… `target` | for each verified token, and for the slot behind them, the target's, given the drafts before it |
| …… `seconds` | `draft`, `head`, `verify` and `rest`, where the time of the round went |

A confidence is the probability that the token is accepted given that those before it were; their running product is
the survival. There is one more if the scheduler stopped before a token for it, and none without a confidence head.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..evaluation.variants import Variant, as_configured
from ..files import write_text
from ..generation.trace import Alternatives, Details, Round, Seconds, acceptance_length
from ..modeling_dspark import DSparkModel
from .token_text import pieces, vocabulary

FORMAT, VERSION = "hf-dspark trace", 1


@dataclass
class Recording:
    """
    One answer and the rounds that it was made in; the fields are those of the trace file.

    Raises:
        ValueError: the rounds do not make up the answer.
    """

    target: str
    drafter: str
    method: str
    settings: dict[str, str | int | float | bool | None]
    slots: int
    prompt: str
    start: int
    answer: list[int]
    pieces: list[str]
    vocabulary: dict[int, str]
    rounds: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        place = 0
        for number, (a_round, end) in enumerate(zip(self.rounds, self.ends), 1):
            details = a_round.details
            if details.anchor != self.start + place:
                raise ValueError(f"round {number} starts at {details.anchor}, not behind the one before it")
            if self.answer[place + 1 : end] != [*a_round.draft[: a_round.accepted], details.token]:
                raise ValueError(f"what round {number} committed is not what the answer says there")
            place = end - 1
        if place + 1 != len(self.answer):
            raise ValueError(f"the rounds make up {place + 1} tokens, the answer has {len(self.answer)}")
        if any(len(each.details.drafted) > self.slots for each in self.rounds):
            raise ValueError(f"a round drafts more than {self.slots} tokens")
        if len(self.pieces) != len(self.answer):
            raise ValueError("`pieces` are not one for each token of the answer")
        if missing := token_ids(self.answer, self.rounds) - self.vocabulary.keys():
            raise ValueError(f"the vocabulary lacks token {min(missing)}")

    @classmethod
    def of(
        cls,
        rounds: list[Round],
        sequence: torch.Tensor | list[int],
        tokenizer: PreTrainedTokenizerBase,
        *,
        target: str = "",
        drafter: str = "",
        method: str = "",
        settings: dict | None = None,
        slots: int | None = None,
        prompt: str = "",
    ) -> Recording:
        """
        The recording of one `generate()` call.

        Args:
            rounds: what `drafter.trace(alternatives=...)` collected of it.
            sequence: what it returned, prompt and answer, (length,).

        Raises:
            ValueError: the rounds have no details, or are not those of one call that returned `sequence`.
        """
        if not rounds or any(a_round.details is None for a_round in rounds):
            raise ValueError("No rounds with alternatives: generate inside `with drafter.trace(alternatives=5)`.")
        start = rounds[0].details.anchor
        answer = [int(token) for token in sequence[start:]]
        return cls(
            target=target,
            drafter=drafter,
            method=method,
            settings=settings or {},
            slots=slots or max(len(a_round.details.drafted) for a_round in rounds),
            prompt=prompt,
            start=start,
            answer=answer,
            pieces=pieces(tokenizer, answer),
            vocabulary=vocabulary(tokenizer, token_ids(answer, rounds)),
            rounds=rounds,
        )

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ends(self) -> list[int]:
        """For each round, how long the answer was after it."""
        ends, end = [], 1
        for a_round in self.rounds:
            end += a_round.accepted + 1
            ends.append(end)
        return ends

    @property
    def seconds(self) -> Seconds:
        """Where the time of all rounds went."""
        names = asdict(Seconds())
        return Seconds(**{name: sum(getattr(each.seconds, name) for each in self.rounds) for name in names})

    @property
    def acceptance_length(self) -> float:
        """Tokens that a verification commits."""
        return acceptance_length(self.rounds)

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.drafter, self.method)))


def token_ids(answer: list[int], rounds: list[Round]) -> set[int]:
    """All tokens that a recording speaks of."""
    found = set(answer)
    for details in (a_round.details for a_round in rounds):
        found.update(details.drafted, *([token for token, _ in some] for some in details.drafter + details.target))
    return found


def record(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkModel,
    prompt: str,
    way: Variant = as_configured,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    alternatives: int = 5,
    seed: int = 0,
    target_name: str = "",
    drafter_name: str = "",
    method: str = "",
) -> Recording:
    """
    Have a prompt answered and record it.

    Args:
        prompt: put to the target in its chat template, if it has one.
        way: how the drafter is run.
        temperature: 0 is greedy; else the whole vocabulary is sampled from.
        alternatives: likely tokens that are kept of every slot.
        seed: of the sampling.
        target_name, drafter_name: what the recording calls them (default: what they were loaded from).
        method: what it calls the way.
    """
    arguments: dict = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature:
        arguments |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    if tokenizer.chat_template is None:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    else:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    inputs = inputs.to(target.device)
    with way(drafter) as ways:
        target.generate(**inputs, **ways, **(arguments | {"max_new_tokens": min(max_new_tokens, 8)}))  # warm up
        set_seed(seed)
        with drafter.trace(alternatives) as rounds:
            sequence = target.generate(**inputs, **ways, **arguments)[0]
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature} | ({"seed": seed} if temperature else {})
    return Recording.of(
        rounds,
        sequence,
        tokenizer,
        target=target_name or target.name_or_path,
        drafter=drafter_name or drafter.name_or_path,
        method=method,
        settings=settings,
        slots=drafter.config.num_draft_tokens,
        prompt=prompt,
    )


def save(recordings: list[Recording], path: str | os.PathLike) -> None:
    """Write a trace file, whole or not at all."""
    content = {"format": FORMAT, "version": VERSION, "recordings": [as_json(each) for each in recordings]}
    write_text(path, json.dumps(content, allow_nan=False) + "\n")


def load(path: str | os.PathLike) -> list[Recording]:
    """
    The recordings of a trace file.

    Raises:
        ValueError: the file is no trace file, and why.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_no_number)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"its `format` is not {FORMAT!r}")
        if content["version"] != VERSION:
            raise ValueError(f"its version is {content['version']}, this package reads {VERSION}")
        recordings = [from_json(each) for each in content["recordings"]]
        if not recordings:
            raise ValueError("it holds no recording")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a trace of `hf-dspark view --json`: {reason}.") from error
    return recordings


def as_json(recording: Recording) -> dict:
    """A recording as the trace file holds it."""
    content = {name: value for name, value in vars(recording).items() if name != "rounds"}
    content["vocabulary"] = {str(token): text for token, text in recording.vocabulary.items()}
    content["rounds"] = [
        {
            "drafted": each.details.drafted,
            "verified": len(each.draft),
            "accepted": each.accepted,
            "ended": each.ended,
            "token": each.details.token,
            "confidence": each.details.confidence,
            "drafter": each.details.drafter,
            "target": each.details.target,
            "seconds": asdict(each.seconds),
        }
        for each in recording.rounds
    ]
    return content


def from_json(content: dict) -> Recording:
    """[`as_json`] back."""
    names = ("target", "drafter", "method", "prompt")
    return Recording(
        **{name: _text(content[name]) for name in names},
        settings={_text(name): _setting(value) for name, value in content["settings"].items()},
        slots=_count(content["slots"]),
        start=_count(content["start"]),
        answer=[_count(token) for token in content["answer"]],
        pieces=[_text(piece) for piece in content["pieces"]],
        vocabulary={int(token): _text(text) for token, text in content["vocabulary"].items()},
        rounds=list(_rounds(content["rounds"], _count(content["start"]))),
    )


def _rounds(rounds: list[dict], anchor: int) -> Iterator[Round]:
    for number, content in enumerate(rounds, 1):
        drafted = [_count(token) for token in content["drafted"]]
        verified, accepted, ended = _count(content["verified"]), _count(content["accepted"]), content["ended"]
        details = Details(
            anchor,
            drafted,
            [_share(value) for value in content["confidence"]],
            [_alternatives(some) for some in content["drafter"]],
            [_alternatives(some) for some in content["target"]],
            _count(content["token"]),
        )
        if not isinstance(ended, bool) or not accepted + ended <= verified <= len(drafted):
            raise ValueError(f"round {number} accepts {accepted} of {verified} verified of {len(drafted)} drafted")
        if len(details.drafter) != len(drafted) or len(details.target) != verified + 1:
            raise ValueError(f"round {number} does not have alternatives for each slot")
        if len(details.confidence) not in (0, len(drafted), len(drafted) + 1):
            raise ValueError(f"round {number} does not have a confidence for each slot")
        seconds = Seconds(**{name: _number(content["seconds"][name]) for name in asdict(Seconds())})
        yield Round(drafted[:verified], details.confidence[:verified], accepted, ended, seconds, details=details)
        anchor += accepted + 1


def _alternatives(some: list) -> Alternatives:
    return [(_count(token), _share(share)) for token, share in some]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} should be a text")
    value.encode()  # halves of characters are an error, too
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"{value!r} should be a number")
    return float(value)


def _share(value: object) -> float:
    if not 0 <= _number(value) <= 1.0001:
        raise ValueError(f"{value!r} should be a probability")
    return _number(value)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise TypeError(f"{value!r} should be a whole number")
    return value


def _setting(value: object) -> str | int | float | bool | None:
    if isinstance(value, str):
        return _text(value)
    if value is not None and not isinstance(value, bool):
        _number(value)
    return value  # type: ignore[return-value]


def _no_number(name: str) -> float:
    raise ValueError(f"it holds {name}")
