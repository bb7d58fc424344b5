"""Draws and choices of tokens."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_drafter, tiny_target
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_dspark import trace
from hf_dspark.generation.choice import choose, draw, most_likely, over_vocabulary


def test_draws_are_in_proportion_to_the_weights():
    weights = torch.tensor([[0.0, 3.0, 0.0, 1.0, 1e-3, 6.0, 0.0], [0.2, 0.0, 0.0, 0.2, 0.2, 0.0, 0.4]])
    torch.manual_seed(0)
    drawn = torch.stack([draw(weights)[:, 0] for _ in range(20_000)])
    for row, expected in zip(drawn.T, weights.double()):
        counts, possible = row.bincount(minlength=7), expected > 0
        assert not counts[~possible].any()
        assert chisquare(counts[possible], 20_000 * expected[possible] / expected.sum()).pvalue > 1e-3


@settings(max_examples=50, deadline=None)
@given(place=st.integers(0, 999), size=st.sampled_from([1e-30, 1e-7, 1.0, 1e20]), seed=st.integers(0, 99))
def test_the_only_token_with_a_weight_is_drawn(place, size, seed):
    weights = torch.zeros(1, 1000)
    weights[0, place] = size
    torch.manual_seed(seed)
    assert draw(weights).tolist() == [[place]]


def test_likely_tokens_do_not_hide_behind_many_unlikely_ones():
    """In single precision, sums of so many small weights would come out wrong."""
    weights = torch.cat([torch.full((1, 200_000), 1e-8), torch.tensor([[1.0]]), torch.full((1, 200_000), 1e-8)], 1)
    torch.manual_seed(0)
    drawn = torch.cat([draw(weights.expand(50, -1)) for _ in range(40)])[:, 0]
    assert binomtest(int((drawn < 200_000).sum()), 2000, 0.002 / 1.004).pvalue > 1e-3
    assert binomtest(int((drawn > 200_000).sum()), 2000, 0.002 / 1.004).pvalue > 1e-3


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]], ids=str)
def test_weights_that_are_none_are_errors(weights):
    with pytest.raises(RuntimeError):
        draw(torch.tensor([weights]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_first_of_the_most_likely(dtype):
    """Whatever the precision; in a low one, ties are common."""
    assert most_likely(torch.tensor([[1, 4, 4, -torch.inf], [2, 2, 2, 2]], dtype=dtype)).tolist() == [[1], [0]]
    scores = (8 * torch.randn(200, 5003, generator=torch.Generator().manual_seed(0))).round().to(dtype)
    first = (scores == scores.amax(-1, keepdim=True)).int().argmax(-1, keepdim=True)
    assert torch.equal(most_likely(scores), first) and torch.equal(scores.float().argmax(-1, keepdim=True), first)


@pytest.mark.parametrize(
    "processor",
    [TemperatureLogitsWarper(0.7), TopKLogitsWarper(3), TopPLogitsWarper(0.6), MinPLogitsWarper(0.2)],
    ids=lambda processor: type(processor).__name__,
)
def test_tokens_that_the_drafter_lacks_make_no_difference(processor):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, draft_vocab_size=12)
    drafter.bind(target)
    logits, processors = 3 * torch.randn(5, 12), LogitsProcessorList([processor])
    with trace(drafter, alternatives=1):
        _, tokens, scores = choose(drafter, logits, [processors] * 5, lambda i: torch.empty(0), do_sample=False)
    whole = processors(torch.empty(0), over_vocabulary(drafter, logits))
    torch.testing.assert_close(scores, whole)
    assert torch.equal(tokens, whole.argmax(-1, keepdim=True))
    _, tokens, scores = choose(drafter, logits, [processors] * 5, lambda i: torch.empty(0), do_sample=True)
    assert scores.gather(-1, tokens).isfinite().all()


@pytest.mark.parametrize("do_sample", [False, True])
def test_rows_whose_tokens_are_all_forbidden_have_none(do_sample):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, draft_vocab_size=12)
    drafter.bind(target)
    none = LogitsProcessorList([SuppressTokensLogitsProcessor(drafter.draft_token_ids.tolist(), device="cpu")])
    one = LogitsProcessorList([SuppressTokensLogitsProcessor(drafter.draft_token_ids[1:].tolist(), device="cpu")])
    allowed, tokens, scores = choose(drafter, torch.randn(3, 12), [none, one, none], lambda i: None, do_sample)
    assert allowed == [False, True, False]
    assert tokens.tolist() == [[drafter.draft_token_ids[0]]] and len(scores) == 1
    broken = torch.full((1, 12), torch.nan)
    assert not len(choose(drafter, broken, [LogitsProcessorList()], lambda i: None, do_sample)[1])
