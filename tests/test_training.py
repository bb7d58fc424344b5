"""The training objective computes what it says, trains what it should, and resumes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import prompt, tiny_drafter, tiny_target
from torch.nn import functional as F
from transformers import TrainerCallback, TrainingArguments

from hf_dspark import DSparkModel, acceptance_length, trace
from hf_dspark.backbone import qwen3
from hf_dspark.backbone.attention_mask import AttentionPattern, visible_rows
from hf_dspark.generation.draft_context import DraftContext
from hf_dspark.taps import TargetTaps, decoder_layers
from hf_dspark.training.initialisation import LOOK_BACK, feature_sizes, finish, initialise, prepare
from hf_dspark.training.objective import packed_positions, sample_anchors
from hf_dspark.training.recipe import coverage
from hf_dspark.training.trainer import DSparkTrainer, config_for, count_tokens, pad_sequences, prune_vocabulary

HEADS = ["vanilla", "gated", "rnn", None]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
OTHERS = [
    {**SLIDING, "causal_in_block": [True, False]},
    {**SLIDING, "sliding_window_from": "anchor"},
    {"causal_in_block": True, "attention_sink_bias": True, "final_logit_softcapping": 0.5, "output_multiplier": 2.0},
    {"copy_ngram_size": 3},
]


def head_fields(head):
    return {"markov_head_type": head} if head else {"markov_rank": 0, "confidence_head_with_markov": False}


def rows(lengths, seed=0):
    return [{"input_ids": prompt(length, seed=seed + length)[0].tolist()} for length in lengths]


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def trainer_for(drafter, target, tmp_path, data, **arguments):
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        **{
            "per_device_train_batch_size": 4,
            "max_steps": 4,
            "save_strategy": "no",
            "learning_rate": 3e-3,
            **arguments,
        },
    )
    return DSparkTrainer(drafter, target, arguments, data, data[:4], num_anchors=6)


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize(("head", "fields"), [(head, {}) for head in HEADS] + [("vanilla", f) for f in OTHERS])
def test_a_packed_block_is_the_block_of_generation(target, head, fields, from_anchor, tmp_path):
    """Every packed block sees what it will see when drafting, and its terms are those of the definition."""
    drafter = tiny_drafter(target, sample_from_anchor=from_anchor, **head_fields(head), **fields)
    trainer = trainer_for(drafter, target, tmp_path, rows([14, 9]))
    inputs = pad_sequences(rows([14, 9]))
    theirs = trainer.target_inputs(inputs)
    anchors = torch.tensor([[1, 5, 8], [3, 2, 7]])  # the last block of each row runs over its end
    objective = trainer.model
    with torch.no_grad():
        result = objective(**inputs, **theirs, anchors=anchors)

        cross, variation, confidence = 0.0, 0.0, 0.0
        gamma, slot0 = drafter.config.num_draft_tokens, drafter.config.block_size - drafter.config.num_draft_tokens
        for row, length in enumerate((14, 9)):
            ids = inputs["input_ids"][row : row + 1, :length]
            with TargetTaps(target, drafter.config.target_layer_ids) as taps:
                p = target(ids).logits[0].softmax(-1)
                features = taps.take(drafter.device, drafter.dtype)
            for anchor in anchors[row].tolist():
                context = DraftContext(drafter)
                context.extend(features[:, :anchor])
                hidden = context.block_hidden(ids[:, anchor : anchor + 1])[0]
                state = None if head is None else drafter.markov_head.initial_state(hidden[0])
                if slot0 and head:
                    _, state = drafter.markov_head.step(
                        drafter.markov_head.markov_w1(ids[0, anchor]), hidden[0], state
                    )
                for k in range(gamma):
                    place = anchor + k
                    if place + 1 >= length:
                        break
                    h, embedding = hidden[k + slot0], None
                    logits = drafter.base_logits(h)
                    if head is not None:
                        embedding = drafter.markov_head.markov_w1(ids[0, place])
                        feature, state = drafter.markov_head.step(embedding, h, state)
                        logits = logits + drafter.markov_head.markov_w2(feature)
                    certainty = 0.0
                    if (copy_head := drafter.copy_head) is not None:
                        token, repeated = copy_head.find(ids[:, : place + 1])
                        logits = copy_head.logits(logits[None], drafter.draft_ids_of(token), repeated)[0]
                        certainty = copy_head.confidence(repeated)[0]
                    q = logits.softmax(-1)
                    weight = math.exp(-k / objective.position_decay)
                    tv = 0.5 * (q - p[place]).abs().sum()
                    cross -= weight * (p[place] * q.log()).sum()
                    variation += weight * tv
                    c = drafter.confidence_head(h, embedding) + certainty
                    confidence += weight * F.binary_cross_entropy_with_logits(c, 1 - tv)
    total = anchors.numel() * sum(
        math.exp(-k / objective.position_decay) for k in range(drafter.config.num_draft_tokens)
    )
    torch.testing.assert_close(result.cross_entropy, cross / total, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(result.total_variation, variation / total, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(result.confidence, confidence / total, atol=1e-4, rtol=1e-4)
    expected = 0.1 * result.cross_entropy + 0.9 * result.total_variation + result.confidence
    torch.testing.assert_close(result.loss, expected)


def objective_and_batch(drafter, target, tmp_path):
    """A drafter's objective, and one batch with anchors for it."""
    trainer = trainer_for(drafter, target, tmp_path, rows([20, 15]))
    inputs = pad_sequences(rows([20, 15]))
    theirs = trainer.target_inputs(inputs)
    anchors = sample_anchors(inputs["attention_mask"].sum(-1), inputs["prompt_lengths"], 6)
    return trainer.model, {**inputs, **theirs, "anchors": anchors}


