"""Conversations in the target's own words: self-written ones, and given ones answered anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .continuations import Continuation, continuations
from .openings import OPENINGS

logger = logging.get_logger(__name__)

MARKER = "\u241f"  # stands where the user's words go in a rendered chat template


def user_turn_prompts(tokenizer: PreTrainedTokenizerBase, openings: tuple[str, ...] = OPENINGS) -> list[list[int]]:
    """Token ids of the chat template up to the start of the user's words, followed by each opening."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARKER}], tokenize=False)
    head = text[: text.index(MARKER)]
    return [tokenizer(head + opening, add_special_tokens=False).input_ids for opening in openings]


def answer_header(tokenizer: PreTrainedTokenizerBase, **template_arguments) -> list[int]:
    """Token ids that close a user turn and open the answer."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARKER}], tokenize=False, add_generation_prompt=True, **template_arguments
    )
    return tokenizer(text[text.index(MARKER) + len(MARKER) :], add_special_tokens=False).input_ids


def eos_token_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token that ends a turn, by the target's generation config and the tokenizer."""
    theirs = target.generation_config.eos_token_id
    ids = theirs if isinstance(theirs, list) else [theirs]
    return {token for token in (*ids, tokenizer.eos_token_id) if token is not None}


def row_of(answer: Continuation) -> dict:
    """A training row: `input_ids` of the whole conversation, of which the last answer starts at `prompt_length`."""
    return {
        "input_ids": answer.input_ids + answer.tokens,
        "prompt_length": len(answer.input_ids),
        "temperature": answer.temperature,
    }


def self_written(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    temperatures: tuple[float, ...] = (0.0, 1.0),
    batch_size: int = 128,
    max_prompt_tokens: int = 128,
    max_new_tokens: int = 256,
    top_k: int = 50,
    seed: int = 0,
    known: Iterable[tuple[int, ...]] = (),
    **template_arguments,
) -> Iterator[dict]:
    """
    Conversations of one question and one answer, for ever, both written by the target.

    The questions are sampled at temperature 1 behind one of [`OPENINGS`]; their answers take `temperatures` in turn.
    A question that was asked before, or is among the `known` prompts (token ids), is not answered again.
    """
    generator = torch.Generator(target.device).manual_seed(seed)
    openings, header = user_turn_prompts(tokenizer), answer_header(tokenizer, **template_arguments)
    eos, questions, asked = eos_token_ids(target, tokenizer), deque[list[int]](), set(known)
    answered = 0

    def next_prompt() -> Continuation:
        nonlocal answered
        if questions:
            answered += 1
            return Continuation(
                questions.popleft(), max_new_tokens, temperatures[answered % len(temperatures)], about="answer"
            )
        opening = openings[int(torch.randint(len(openings), (), generator=generator, device=target.device))]
        return Continuation(opening, max_prompt_tokens, temperature=1.0, about="question")

    for written in continuations(target, next_prompt, eos, batch_size, top_k, generator):
        if written.about == "answer":
            yield row_of(written)
        elif written.tokens[-1] in eos and len(written.tokens) > 4:
            question = written.input_ids + written.tokens[:-1] + header
            if tuple(question) not in asked:
                asked.add(tuple(question))
                questions.append(question)


def answered_anew(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterable[tuple[int, list[dict[str, str]]]],
    temperatures: tuple[float, ...] = (0.0, 1.0),
    batch_size: int = 128,
    max_prompt_tokens: int = 1024,
    max_new_tokens: int = 256,
    top_k: int = 50,
    seed: int = 0,
    **template_arguments,
) -> Iterator[dict]:
    """
    Given conversations, each with its number, with every assistant turn written by the target; the number comes back
    as the row's `conversation`.

    All answers of a conversation have one of the `temperatures`, by its number. Without an assistant turn at its end
    a conversation gets one. It ends early where its prompt grows beyond `max_prompt_tokens`; one whose first prompt
    does is left out, and a warning says how many these were.
    """
    generator = torch.Generator(target.device).manual_seed(seed)
    waiting, source, left_out = deque[Continuation](), iter(conversations), 0

    def ask(number: int, said: list[dict[str, str]], rest: list[dict[str, str]]) -> bool:
        """Queue the next answer: `said` up to the next user turn of `rest`; false if there is none, or no room."""
        said = list(said)
        for place, message in enumerate(rest):
            if message["role"] == "assistant":
                continue
            said.append(message)
            if message["role"] == "user" and (place + 1 == len(rest) or rest[place + 1]["role"] != "user"):
                prompt = tokenizer.apply_chat_template(
                    said, add_generation_prompt=True, return_dict=True, **template_arguments
                )["input_ids"]
                if len(prompt) > max_prompt_tokens:
                    return False
                temperature = temperatures[number % len(temperatures)]
                waiting.append(
                    Continuation(prompt, max_new_tokens, temperature, about=(number, said, rest[place + 1 :]))
                )
                return True
        return False

    def next_prompt() -> Continuation | None:
        nonlocal left_out
        while not waiting:
            number, messages = next(source, (None, None))
            if messages is None:
                return None
            left_out += not ask(number, [], messages)
        return waiting.popleft()

    for written in continuations(target, next_prompt, eos_token_ids(target, tokenizer), batch_size, top_k, generator):
        number, said, rest = written.about
        said = [*said, {"role": "assistant", "content": tokenizer.decode(written.tokens, skip_special_tokens=True)}]
        if not ask(number, said, rest):
            yield {**row_of(written), "conversation": number}
    if left_out:
        logger.warning(
            f"{left_out} conversations had no question of at most {max_prompt_tokens} tokens and were left out."
        )
