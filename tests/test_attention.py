"""The target's attention while it verifies: the same sums, without copies of keys and values for every query head."""

from __future__ import annotations

import pytest
import torch
from conftest import SLIDING, prompt, tiny_drafter, tiny_target
from torch.nn import functional as F

from hf_dspark import trace
from hf_dspark.compat import CACHE
from hf_dspark.generation.attention import attention_for_one, own_attention


@pytest.fixture
def heads_of_keys(monkeypatch):
    """The heads that keys had, call by call."""
    seen, sdpa = [], F.scaled_dot_product_attention

    def spy(query, key, value, **arguments):
        seen.append(key.shape[1])
        return sdpa(query, key, value, **arguments)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


@pytest.mark.parametrize("family", ["llama", "qwen3", *(family for family in SLIDING if family != "gemma2")])
def test_a_short_pass_says_the_same_without_copies(family, heads_of_keys):
    target = tiny_target(family, attn_implementation="sdpa", num_attention_heads=4, num_key_value_heads=2)
    ids, logits = prompt(40), []
    for way in (torch.no_grad, lambda: attention_for_one(target)):
        with torch.no_grad(), way():
            cache = target(ids[:, :35], use_cache=True)[CACHE]
            heads_of_keys.clear()
            logits.append(target(ids[:, 35:], use_cache=True, **{CACHE: cache}).logits)
    assert set(heads_of_keys) == {2}
    torch.testing.assert_close(*logits, atol=2e-4, rtol=1e-4)
    assert target.config._attn_implementation == "sdpa"


def test_it_stays_away_where_it_has_nothing_to_gain():
    target = tiny_target("llama", attn_implementation="eager", num_attention_heads=4, num_key_value_heads=2)
    with attention_for_one(target):
        assert target.config._attn_implementation == "eager"


def test_generation_copies_no_keys(heads_of_keys):
    target = tiny_target("llama", attn_implementation="sdpa", num_attention_heads=4, num_key_value_heads=2)
    drafter = tiny_drafter(target, num_key_value_heads=4)
    plain = target.generate(prompt(9), max_new_tokens=12, do_sample=False)
    heads_of_keys.clear()
    with trace(drafter) as rounds:
        out = target.generate(prompt(9), assistant_model=drafter, max_new_tokens=12, do_sample=False)
    assert out.tolist() == plain.tolist() and any(len(a_round.draft) > 1 for a_round in rounds)
    assert heads_of_keys.count(2) >= len(rounds) * target.config.num_hidden_layers
    assert target.config._attn_implementation == own_attention(target.config) == "sdpa"


def test_a_request_that_fails_leaves_the_target_as_it_was():
    target = tiny_target("llama", attn_implementation="sdpa", num_attention_heads=4, num_key_value_heads=2)

    def broken(*_):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        target.generate(prompt(9), assistant_model=tiny_drafter(target), max_new_tokens=9, stopping_criteria=[broken])
    assert target.config._attn_implementation == "sdpa"