def test_chunks_do_not_change_loss_or_gradients(target, tmp_path):
    drafter = tiny_drafter(target)
    objective, batch = objective_and_batch(drafter, target, tmp_path)
    results = []
    for chunk_size in (1000, 7):
        objective.chunk_size = chunk_size
        drafter.zero_grad()
        loss = objective(**batch).loss
        loss.backward()
        results.append((loss.detach(), [p.grad.clone() for p in drafter.parameters()]))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-4)


def test_the_confidence_head_does_not_pull_at_the_backbone(target, tmp_path):
    drafter = tiny_drafter(target)
    objective, batch = objective_and_batch(drafter, target, tmp_path)
    gradients = []
    for scale in (1.0, 100.0):
        with torch.no_grad():
            drafter.confidence_head.proj.weight.mul_(scale)
        drafter.zero_grad()
        objective(**batch).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in drafter.named_parameters() if "confidence" not in n})
    torch.testing.assert_close(gradients[0], gradients[1])
    assert drafter.confidence_head.proj.weight.grad.abs().sum() > 0


def test_pruned_vocabulary_counts_what_it_cannot_propose_as_lost(target, tmp_path):
    drafter = tiny_drafter(target, draft_vocab_size=12)
    data = rows([20, 15])
    counts = count_tokens(drafter.config.vocab_size, [row["input_ids"] for row in data])
    prune_vocabulary(drafter, counts)
    tokens = [token for row in data for token in row["input_ids"]]
    ids = drafter.draft_token_ids.tolist()
    assert ids == sorted(set(ids)) and len(ids) == 12
    assert coverage(drafter, counts) == pytest.approx(sum(token in ids for token in tokens) / len(tokens), abs=1e-4)
    trainer = trainer_for(drafter, target, tmp_path, data)
    inputs = pad_sequences(data)
    theirs = trainer.target_inputs(inputs)
    p = theirs["target_log_probs"].exp().sum(-1)
    assert (p < 1).any(), "p is normalised over the whole vocabulary"
    with torch.no_grad():
        result = trainer.model(**inputs, **theirs)
    assert (result.acceptance < p.max()).all()


