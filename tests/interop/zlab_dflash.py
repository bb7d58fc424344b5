"""
z-lab's own package and this one on the same tiny checkpoints: hidden states and logits of a block, behind short and
long contexts. Not part of the tests; in an environment of its own:

    pip install --no-deps dflash==0.1.0
    PYTHONPATH=.:tests python tests/interop/zlab_dflash.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from conftest import tiny_drafter, tiny_target
from dflash.model import DFlashDraftModel
from test_formats import PLAIN, SLIDING, lively, load, write, zlab
from torch.nn import functional as F

SCALES = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 2.0}
WINDOW = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}
CASES = [
    {},
    {**SLIDING, "causal_in_block": [True, False]},
    {**SLIDING, "causal_in_block": False},
    {**SLIDING, "causal_in_block": True},
    {**WINDOW, "causal_in_block": False},
    {**WINDOW, "causal_in_block": True},
    {"attention_bias": True, **SCALES},
]


def main() -> None:
    target = tiny_target("qwen3", seed=3)
    for case in CASES:
        native = lively(tiny_drafter(target, target_layer_ids=[0, 2], **PLAIN, **case))
        config = zlab(native.config) | {"attention_bias": native.config.attention_bias, "use_sliding_window": True}
        config["sliding_window"] = config["dflash_config"].pop("swa_window_size", None)
        config = {name: value for name, value in config.items() if value is not None}
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), config, native)
            ours, theirs = load(Path(folder)), DFlashDraftModel.from_pretrained(folder).eval()
        ours.bind(target)
        block = ours.block_ids(torch.tensor([[5]]))
        embedded = F.embedding(block, target.get_input_embeddings().weight) * (ours.config.input_embedding_scale or 1)
        for length in (1, 5, 6, 7, 30):
            features, positions = torch.randn(1, length, 64), torch.arange(length + 5)[None]
            with torch.no_grad():
                hidden = ours(block, features).last_hidden_state
                expected = theirs(position_ids=positions, noise_embedding=embedded, target_hidden=features)
                torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
                logits = theirs.compute_logits(expected, target.lm_head)
                torch.testing.assert_close(ours.base_logits(hidden), logits, atol=1e-5, rtol=1e-5)
        print("equal:", case)


if __name__ == "__main__":
    main()
