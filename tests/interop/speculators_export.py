"""
The speculators library on what this package writes for it: hidden states, logits with the sequential head's part, and
confidences of a block, behind short and long contexts. Not part of the tests; in an environment of its own:

    pip install speculators==0.9.0 accelerate pytest hypothesis jinja2
    PYTHONPATH=.:tests python tests/interop/speculators_export.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from conftest import tiny_drafter, tiny_target
from speculators import SpeculatorModel, SpeculatorModelConfig
from test_convert import EXPORTED
from test_formats import lively
from transformers import PreTrainedModel

from hf_dspark import DSparkModel
from hf_dspark.taps import TargetTaps

close = {"atol": 1e-4, "rtol": 0}


def theirs(folder: Path, target: Path) -> SpeculatorModel:
    """The drafter as speculators loads it, with what it takes from its verifier."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.speculators_config.verifier.name_or_path = str(target)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def their_logits(model: SpeculatorModel, features: torch.Tensor, ids: torch.Tensor, anchor: int) -> list[torch.Tensor]:
    """Hidden states, logits and confidence logits of the block at `anchor`, given all tokens."""
    mask = torch.zeros(ids.shape)
    mask[:, anchor] = 1  # the only place for an anchor
    hidden, logits, *_ = model._backbone_forward(
        features, ids, mask, torch.randn(*ids.shape, 32), torch.zeros_like(ids), max_anchors=1
    )
    if not hasattr(model, "markov_head"):
        return [hidden, logits]
    block = ids[:, anchor : anchor + model.block_size]
    previous = block if model.config.sample_from_anchor else torch.cat([block[:, :1], block[:, :-1]], dim=1)
    found, embeddings = [hidden], None
    if model.markov_head is not None:
        embeddings = model.markov_head.prev_embeddings(previous)
        logits = logits + model.markov_head.block_bias(
            prev_token_ids=previous, hidden_states=hidden, prev_emb=embeddings
        )
    found.append(logits)
    if model.confidence_head is not None:
        with_markov = model.config.confidence_head_with_markov
        found.append(model.confidence_head(torch.cat([hidden, embeddings], dim=-1) if with_markov else hidden))
    return found


def our_logits(drafter: DSparkModel, features: torch.Tensor, ids: torch.Tensor, anchor: int) -> list[torch.Tensor]:
    """The same of ours."""
    block = ids[:, anchor : anchor + drafter.config.block_size]
    hidden = drafter(drafter.block_ids(block[:, :1]), features[:, :anchor]).last_hidden_state
    previous = block if drafter.config.sample_from_anchor else torch.cat([block[:, :1], block[:, :-1]], dim=1)
    logits, embeddings = drafter.base_logits(hidden), None
    if drafter.markov_head is not None:
        embeddings = drafter.markov_head.embed(previous)
        logits = drafter.markov_head.logits(logits, drafter.markov_head.unroll(embeddings, hidden))
    found = [hidden, logits]
    if drafter.confidence_head is not None:
        found.append(drafter.confidence_head(hidden, embeddings))
    return found


def compare(target: PreTrainedModel, target_folder: Path, fields: dict) -> None:
    native = lively(tiny_drafter(target, **fields))
    if native.d2t is not None:
        native.d2t.copy_(torch.arange(len(native.d2t)) // 2)
    if native.config.has_embed_tokens:  # speculators puts the verifier's in their place
        native.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    if native.config.has_lm_head and native.d2t is None:
        native.lm_head.weight.data.copy_(target.get_output_embeddings().weight)
    native.bind(target)
    with tempfile.TemporaryDirectory() as folder:
        native.save_pretrained(folder, format="speculators")
        model = theirs(Path(folder), target_folder)
    assert [i - 1 for i in model.target_layer_ids] == native.config.target_layer_ids
    block_size = native.config.block_size
    for anchor in (1, 5, 7, 30):
        ids = torch.randint(4, native.config.vocab_size, (1, anchor + block_size + 1))
        with torch.no_grad():
            with TargetTaps(target, native.config.target_layer_ids) as taps:
                target(ids)
                features = taps.take(native.device, native.dtype)
            ours, expected = our_logits(native, features, ids, anchor), their_logits(model, features, ids, anchor)
        assert len(ours) == len(expected)
        for mine, other in zip(ours, expected):
            torch.testing.assert_close(mine.flatten(), other.flatten(), **close)
    print("equal:", fields)


def main() -> None:
    torch.manual_seed(0)
    target = tiny_target("qwen3", seed=3)
    with tempfile.TemporaryDirectory() as folder:
        target.save_pretrained(folder)
        for form, fields in EXPORTED:
            if form == "speculators":
                compare(target, Path(folder), fields)


if __name__ == "__main__":
    main()
