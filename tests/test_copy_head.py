"""The copy head: what it finds, that nothing but drafts depends on it, and that it comes and goes with its drafter."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from conftest import drafter_config, prompt, tiny_drafter, tiny_target
from hypothesis import given
from hypothesis import strategies as st
from test_batch import check_drafts
from test_recipe import SMALL, target_folder  # noqa: F401
from test_sampling import SIGNIFICANT, bold_drafter, memoryless_target, transition_pvalue

from hf_dspark import DSparkModel, trace
from hf_dspark.checkpoints import read_config
from hf_dspark.generation import decoding
from hf_dspark.generation.candidate_generator import DSparkCandidateGenerator
from hf_dspark.generation.choice import over_vocabulary
from hf_dspark.heads import CopyHead
from hf_dspark.scheduling.calibration import Calibration
from hf_dspark.scheduling.profile import HardwareProfile
from hf_dspark.training.recipe import train_drafter


def head_for(longest: int) -> CopyHead:
    return CopyHead(drafter_config(tiny_target("llama"), copy_ngram_size=longest))


def next_by_hand(text: list[int], longest: int) -> tuple[int | None, int]:
    for length in range(min(longest, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return text[end], length
    return None, 0


texts = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@given(texts, st.integers(1, 8))
def test_it_finds_the_latest_of_the_longest_repetitions(text, longest):
    token, length = head_for(longest).find(torch.tensor([text]))
    expected, repeated = next_by_hand(text, longest)
    assert length.item() == repeated
    if repeated:
        assert token.item() == expected


@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 8))
def test_texts_of_different_lengths_do_not_mind_each_other(rows, longest):
    head, width = head_for(longest), max(map(len, rows))
    tokens, lengths = head.find(torch.tensor([[-1] * (width - len(row)) + row for row in rows]))
    for row, token, length in zip(rows, tokens, lengths):
        alone = head.find(torch.tensor([row]))
        assert length == alone[1]
        assert not length or token == alone[0]


@given(texts, st.integers(1, 8))
def test_in_training_each_position_sees_what_stands_before_it(text, longest):
    head = head_for(longest)
    tokens, lengths = head.find_all(torch.tensor(text))
    for place in range(len(text)):
        token, length = head.find(torch.tensor([text[: place + 1]]))
        assert lengths[place] == length
        assert not length or tokens[place] == token


def test_the_bias_is_on_that_token_alone():
    head = head_for(3)
    head.strength.data.copy_(torch.tensor([1.0, 2.0, 4.0]))
    logits = head.logits(torch.zeros(4, 5), torch.tensor([2, 0, -1, 3]), torch.tensor([3, 1, 2, 0]))
    assert logits.tolist() == [[0, 0, 4, 0, 0], [1, 0, 0, 0, 0], [0] * 5, [0] * 5]


COPY = {"copy_ngram_size": 3}


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("fields", [{}, {"markov_head_type": "rnn"}, {"markov_rank": 0}], ids=str)
def test_greedy(fields, from_anchor):
    """Drafts and confidences of a batch are those of single rows; all the texts are the target's."""
    check_drafts(**COPY, **fields, sample_from_anchor=from_anchor)
    target = tiny_target("llama")
    drafter = tiny_drafter(target, **COPY, **fields, sample_from_anchor=from_anchor, draft_vocab_size=20)
    drafter.d2t.copy_(torch.arange(20) // 4)
    for length in (1, 9, 20):
        plain = target.generate(prompt(length), max_new_tokens=30, do_sample=False)
        out = target.generate(prompt(length), assistant_model=drafter, max_new_tokens=30, do_sample=False)
        assert out.tolist() == plain.tolist()


def test_a_text_that_repeats_itself_is_drafted_from_itself():
    """A target in a loop: without the head, a random drafter knows nothing of it."""
    target = tiny_target("gemma3_text")
    plain = target.generate(prompt(9), max_new_tokens=60, do_sample=False)
    rounds = {}
    for longest in (0, 4):
        drafter = tiny_drafter(target, copy_ngram_size=longest)
        if longest:
            drafter.copy_head.strength.data.fill_(100)
        with trace(drafter) as rounds[longest]:
            out = target.generate(prompt(9), assistant_model=drafter, max_new_tokens=60, do_sample=False)
        assert out.tolist() == plain.tolist()
    assert len(rounds[4]) < 0.5 * len(rounds[0])


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("arguments", [{}, {"temperature": 0.7, "top_k": 5}], ids=str)
def test_sampling(arguments, from_anchor):
    target = memoryless_target()
    drafter = bold_drafter(target, **COPY, sample_from_anchor=from_anchor)
    with trace(drafter) as rounds:
        assert transition_pvalue(target, drafter, tokens=1200, **arguments) > SIGNIFICANT
    assert {0, 1, 2} <= {a_round.accepted for a_round in rounds}, "too few kinds of rounds to tell anything"


def test_sampling_as_far_as_the_confidence_goes():
    target = memoryless_target()
    drafter = bold_drafter(target, **COPY)
    drafter.generation_config.assistant_confidence_threshold = 0.6
    with trace(drafter) as rounds:
        assert transition_pvalue(target, drafter, tokens=1200) > SIGNIFICANT
    assert len({len(a_round.draft) for a_round in rounds}) > 2, "the threshold decides nothing"


class CopiesInSecret(DSparkCandidateGenerator):
    """Wrong: draws with the copy head's bias and returns scores without it."""

    def _choose(self, input_ids, logits):
        token, _ = super()._choose(input_ids, logits)
        head = self.drafter.copy_head
        copied, repeated = head.find(input_ids)
        without = head.logits(logits, self.drafter.draft_ids_of(copied), repeated)
        return token, over_vocabulary(self.drafter, 2 * logits - without)


def test_a_bias_that_q_does_not_tell_of_is_caught(monkeypatch):
    target = memoryless_target()
    monkeypatch.setattr(decoding, "DSparkCandidateGenerator", CopiesInSecret)
    assert transition_pvalue(target, bold_drafter(target, **COPY)) < SIGNIFICANT**2


def test_it_is_saved_and_loaded_and_left_out_of_other_formats(tmp_path, caplog):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, **COPY)
    drafter.save_pretrained(tmp_path / "native")
    assert "copies" in (tmp_path / "native" / "README.md").read_text()
    loaded = DSparkModel.from_pretrained(tmp_path / "native")
    assert loaded.config.copy_ngram_size == 3
    assert loaded.copy_head.strength.tolist() == [2, 4, 6]
    drafter.bind(target)
    for name in ("deepspec", "speculators"):
        with caplog.at_level(logging.WARNING, "hf_dspark"):
            drafter.save_pretrained(tmp_path / name, format=name)
        assert "without its own" in caplog.text
        assert read_config(tmp_path / name).get("copy_ngram_size", 0) == 0
        assert DSparkModel.from_pretrained(tmp_path / name).copy_head is None
        caplog.clear()
    assert drafter.config.copy_ngram_size == 3, "the drafter itself keeps it"


