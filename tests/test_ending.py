"""A text ends where the stopping criteria of transformers say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation import stopping_criteria as transformers_criteria

from hf_dspark.generation.ending import Ending


class Counts(StoppingCriteria):
    """Stops at a text with that many threes, and keeps what it was asked about."""

    def __init__(self, threes: int):
        self.threes, self.seen = threes, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids[0].tolist(), scores))
        return (input_ids == 3).sum(-1) >= self.threes


class EosFromThirdOn(EosTokenCriteria):
    """One of the usual two, but with another mind."""

    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids, scores, **kwargs) & (input_ids.shape[1] > 2)


@st.composite
def criteria(draw) -> StoppingCriteriaList:
    tokens = st.lists(st.integers(0, 5), min_size=1, max_size=2)
    kinds = {
        MaxLengthCriteria: st.builds(MaxLengthCriteria, st.integers(1, 6), st.sampled_from([None, 2, 100])),
        EosTokenCriteria: st.builds(EosTokenCriteria, tokens),
        EosFromThirdOn: st.builds(EosFromThirdOn, tokens),
        Counts: st.builds(Counts, st.integers(1, 3)),
    }
    return StoppingCriteriaList([draw(kinds[kind]) for kind in draw(st.lists(st.sampled_from([*kinds]), max_size=4))])


@settings(max_examples=200, deadline=None)
@given(criteria(), st.lists(st.integers(0, 5), min_size=1, max_size=7))
def test_where_all_criteria_together_say(stopping_criteria, tokens):
    ends, text = Ending(stopping_criteria), torch.tensor([tokens])
    for length in range(1, len(tokens) + 1):
        expected = bool(stopping_criteria(text[:, :length], None).all()) if stopping_criteria else False
        assert ends(text[:, :length], None) is expected


def test_a_criterion_of_the_users_sees_every_token():
    mine = Counts(threes=9)
    ends = Ending(StoppingCriteriaList([MaxLengthCriteria(2), EosTokenCriteria(3), mine]))
    assert [ends(torch.tensor([[1, 3]])[:, :n], (n,)) for n in (1, 2)] == [False, True]
    assert mine.seen == [([1], (1,)), ([1, 3], (2,))]


@pytest.mark.parametrize("longest", [2, 8])
def test_texts_longer_than_the_model_was_made_for_are_told_of(longest, monkeypatch):
    said = []
    monkeypatch.setattr(transformers_criteria.logger, "warning_once", said.append)
    ends = Ending(StoppingCriteriaList([MaxLengthCriteria(4, max_position_embeddings=longest)]))
    assert [ends(torch.zeros(1, n), None) for n in range(1, 5)] == [False, False, False, True]
    assert bool(said) == (longest == 2)