@pytest.mark.parametrize("head", HEADS)
def test_training_raises_acceptance(target, head, tmp_path):
    """A drafter that learns one short text comes to draft it, in training's own estimate and in generate()."""
    torch.manual_seed(0)
    text = target.generate(prompt(4), max_new_tokens=24, do_sample=False)
    fields = {"num_hidden_layers": 1, "block_size": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    drafter = DSparkModel(config_for(target, 3, **fields, **{"markov_rank": 8, **head_fields(head)}))
    data = [{"input_ids": text[0].tolist()}] * 8
    trainer = trainer_for(drafter, target, tmp_path, data, max_steps=120, learning_rate=1e-2)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_greedy_acceptance_length"] > before["eval_greedy_acceptance_length"] + 1
    with trace(drafter.eval()) as rounds:
        out = target.generate(prompt(4), assistant_model=drafter, max_new_tokens=24, do_sample=False)
    assert out.tolist() == text.tolist()
    assert acceptance_length(rounds) > 2


def test_a_new_drafter_looks_back_and_learns_in_units_of_the_features(target, monkeypatch):
    """Each head finds the position at its own distance; the plain weights at the end are those that were trained."""
    fields = {"num_hidden_layers": 2, "block_size": 4, "num_key_value_heads": 4, "head_dim": 32}
    drafter = DSparkModel(config_for(target, 3, **fields)).eval()
    drafter.bind(target)
    text = prompt(60)
    sizes = feature_sizes(drafter, target, text.tolist())
    initialise(drafter, target, sizes)
    prepare(drafter, sizes)
    weights: list[torch.Tensor] = []
    eager = qwen3.eager_attention_forward

    def spy(*arguments, **keywords):
        output, probabilities = eager(*arguments, **keywords)
        weights.append(probabilities[0])
        return output, probabilities

    monkeypatch.setattr(qwen3, "eager_attention_forward", spy)
    drafter.set_attn_implementation("eager")
    anchor = 40
    with torch.no_grad(), TargetTaps(target, drafter.config.target_layer_ids) as taps:
        target(text)
        features = taps.take(drafter.device, drafter.dtype)
        block = drafter.block_ids(text[:, anchor : anchor + 1])
        before = drafter(block, features[:, :anchor]).last_hidden_state
    found = [
        layer[head, slot].argmax().item() == anchor + slot - LOOK_BACK[head]
        for layer in weights
        for head in range(4)
        for slot in range(4)
    ]
    assert len(found) == 32 and sum(found) > 24

    scaled = features.square().mean((0, 1)).sqrt() * drafter.fc.weight
    assert (scaled.std(0).max() / scaled.std(0).min()) < 4, "all features weigh about the same at first"
    finish(drafter)
    assert set(drafter.state_dict()) == set(DSparkModel(drafter.config).state_dict())
    with torch.no_grad():
        torch.testing.assert_close(drafter(block, features[:, :anchor]).last_hidden_state, before)


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def test_a_stopped_training_goes_on_as_if_it_had_not(target, tmp_path):
    data = rows(range(10, 26))
    losses = {}
    for name, stops in (("whole", [8]), ("halved", [4, 8])):
        for stop in stops:
            drafter = tiny_drafter(target)
            trainer = trainer_for(
                drafter,
                target,
                tmp_path / name,
                data,
                max_steps=8,
                save_strategy="steps",
                save_steps=4,
                logging_steps=1,
            )
            if stop < 8:
                trainer.add_callback(StopAt(stop))
            trainer.train(resume_from_checkpoint=stop != stops[0])
        losses[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-4:]
    assert losses["whole"] == pytest.approx(losses["halved"], rel=1e-5)


def test_a_cached_target_says_the_same_and_runs_once(target, tmp_path, monkeypatch):
    data, asked, losses = rows(range(10, 18)), [], {}
    forward = type(target).forward

    def counted(self, ids, **arguments):
        asked.append(ids)
        return forward(self, ids, **arguments)

    monkeypatch.setattr(type(target), "forward", counted)
    for name, cache in (("asked", None), ("cached", tmp_path / "cache"), ("again", tmp_path / "cache")):
        asked.clear()
        drafter = tiny_drafter(target, draft_vocab_size=30)
        prune_vocabulary(drafter, count_tokens(drafter.config.vocab_size, [row["input_ids"] for row in data]))
        trainer = trainer_for(drafter, target, tmp_path, data, max_steps=6, logging_steps=1)
        trainer.cache_folder = cache
        trainer.train()
        losses[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert sum(map(len, asked)) == {"asked": 24, "cached": 8, "again": 0}[name], "three epochs of eight texts"
    assert losses["cached"] == pytest.approx(losses["asked"], rel=2e-2)
    assert losses["again"] == pytest.approx(losses["asked"], rel=2e-2)

    asked.clear()
    drafter.d2t.fill_(5)  # another draft vocabulary has other log-probabilities
    other = trainer_for(drafter, target, tmp_path, data)
    other.cache_folder = tmp_path / "cache"
    inputs = pad_sequences(data[:2])
    text = inputs["attention_mask"].bool()
    kept, said = (ask(inputs)["target_log_probs"][text] for ask in (other.target_inputs, other._ask_target))
    torch.testing.assert_close(kept, said.to(kept.dtype))
    assert asked


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_mixed_precision_trains_as_float32_does(head, tmp_path):
    """A bfloat16 target and autocast, as on accelerators, against float32."""
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        target, drafted = tiny_target("llama").to(dtype), rows(range(9, 25))
        torch.manual_seed(0)
        drafter = DSparkModel(config_for(target, 3, num_hidden_layers=1, block_size=4, **head_fields(head)))
        sizes = feature_sizes(drafter, target, [row["input_ids"] for row in drafted])
        initialise(drafter, target, sizes)
        prepare(drafter, sizes)
        mixed = dtype is torch.bfloat16
        trainer = trainer_for(drafter, target, tmp_path, drafted, bf16=mixed, gradient_accumulation_steps=2)
        trainer.train()
        assert drafter.dtype == torch.float32, "the weights that the optimizer sees keep their precision"
        losses[dtype] = trainer.evaluate()["eval_loss"]
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.05)


def test_two_processes_train_as_one_does(tmp_path):
    """Data-parallel training on two processes (gloo) has the losses and weights of one with as large a batch."""
    script = Path(__file__).with_name("distributed_training.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, command in (("two", launch), ("one", [])):
        command = [sys.executable, *command, str(script), str(tmp_path / name)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
    one, two = (torch.load(tmp_path / name / "result.pt") for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2)
    assert len(one["losses"]) == 4 and one["losses"] == pytest.approx(two["losses"], rel=1e-4)
    torch.testing.assert_close(one["weights"], two["weights"], atol=1e-5, rtol=1e-4)


def test_packed_positions_and_mask():
    anchors = torch.tensor([[2, 1]])
    assert packed_positions(anchors, 3, 4).tolist() == [[0, 1, 2, 3, 2, 3, 4, 1, 2, 3]]
    context, blocks = packed_positions(anchors, 3, 4).split([4, 6], dim=1)
    visible = visible_rows(AttentionPattern(None, False, causal=False), blocks, context, 3)[0]
    assert visible[0].tolist() == [True, True, False, False, True, True, True, False, False, False]
    assert visible[3].tolist() == [True, False, False, False, False, False, False, True, True, True]


def test_anchors_have_a_context_and_a_next_token():
    anchors = sample_anchors(torch.tensor([3, 50, 50, 50]), torch.tensor([0, 0, 40, 60]), 400)
    assert anchors[0].unique().tolist() == [1]
    assert anchors[1].unique().tolist() == list(range(1, 49))
    assert anchors[2].unique().tolist() == list(range(40, 49)), "in the answer alone"
    assert anchors[3].unique().tolist() == [48], "an answer that was cut off"


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3_text"])
def test_taps_are_the_layers_hidden_states(family):
    target = tiny_target(family)
    with torch.no_grad(), TargetTaps(target, [-1, 0, 2]) as taps:
        states = target(prompt(6), output_hidden_states=True).hidden_states
        features = taps.take(target.device, target.dtype)
    torch.testing.assert_close(features, torch.cat([states[0], states[1], states[3]], dim=-1))
    assert len(decoder_layers(target)) == 4


def test_taps_of_several_passes_are_joined_and_silence_is_an_error(target):
    with torch.no_grad(), TargetTaps(target, [1]) as taps:
        whole = target(prompt(6)) and taps.take(target.device, target.dtype)
        target(prompt(6)[:, :4])
        target(prompt(6)[:, :2])
        assert taps.take(target.device, target.dtype).shape == (1, 6, 32)
        with pytest.raises(RuntimeError, match="did not report"):
            taps.take(target.device, target.dtype)
    assert whole.shape == (1, 6, 32)
