"""Which token comes next, given scores: the most likely, or a draw; and that of a slot of a draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..modeling_dspark import DSparkModel

BLIND = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)  # do not look at the text


def most_likely(scores: torch.Tensor) -> torch.Tensor:
    """The first of the highest of scores (..., V), (..., 1)."""
    if scores.device.type == "cpu":  # where numpy takes a fifth of the time
        return torch.from_numpy(scores.float().numpy().argmax(-1, keepdims=True))
    return scores.argmax(-1, keepdim=True)


def top_2_margin(logits: torch.Tensor) -> torch.Tensor:
    """By how much the largest of logits (..., V) exceeds the second, (...)."""
    first = most_likely(logits)
    second = logits.scatter(-1, first, -torch.inf).amax(-1, keepdim=True)  # on a CPU far faster than `topk`
    return (logits.gather(-1, first) - second).squeeze(-1)


def draw(weights: torch.Tensor) -> torch.Tensor:
    """
    Tokens (n, 1), each drawn with a probability in proportion to its weight in (n, V).

    On a CPU `torch.multinomial` makes a random number for every token of the vocabulary, which takes longer than
    much of a draft; here it is one, looked up in cumulative weights, in double precision.
    """
    if weights.device.type == "cpu":
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        if bool(((total > 0) & total.isfinite()).all()):
            places = torch.rand_like(total) * total
            return torch.searchsorted(cumulative, places, right=True)
    return torch.multinomial(weights, num_samples=1)  # says what is wrong with weights that are none


def choose(
    drafter: DSparkModel,
    logits: torch.Tensor,
    processors: Sequence[LogitsProcessorList],
    text: Callable[[int], torch.Tensor],
    do_sample: bool,
) -> tuple[list[bool], torch.Tensor, torch.Tensor]:
    """
    The draft tokens of a slot.

    Args:
        logits: of each of n rows, (n, V_d), over the draft vocabulary, in float32.
        processors: the request's, for each row.
        text: the text (1, length) before the slot in the row of that number.
        do_sample: draw the tokens, or take the most likely.

    Returns:
        Which rows have a token, for processors may forbid all; of these rows the token (n', 1), and the processed
        scores (n', V), whose softmax it was drawn from. Where nothing is drawn, only a trace with alternatives reads
        them; without one they may be over the draft vocabulary.
    """
    blind = all(isinstance(processor, BLIND) for processor in processors[0])
    if blind:  # the tokens that the drafter does not have make no difference to them
        scores = processors[0](text(0), logits)
    else:
        scores = over_vocabulary(drafter, logits)
        scores = torch.cat([process(text(i), scores[i : i + 1]) for i, process in enumerate(processors)])
    token = most_likely(scores)
    allowed = scores.gather(-1, token)[:, 0].isfinite().tolist()
    if not all(allowed):
        kept = torch.tensor(allowed, device=scores.device)
        scores, token = scores[kept], token[kept]
    if do_sample:
        token = draw(F.softmax(scores, dim=-1))
    if blind:
        token = drafter.target_ids_of(token)
        if do_sample or drafter.alternatives:
            scores = over_vocabulary(drafter, scores)
    return allowed, token, scores


def over_vocabulary(drafter: DSparkModel, logits: torch.Tensor) -> torch.Tensor:
    """Logits (R, V_d) of draft token ids as logits (R, V) of the target's; -inf where the drafter has no token."""
    if (ids := drafter.draft_token_ids) is None:
        return logits
    return logits.new_full((len(logits), drafter.config.vocab_size), -torch.inf).index_copy_(
        1, ids.to(logits.device), logits
    )
