"""Greedy output is the target's own, token for token, whatever the target, the cache, the length or the draft."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, SLIDING, prompt, scripted_drafter, tiny_drafter, tiny_target
from transformers import AutoConfig, AutoModelForCausalLM

from hf_dspark import trace
from hf_dspark.scheduling.costs import RoundCosts


def attentions(families) -> list[tuple[str, str]]:
    return [(name, kind) for name in families for kind in ("eager", "sdpa") if (name, kind) != ("gemma2", "sdpa")]


def check(target, ids, max_new_tokens=24, accuracy=0.8, **arguments):
    """Compare with plain generate(); returns the drafter and its rounds."""
    plain = target.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, **arguments)
    drafter = scripted_drafter(target, plain[0], accuracy)
    with trace(drafter) as rounds:
        drafted = target.generate(
            ids, assistant_model=drafter, max_new_tokens=max_new_tokens, do_sample=False, **arguments
        )
    assert drafted.tolist() == plain.tolist()
    return drafter, rounds


@pytest.mark.parametrize(("family", "attention"), attentions(FAMILIES))
def test_families(family, attention):
    target = tiny_target(family, attn_implementation=attention)
    for length in (1, 7, 20):
        _, rounds = check(target, prompt(length, seed=length))
        assert {a_round.accepted for a_round in rounds} - {0}, "no draft was ever accepted: this tests nothing"


@pytest.mark.parametrize(("family", "attention"), attentions(SLIDING))
def test_across_the_sliding_window(family, attention):
    target = tiny_target(family, attn_implementation=attention)
    window = target.config.sliding_window
    for length in (window - 2, window - 1, window, window + 1, 3 * window):
        for accuracy in (0.0, 0.6, 1.0):
            check(target, prompt(length, seed=length), max_new_tokens=30, accuracy=accuracy)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("width", range(6))
def test_every_width(family, width):
    target = tiny_target(family)
    plain = target.generate(prompt(6), max_new_tokens=25, do_sample=False)
    drafter = scripted_drafter(target, plain[0], accuracy=0.9)
    drafter.generation_config.num_assistant_tokens = width
    with trace(drafter) as rounds:
        out = target.generate(prompt(6), assistant_model=drafter, max_new_tokens=25, do_sample=False)
    assert out.tolist() == plain.tolist()
    assert max(len(a_round.draft) for a_round in rounds) == width


CURVES = {
    "never worth drafting": RoundCosts(draft=9.0, verify=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)),
    "hardly worth drafting": RoundCosts(draft=1.2, verify=(1.0, 1.1, 1.2, 1.3, 1.4, 1.5)),
    "free": RoundCosts(draft=0.0, verify=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)),
    "cliff at two tokens": RoundCosts(draft=0.1, verify=(1.0, 1.9, 1.95, 2.0, 2.05, 2.1)),
    "cliff at four tokens": RoundCosts(draft=0.1, verify=(1.0, 1.0, 1.0, 2.2, 2.2, 2.2), error=0.1),
    "dear rows and heads": RoundCosts(draft=1.0, verify=(1.0, 1.1, 1.2, 1.3, 1.4, 1.5), row=0.15, head=0.05),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("confidence", [False, True])
def test_hardware_aware(curve, confidence):
    target = tiny_target("llama", attn_implementation="sdpa")
    plain = target.generate(prompt(6), max_new_tokens=150, do_sample=False)
    drafter = scripted_drafter(target, plain[0], accuracy=0.9, enable_confidence_head=confidence)
    if confidence:
        torch.nn.init.constant_(drafter.confidence_head.proj.bias, 2.0)
    drafter.round_costs = CURVES[curve]
    with trace(drafter) as rounds:
        out = target.generate(prompt(6), assistant_model=drafter, max_new_tokens=150, do_sample=False)
    assert out.tolist() == plain.tolist()
    lengths = {len(a_round.draft) for a_round in rounds}
    assert (lengths == {0}) == (curve == "never worth drafting")


@pytest.mark.parametrize("max_new_tokens", range(1, 14))
def test_every_length(max_new_tokens):
    target = tiny_target("llama")
    for accuracy in (0.5, 1.0):
        _, rounds = check(target, prompt(5), max_new_tokens=max_new_tokens, accuracy=accuracy)
        assert all(len(a_round.draft) < max_new_tokens for a_round in rounds)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("from_anchor", [True, False])
def test_random_drafters(head, from_anchor):
    target = tiny_target("qwen3")
    fields = {"markov_head_type": head} if head else {"markov_rank": 0}
    drafter = tiny_drafter(target, sample_from_anchor=from_anchor, **fields)
    for length in (1, 9):
        plain = target.generate(prompt(length), max_new_tokens=20, do_sample=False)
        out = target.generate(prompt(length), assistant_model=drafter, max_new_tokens=20, do_sample=False)
        assert out.tolist() == plain.tolist()


def test_end_of_sequence_inside_a_draft():
    target = tiny_target("llama")
    text = target.generate(prompt(6), max_new_tokens=20, do_sample=False)[0]
    for place in range(6, len(text)):
        eos = text[place].item()
        drafter, _ = check(target, prompt(6), accuracy=1.0, eos_token_id=eos)
        check(target, prompt(6), accuracy=1.0, eos_token_id=[39, eos, 38])
        check(target, prompt(6), accuracy=1.0, eos_token_id=eos, min_new_tokens=place - 6 + 2)


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[5], [7, 8], [11]]},
    "sequence_bias": {"sequence_bias": [[[9], 5.0], [[10, 11], -4.0]]},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(4, 20))},
    "forced_eos": {"forced_eos_token_id": 1},
    "suppress": {"suppress_tokens": [6, 12, 20], "begin_suppress_tokens": [13, 14]},
    "decay": {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": 21},
    "prefix": {"prefix_allowed_tokens_fn": lambda batch, ids: [(int(ids[-1]) * 7 + k) % 36 + 4 for k in range(9)]},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_processors_see_each_tokens_own_prefix(name):
    check(tiny_target("llama"), prompt(8), accuracy=0.9, **PROCESSORS[name])


def test_static_cache_where_it_can_be_cropped():
    target = tiny_target("llama")
    probe = target.generate(
        prompt(4), max_new_tokens=2, cache_implementation="static", return_dict_in_generate=True, do_sample=False
    )
    cache = getattr(probe, "cache", None) or probe.past_key_values
    if cache.is_croppable:
        check(target, prompt(7), cache_implementation="static", disable_compile=True)
    else:
        drafter = tiny_drafter(target)
        with pytest.raises(ValueError, match="take back"):
            target.generate(prompt(7), assistant_model=drafter, cache_implementation="static", max_new_tokens=5)


def test_chunked_prefill():
    check(tiny_target("llama"), prompt(19), prefill_chunk_size=4)


def test_left_padding_of_a_single_row():
    target = tiny_target("llama")
    ids = torch.cat([torch.full((1, 3), 2), prompt(7)], dim=-1)
    mask = (torch.arange(10) >= 3).long()[None]
    plain = target.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    drafter = scripted_drafter(target, plain[0, 3:])  # the drafter's positions count real tokens only
    out = target.generate(ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=20, do_sample=False)
    assert out.tolist() == plain.tolist()


def test_input_embeddings_instead_of_ids():
    target = tiny_target("llama")
    embeddings = target.get_input_embeddings()(prompt(6))
    plain = target.generate(inputs_embeds=embeddings, max_new_tokens=15, do_sample=False)
    drafter = scripted_drafter(target, torch.cat([prompt(6)[0], plain[0]]))
    out = target.generate(inputs_embeds=embeddings, assistant_model=drafter, max_new_tokens=15, do_sample=False)
    assert out.tolist() == plain.tolist()


def test_pruned_draft_vocabulary():
    target = tiny_target("llama")
    drafter = tiny_drafter(target, draft_vocab_size=10)
    drafter.d2t.copy_(torch.arange(10) * 3 + 5 - torch.arange(10))
    plain = target.generate(prompt(6), max_new_tokens=30, do_sample=False)
    with trace(drafter) as rounds:
        out = target.generate(prompt(6), assistant_model=drafter, max_new_tokens=30, do_sample=False)
    assert out.tolist() == plain.tolist()
    assert {token for a_round in rounds for token in a_round.draft} <= {5 + 3 * k for k in range(10)}


def test_recurrent_targets_are_refused_before_a_token_is_generated():
    config = AutoConfig.for_model(
        "qwen3_next",
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        pad_token_id=2,
        eos_token_id=None,
        layer_types=["linear_attention", "full_attention"] * 2,
    )
    target = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=r"recurrent|stateful"):
        target.generate(prompt(5), assistant_model=tiny_drafter(target), max_new_tokens=4)