def test_sizes_that_cannot_be():
    for size in (-1, 1000):
        with pytest.raises(ValueError, match="copy_ngram_size"):
            drafter_config(tiny_target("llama"), copy_ngram_size=size)


def test_a_drafter_that_was_trained_without_gets_one(target_folder, tmp_path):  # noqa: F811
    """Training goes on from a drafter, whose vocabulary and layers stay, and the new head learns as well."""
    arguments = {"tokens": 3000, "mask_token_id": 2, **SMALL}
    train_drafter(target_folder, tmp_path / "old", steps=2, draft_vocab_size=20, copy_ngram_size=0, **arguments)
    old = DSparkModel.from_pretrained(tmp_path / "old")
    assert old.copy_head is None
    nothing = Calibration.identity(old.config.num_draft_tokens)
    HardwareProfile(calibration={"greedy": nothing}).save(tmp_path / "old")
    data = tmp_path / "old" / "data"
    arguments |= {"drafter_path": tmp_path / "old", "copy_ngram_size": 4, "block_size": 5, "learning_rate": 1e-2}
    train_drafter(target_folder, tmp_path / "new", data, steps=3, **arguments)
    new = DSparkModel.from_pretrained(tmp_path / "new")
    assert (old.config.block_size, new.config.block_size, new.config.num_hidden_layers) == (3, 5, 1)
    assert new.hardware_profile is None, "what was measured of the old one says nothing of this one"
    assert new.draft_token_ids.tolist() == old.draft_token_ids.tolist()
    strength = new.copy_head.strength.float()
    assert (strength.diff() > 0).all() and not torch.equal(strength, strength.round(decimals=1))
    assert new.copy_head.certainty.abs().sum() > 0
    assert not torch.equal(new.fc.weight, old.fc.weight)
    weights = (drafter.fc.weight.float().flatten() for drafter in (new, old))
    assert torch.cosine_similarity(*weights, dim=0) > 0.8, "it went on, not anew"
    assert json.loads((tmp_path / "new" / "training.json").read_text())["draft_vocabulary_coverage"] > 0
