"""Tiny models made on the spot, and drafters whose drafts are right just often enough to exercise every path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_dspark import DSparkConfig, DSparkModel
from hf_dspark.generation import decoding

GOLDEN = Path(__file__).parent / "golden"
VOCABULARY = 40
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**_MOE, "decoder_sparse_step": 1},
    "mistral": {"sliding_window": 12},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gemma2": {"sliding_window": 12, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 12, "query_pre_attn_scalar": 8},
    "gemma4_text": {
        "sliding_window": 12,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi3": {"sliding_window": None},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "olmo2": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}
SLIDING = [name for name, fields in FAMILIES.items() if fields.get("sliding_window")]


def tiny_target(family: str, seed: int = 0, **fields) -> PreTrainedModel:
    """A random model of a family, in float32. Weights are large enough for its output to be no constant."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES.get(family, {}), **fields})
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.normal_(std=0.3)
    # Random models would end at once, and generate() takes pad tokens inside a text for padding; tests set their own.
    target.generation_config.eos_token_id = target.generation_config.pad_token_id = None
    return target


def drafter_config(target: PreTrainedModel, **fields) -> DSparkConfig:
    theirs = target.config.get_text_config()
    return DSparkConfig(
        **{
            "vocab_size": theirs.vocab_size,
            "hidden_size": theirs.hidden_size,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "num_target_layers": theirs.num_hidden_layers,
            "target_layer_ids": [-1, 1, 2],
            "block_size": 5,
            "mask_token_id": 3,
            "markov_rank": 8,
            **fields,
        }
    )


def tiny_drafter(target: PreTrainedModel, seed: int = 1, **fields) -> DSparkModel:
    """A random drafter for a target; a copy head that it has is a bold one."""
    torch.manual_seed(seed)
    drafter = DSparkModel(drafter_config(target, **fields)).eval()
    if drafter.copy_head is not None:
        longest = torch.arange(1.0, drafter.config.copy_ngram_size + 1)
        drafter.copy_head.strength.data.copy_(2 * longest)
        drafter.copy_head.certainty.data.copy_(0.4 * longest)
    return drafter


class ScriptedDrafter(DSparkModel):
    """
    A drafter that knows how the text goes on, and errs now and then.

    It runs its backbone as any drafter does and checks on the way that the context it was given ends where the anchor
    stands; only the logits are replaced, by the script's.

    Args:
        script: all token ids of the text, prompt included.
        accuracy: share of slots in which the scripted token is the most likely one.
    """

    def __init__(self, config: DSparkConfig, script: torch.Tensor, accuracy: float = 0.8):
        super().__init__(config)
        self.script = script
        self.accuracy = accuracy
        self.anchors: list[int] = []
        self._generator = torch.Generator().manual_seed(0)

    def forward(self, input_ids, context_hidden_states, cache=None, **kwargs):
        anchor = cache.end + context_hidden_states.shape[1]
        if anchor < len(self.script):
            assert input_ids[0, 0] == self.script[anchor], f"the context ends at {anchor}, the anchor is elsewhere"
        assert torch.isfinite(context_hidden_states).all()
        self.anchors.append(anchor)
        return super().forward(input_ids, context_hidden_states, cache=cache, **kwargs)

    def base_logits(self, hidden):
        logits = torch.randn(*hidden.shape[:-1], self.config.vocab_size, generator=self._generator)
        for k in range(hidden.shape[1]):
            place = self.anchors[-1] + 1 + k
            if place < len(self.script) and torch.rand((), generator=self._generator) < self.accuracy:
                logits[:, k, self.script[place]] += 20
        return logits


def scripted_drafter(
    target: PreTrainedModel, script: torch.Tensor, accuracy: float = 0.8, **fields
) -> ScriptedDrafter:
    """A scripted drafter without heads of its own."""
    torch.manual_seed(1)
    fields = {"markov_rank": 0, "enable_confidence_head": False, **fields}
    return ScriptedDrafter(drafter_config(target, **fields), script.cpu(), accuracy).eval()


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids (1, length) without special ones."""
    return torch.randint(4, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    """No threads, the same random numbers, and whole blocks unless a test says what rounds cost: nothing is timed."""
    monkeypatch.setattr(decoding, "ensure_costs", lambda *arguments, **keywords: None)
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden_target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(GOLDEN / "qwen3_target", dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def golden_gemma4_target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(GOLDEN / "gemma4_target", dtype=torch.float32).eval()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    characters = ["[UNK]", "<eos>", "<pad>", *map(chr, range(ord("a"), ord("a") + 26)), *"0123456789A"]
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, merges=[], unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", eos_token="<eos>", pad_token="<pad>", bos_token="[UNK]"
    )
