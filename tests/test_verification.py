"""Properties of the verification rule itself, over arbitrary distributions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from hf_dspark.generation import verification
from hf_dspark.generation.verification import _accept_or_replace, verify


@st.composite
def distributions(draw, size=5):
    """A distribution that may have zeros."""
    weights = draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.3, 1.0, 2.5]), min_size=size, max_size=size))
    weights[draw(st.integers(0, size - 1))] += 1.0
    weights = torch.tensor(weights)
    return (weights / weights.sum())[None]


@settings(max_examples=40, deadline=None)
@given(q=distributions(), p=distributions())
def test_a_verified_token_is_distributed_as_p(q, p):
    """Exactly: the probability of acceptance is measured by bisecting the uniform draw, the residual is read off."""
    outcome = torch.zeros(5, dtype=torch.float64)
    for x in range(5):
        if q[0, x] == 0:
            continue
        proposed = torch.tensor([[x]])
        accepted = min(1.0, (p[0, x] / q[0, x]).item())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verification, "draw", lambda weights: weights)
            for uniform, stands in ((0.999999 * accepted, True), (accepted + 1e-6, False)):
                if accepted == 0 and stands:
                    continue
                patch.setattr(torch, "rand_like", lambda like, u=uniform: torch.full_like(like, u))
                result = _accept_or_replace(proposed, q, p)
                if uniform < 1:
                    assert (result is proposed) == stands
        outcome[x] += q[0, x].double() * accepted
        if accepted < 1:
            residual = result[0].double() / result.sum()
            outcome += q[0, x].double() * (1 - accepted) * residual
    torch.testing.assert_close(outcome, p[0].double(), atol=1e-5, rtol=0)


@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=6),
    st.lists(st.integers(0, 5), min_size=7, max_size=7),
)
@settings(max_examples=60, deadline=None)
def test_greedy_commits_the_common_prefix_and_one_token(draft, choices):
    logits = torch.nn.functional.one_hot(torch.tensor([choices[: len(draft) + 1]]), 6).float()
    committed = [
        token.item()
        for token, _ in verify(
            torch.zeros(1, 3, dtype=torch.long),
            torch.tensor([draft], dtype=torch.long),
            None,
            logits,
            LogitsProcessorList(),
            do_sample=False,
        )
    ]
    matches = next((i for i, (a, b) in enumerate(zip(draft, choices)) if a != b), len(draft))
    assert committed == choices[: matches + 1]


def test_processors_see_committed_prefixes_only_and_each_once():
    seen = []

    def processor(input_ids, scores):
        seen.append(input_ids[0].tolist())
        return scores

    logits = torch.nn.functional.one_hot(torch.tensor([[4, 5, 1, 2]]), 6).float()
    draft = torch.tensor([[4, 3, 1]])
    list(verify(torch.tensor([[0]]), draft, None, logits, LogitsProcessorList([processor]), do_sample=False))
    assert seen == [[0], [0, 4]]


def test_a_processor_cannot_change_the_logits_that_are_reported():
    def processor(input_ids, scores):
        return scores.fill_(0)

    logits = torch.randn(1, 2, 6)
    expected = logits.clone()
    list(
        verify(
            torch.tensor([[0]]),
            logits[:, :1].argmax(-1),
            None,
            logits,
            LogitsProcessorList([processor]),
            do_sample=False,
        )
    )
    assert torch.equal(logits, expected)
