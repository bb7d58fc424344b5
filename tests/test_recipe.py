"""One call makes a drafter, from nothing but a target; a second call goes on where the first one stopped."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import tiny_target
from test_data import TEMPLATE
from transformers import AutoModelForCausalLM

from hf_dspark import DSparkModel
from hf_dspark.training.recipe import train_drafter, unused_token

SMALL = {"batch_size": 4, "anchors": 4, "num_hidden_layers": 1, "block_size": 3, "markov_rank": 4}


@pytest.fixture
def target_folder(tokenizer, tmp_path):
    target = tiny_target("llama")
    with torch.no_grad():
        target.lm_head.weight[tokenizer.eos_token_id] *= 3
    target.save_pretrained(tmp_path / "target")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_from_a_target_to_a_drafter(target_folder, tmp_path):
    output = tmp_path / "drafter"
    train_drafter(target_folder, output, tokens=3000, steps=4, mask_token_id=2, draft_vocab_size=20, **SMALL)
    drafter = DSparkModel.from_pretrained(output)
    assert drafter.dtype == torch.bfloat16 and len(drafter.draft_token_ids) == 20
    assert set(drafter.state_dict()) & {"embed_tokens.weight", "lm_head.weight"} == set()
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    ids = torch.tensor([[5, 6, 7]])
    out = target.generate(ids, assistant_model=drafter, max_new_tokens=10, do_sample=False)
    assert out.tolist() == target.generate(ids, max_new_tokens=10, do_sample=False).tolist()

    (shard,) = output.glob("data/shard-*.jsonl")
    data = shard.read_bytes()
    record = json.loads((output / "training.json").read_text())
    assert record["steps"] == 4 and record["curve"][-1]["step"] == 4 and record["curve"][-1]["tokens"] > 0
    card = (output / "README.md").read_text()
    assert f"{record['curve'][-1]['greedy_acceptance_length']:.2f}" in card
    train_drafter(target_folder, output, tokens=3000, steps=6, mask_token_id=2, draft_vocab_size=20, **SMALL)
    assert shard.read_bytes() == data, "the text is not written again"
    (state,) = output.glob("checkpoints/checkpoint-*/trainer_state.json")
    history = json.loads(state.read_text())
    assert history["global_step"] == 6
    assert next(entry["step"] for entry in history["log_history"] if "eval_acceptance_length" in entry) < 4
    assert not torch.equal(DSparkModel.from_pretrained(output).fc.weight, drafter.fc.weight)


def test_own_rows_instead(target_folder, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"input_ids": list(range(3 + k % 5, 20))}) for k in range(30)))
    drafter = train_drafter(target_folder, tmp_path / "drafter", data=rows, steps=2, mask_token_id=2, **SMALL)
    assert drafter.d2t is None
    rows.write_text("\n".join(rows.read_text().splitlines()[:24]))
    with pytest.raises(ValueError, match="24 rows"):
        train_drafter(target_folder, tmp_path / "other", data=rows, steps=2, mask_token_id=2, **SMALL)


def test_a_mask_token_has_to_be_free(tokenizer):
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(ValueError, match="mask_token_id"):
        unused_token(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mask>", "<other>"]})
    assert tokenizer.convert_ids_to_tokens(unused_token(tokenizer)) == "<other>"
