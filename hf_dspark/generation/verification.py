"""Speculative verification: what the target commits of a draft, without changing what it would have said."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F
from transformers import LogitsProcessorList

from .choice import draw, most_likely


def verify(
    input_ids: torch.Tensor,
    draft: torch.Tensor,
    draft_scores: torch.Tensor | None,
    logits: torch.Tensor,
    logits_processor: LogitsProcessorList,
    do_sample: bool,
    best: torch.Tensor | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """
    Commit draft tokens left to right, up to and including the first that the target replaces, or one token more.

    Greedy: a draft token stands if it is the target's own choice. Sampling: x ~ q stands with probability
    min(1, p(x) / q(x)), otherwise the token comes from the residual max(p - q, 0); either way it is distributed as p
    (Leviathan et al. 2023, theorem 1). Processors see each committed prefix once, in order.

    Args:
        input_ids: the committed sequence, (1, length).
        draft: the draft tokens, (1, ℓ).
        draft_scores: their scores (1, ℓ, V); the softmax is q. not needed when greedy or for an empty draft.
        logits: the target's logits, (1, ℓ + 1, V), in float32 unless `best` is known.
        logits_processor: the processors and warpers of the request.
        do_sample: sample, or take the most likely token.
        best: the most likely tokens (1, ℓ + 1) by the logits, if they are known and no processor changes them.

    Yields:
        Each committed token (1, 1) with its processed scores (1, V).
    """
    for i in range(draft.shape[1] + 1):
        proposed = draft[:, i : i + 1]
        if best is not None:
            scores, token = logits[:, i], best[:, i : i + 1]
        else:
            scores = logits_processor(input_ids, logits[:, i].clone())
            if not do_sample:
                token = most_likely(scores)
            elif proposed.numel():
                token = _accept_or_replace(proposed, F.softmax(draft_scores[:, i], dim=-1), F.softmax(scores, dim=-1))
            else:
                token = draw(F.softmax(scores, dim=-1))
        yield token, scores
        if not torch.equal(token, proposed):
            return
        input_ids = torch.cat([input_ids, token], dim=-1)


def _accept_or_replace(proposed: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    uniform = torch.rand_like(q[:, :1])
    if uniform * q.gather(-1, proposed) < p.gather(-1, proposed):
        return proposed
    residual = (p - q).clamp(min=0)
    if not residual.any():  # p and q are equal up to rounding
        residual = p
    return draw(residual)
