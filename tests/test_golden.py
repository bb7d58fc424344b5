"""Agreement with values that the reference implementation computed (tests/golden/README.md)."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file

from hf_dspark import DSparkModel, trace
from hf_dspark.generation.draft_context import DraftContext

DRAFTERS = ["qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "qwen3_dflash", "gemma4_vanilla"]
close = {"atol": 1e-4, "rtol": 0}


def load(name: str, attention: str = "sdpa") -> DSparkModel:
    return DSparkModel.from_pretrained(GOLDEN / f"deepspec_{name}", attn_implementation=attention).eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_single_block(name, attention):
    drafter = load(name, attention)
    block = load_file(GOLDEN / f"deepspec_{name}" / "block.safetensors")
    tokens = block["draft_input_ids"]
    assert torch.equal(drafter.block_ids(block["input_ids"][:, -1:]), tokens)
    with torch.no_grad():
        hidden = drafter(tokens, block["context_hidden_states"]).last_hidden_state
        logits = drafter.base_logits(hidden)
        torch.testing.assert_close(hidden, block["block_hidden_states"], **close)
        torch.testing.assert_close(logits, block["base_logits"], **close)
        if drafter.markov_head is not None:
            previous = torch.cat([tokens[:, :1], block["draft_token_ids"][:, :-1]], dim=1)
            embeddings = drafter.markov_head.markov_w1(previous)
            logits = logits + drafter.markov_head.markov_w2(drafter.markov_head.unroll(embeddings, hidden))
            confidence = drafter.confidence_head(hidden, embeddings)
            torch.testing.assert_close(confidence, block["confidence_logits"], **close)
    torch.testing.assert_close(logits, block["draft_logits"], **close)
    assert torch.equal(logits.argmax(-1), block["draft_token_ids"])


@pytest.mark.parametrize("name", DRAFTERS)
def test_context_in_pieces(name):
    """A context that arrives over several rounds gives the block of one that comes at once."""
    drafter = load(name)
    block = load_file(GOLDEN / f"deepspec_{name}" / "block.safetensors")
    context = DraftContext(drafter)
    with torch.no_grad():
        for rows in block["context_hidden_states"].split([2, 1, 2], dim=1):
            context.extend(rows)
            hidden = context.block_hidden(block["input_ids"][:, -1:])
    torch.testing.assert_close(hidden, block["block_hidden_states"], **close)


@pytest.mark.parametrize("name", DRAFTERS)
def test_whole_greedy_decodings(name, golden_target, golden_gemma4_target):
    target = golden_gemma4_target if name.startswith("gemma4") else golden_target
    drafter = load(name)
    for golden in json.loads((GOLDEN / f"deepspec_{name}" / "traces.json").read_text()):
        drafter.generation_config.assistant_confidence_threshold = golden["confidence_threshold"] or None
        with trace(drafter) as rounds:
            output = target.generate(
                torch.tensor([golden["prompt"]]),
                assistant_model=drafter,
                max_length=len(golden["output"]) + 16,  # the reference drafts past the end
                do_sample=False,
            )
        assert output[0, : len(golden["output"])].tolist() == golden["output"]
        for ours, theirs in zip(rounds, golden["rounds"]):
            assert ours.draft == theirs["draft"]
            if theirs["confidence_logits"] is not None:
                expected = torch.tensor(theirs["confidence_logits"]).sigmoid()
                torch.testing.assert_close(torch.tensor(ours.confidence), expected, atol=1e-4, rtol=0)
        accepted = [a_round["accepted"] for a_round in golden["rounds"]][:-1]  # the last may be cut by the end
        assert [a_round.accepted for a_round in rounds][: len(accepted)] == accepted
