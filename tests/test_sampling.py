"""Sampled output has the target's own distribution; wrong ways to sample, kept here, are caught by the same tests."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from conftest import tiny_drafter, tiny_target
from scipy.stats import chisquare

from hf_dspark import HardwareProfile, trace
from hf_dspark.generation import decoding
from hf_dspark.generation.candidate_generator import DSparkCandidateGenerator
from hf_dspark.generation.trace import Clock
from hf_dspark.scheduling.calibration import Calibration
from hf_dspark.scheduling.costs import RoundCosts

SIGNIFICANT = 1e-4  # seeds are fixed: a test passes or fails, it does not flicker


def memoryless_target(vocabulary: int = 8):
    """A target whose next token depends on the last one alone, so that one long text holds many equal experiments."""
    target = tiny_target("llama", seed=3, vocab_size=vocabulary, max_position_embeddings=4096, num_hidden_layers=1)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        target.lm_head.weight.mul_(0.35)
    return target


def bold_drafter(target, **fields):
    """A random drafter whose q is far from p and depends much on the token before."""
    drafter = tiny_drafter(target, **{"num_hidden_layers": 1, "target_layer_ids": [-1, 0], **fields})
    with torch.no_grad():
        drafter.norm.weight.mul_(0.6)
        if drafter.markov_head is not None:
            drafter.markov_head.markov_w1.weight.normal_(std=1.0)
            drafter.markov_head.markov_w2.weight.normal_(std=0.7)
        if drafter.candidate_selector is not None:
            drafter.candidate_selector.predecessor_codebook.normal_(std=1.0)
            drafter.candidate_selector.successor_codebook.normal_(std=0.7)
            drafter.candidate_selector.hidden_projection.weight.normal_(std=0.3)
        if drafter.confidence_head is not None:
            drafter.confidence_head.proj.weight.normal_(std=0.5)
    return drafter


def transition_pvalue(target, drafter, tokens: int = 2000, temperature: float = 1.0, **arguments) -> float:
    """Chi-square of the transitions in a long sampled text against the target's exact conditional distributions."""
    vocabulary = target.config.vocab_size
    with torch.no_grad():
        logits = target(torch.arange(vocabulary)[:, None]).logits[:, -1] / temperature
    if (top_k := arguments.get("top_k", 0)) > 0:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    exact = logits.double().softmax(-1)
    torch.manual_seed(11)
    text = target.generate(
        torch.tensor([[4]]),
        assistant_model=drafter,
        do_sample=True,
        temperature=temperature,
        max_new_tokens=tokens,
        **{"top_k": 0, **arguments},
    )[0]
    counts = torch.zeros(vocabulary, vocabulary).double()
    counts.index_put_((text[:-1], text[1:]), torch.ones(tokens).double(), accumulate=True)
    assert counts[exact == 0].sum() == 0, "a token outside the target's support"
    expected = counts.sum(-1, keepdim=True) * exact
    observed, expected = counts.flatten(), expected.flatten()
    rare = expected < 5
    if rare.any():
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = expected > 0
    freedom_lost = int((counts.sum(-1) > 0).sum()) - 1  # every row's total is given
    return chisquare(observed[keep], expected[keep], ddof=freedom_lost).pvalue


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
def test_every_head(head, from_anchor):
    target = memoryless_target()
    fields = {"markov_head_type": head} if head else {"markov_rank": 0}
    drafter = bold_drafter(target, sample_from_anchor=from_anchor, **fields)
    with trace(drafter) as rounds:
        assert transition_pvalue(target, drafter) > SIGNIFICANT
    accepted = [a_round.accepted for a_round in rounds]
    assert {0, 1, 2} <= set(accepted), "too few kinds of rounds to tell anything"


SELECTOR = {"markov_rank": 0, "enable_confidence_head": False, "selector_rank": 8, "selector_top_k": 4}


@pytest.mark.parametrize(
    ("from_anchor", "arguments"), [(True, {}), (False, {}), (False, {"temperature": 0.7, "top_k": 5})], ids=str
)
def test_candidate_selector(from_anchor, arguments):
    target = memoryless_target()
    drafter = bold_drafter(target, sample_from_anchor=from_anchor, **SELECTOR)
    with trace(drafter) as rounds:
        assert transition_pvalue(target, drafter, tokens=1000, **arguments) > SIGNIFICANT
    assert {0, 1, 2} <= {a_round.accepted for a_round in rounds}, "too few kinds of rounds to tell anything"


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7])
def test_confidence_threshold(threshold):
    target = memoryless_target()
    drafter = bold_drafter(target)
    drafter.generation_config.assistant_confidence_threshold = threshold
    with trace(drafter) as rounds:
        assert transition_pvalue(target, drafter) > SIGNIFICANT
    assert len({len(a_round.draft) for a_round in rounds}) > 2, "the threshold decides nothing"


CURVES = {
    "smooth": RoundCosts(draft=0.05, verify=(1.0, 1.08, 1.16, 1.24, 1.32, 1.4)),
    "cliff": RoundCosts(draft=0.02, verify=(1.0, 1.0, 1.25, 1.27, 1.29, 1.31), error=0.05),
    "dear heads": RoundCosts(draft=1.1, verify=(1.0, 1.02, 1.04, 1.06, 1.08, 1.1), head=0.05),
}


@pytest.fixture
def erratic_clock(monkeypatch):
    """Round times that jump about, the same in every run."""
    times = random.Random(0)
    monkeypatch.setattr(Clock, "elapsed", lambda clock: 10 ** times.uniform(-0.5, 0.5))


@pytest.mark.parametrize(
    ("head", "curve", "bias"),
    [
        ("vanilla", "smooth", -1.5),
        ("vanilla", "cliff", -1.5),
        ("gated", "cliff", -1.5),
        ("rnn", "cliff", 1.5),
        ("rnn", "dear heads", 1.5),
    ],
)
def test_hardware_aware(head, curve, bias, erratic_clock):
    target = memoryless_target()
    drafter = bold_drafter(target, markov_head_type=head)
    with torch.no_grad():
        drafter.confidence_head.proj.bias.add_(bias)  # about right: drafting pays, and confidence decides how much
    drafter.round_costs = CURVES[curve]
    with trace(drafter) as rounds:
        assert transition_pvalue(target, drafter, tokens=1200) > SIGNIFICANT
    lengths = [len(a_round.draft) for a_round in rounds]
    assert min(lengths.count(0), sum(length > 0 for length in lengths)) > 5
    assert len(set(lengths)) > 3, "the scheduler decides too little to tell anything"


def test_hardware_aware_without_confidence_head(erratic_clock):
    target = memoryless_target()
    drafter = bold_drafter(target, enable_confidence_head=False)
    drafter.round_costs = CURVES["smooth"]
    with trace(drafter) as rounds:
        assert transition_pvalue(target, drafter, tokens=1200) > SIGNIFICANT
    assert len({len(a_round.draft) for a_round in rounds}) > 2


def calibrated(drafter, method: str, bias: float, logit_weight: float, margin_weight: float):
    """The drafter with one regression for every position, drafting where that says more than one half."""
    calibration = Calibration(method, (bias,) * 5, (logit_weight,) * 5, (margin_weight,) * 5)
    drafter.hardware_profile = HardwareProfile(calibration={"sample": calibration})
    drafter.generation_config.assistant_confidence_threshold = 0.5
    return drafter


@pytest.mark.parametrize(
    ("calibration", "fields"),
    [
        (("margin", -0.8, 0, 4), {"markov_head_type": "vanilla", "enable_confidence_head": False}),
        (("margin", -0.8, 0, 4), {"markov_head_type": "rnn"}),
        (("both", -1, 0.5, 1.5), {"markov_head_type": "gated"}),
    ],
)
def test_margins(calibration, fields):
    target = memoryless_target()
    drafter = calibrated(bold_drafter(target, **fields), *calibration)
    with trace(drafter) as rounds:
        assert transition_pvalue(target, drafter, tokens=1200) > SIGNIFICANT
    assert len({len(a_round.draft) for a_round in rounds}) > 2, "the margin decides nothing"


@pytest.mark.parametrize("width", [1, 2, 3])
def test_narrow_drafts(width):
    target = memoryless_target()
    drafter = bold_drafter(target)
    drafter.generation_config.num_assistant_tokens = width
    assert transition_pvalue(target, drafter) > SIGNIFICANT


def test_pruned_draft_vocabulary():
    target = memoryless_target()
    drafter = bold_drafter(target, draft_vocab_size=3)
    drafter.d2t.copy_(torch.tensor([1, 4, 6]) - torch.arange(3))
    assert transition_pvalue(target, drafter) > SIGNIFICANT


@pytest.mark.parametrize("arguments", [{"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 3}], ids=str)
def test_temperature_and_top_k(arguments):
    target = memoryless_target()
    assert transition_pvalue(target, bold_drafter(target), **arguments) > SIGNIFICANT


class RawScores(DSparkCandidateGenerator):
    """Wrong: returns scores that the draft was not drawn from."""

    def get_candidates(self, input_ids, **kwargs):
        candidates, scores = super().get_candidates(input_ids, **kwargs)
        return candidates, None if scores is None else scores * 0.5


class GreedyDrafts(DSparkCandidateGenerator):
    """Wrong: proposes the most likely token but claims to have drawn it from q."""

    def _choose(self, input_ids, logits):
        _, scores = super()._choose(input_ids, logits)
        return scores.argmax(-1, keepdim=True), scores


class LooksAhead(DSparkCandidateGenerator):
    """Wrong: drops a drafted token because of the confidence that follows from it."""

    def get_candidates(self, input_ids, **kwargs):
        self.drafter.rounds = []  # have confidences worked out
        candidates, scores = super().get_candidates(input_ids, **kwargs)
        drafted = candidates.shape[1] - input_ids.shape[1]
        for k in range(drafted - 1):
            if self._confidences[k + 1] < 0.93:
                candidates, scores = candidates[:, : input_ids.shape[1] + k], scores[:, :k]
                break
        return candidates, scores if candidates.shape[1] > input_ids.shape[1] else None


class UnaryScores(DSparkCandidateGenerator):
    """Wrong: draws from a selector's candidates but says that any token could have been drawn."""

    def _choose(self, input_ids, logits):
        token, scores = super()._choose(input_ids, logits)
        return token, scores.masked_fill(scores.isinf(), scores[scores.isfinite()].mean())


def test_wrong_scores_of_a_selector_are_caught(monkeypatch):
    target = memoryless_target()
    monkeypatch.setattr(decoding, "DSparkCandidateGenerator", UnaryScores)
    assert transition_pvalue(target, bold_drafter(target, **SELECTOR), tokens=1000) < SIGNIFICANT**2


class OwnProbability(DSparkCandidateGenerator):
    """Wrong: how far to trust a slot depends on how likely the token is that was drawn for it."""

    def _confidence(self, calibration, slot, block):
        q = block.logits().softmax(-1)
        self._drawn = torch.multinomial(q, num_samples=1)
        mine = q.gather(-1, self._drawn)
        return calibration(slot, margin=mine.logit()).sigmoid().item()

    def _choose(self, input_ids, logits):
        _, scores = super()._choose(input_ids, logits)
        return self._drawn, scores


def test_trusting_likely_tokens_more_is_caught(monkeypatch):
    """As `test_margins`, but for what stands in the margin's place."""
    target = memoryless_target()
    drafter = calibrated(bold_drafter(target), "margin", 4, 0, 4)
    monkeypatch.setattr(decoding, "DSparkCandidateGenerator", OwnProbability)
    assert transition_pvalue(target, drafter) < SIGNIFICANT**2


@pytest.mark.parametrize("wrong", [RawScores, GreedyDrafts, LooksAhead])
def test_wrong_drafting_is_caught(wrong, monkeypatch):
    target = memoryless_target()
    drafter = bold_drafter(target)
    monkeypatch.setattr(decoding, "DSparkCandidateGenerator", wrong)
    assert transition_pvalue(target, drafter) < SIGNIFICANT**2


@pytest.mark.parametrize("wrong", ["always", "no residual"])
def test_wrong_verification_is_caught(wrong, monkeypatch):
    def accept_or_replace(proposed, q, p):
        if wrong == "always" or torch.rand(()) * q.gather(-1, proposed) < p.gather(-1, proposed):
            return proposed
        return torch.multinomial(p, num_samples=1)

    target = memoryless_target()
    monkeypatch.setattr("hf_dspark.generation.verification._accept_or_replace", accept_or_replace)
    assert transition_pvalue(target, bold_drafter(target)) < SIGNIFICANT**2


# Processors that look at the whole prefix: short texts against full enumeration.

SHORT = 4
PROCESSORS = {
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "typical_p": {"typical_p": 0.8},
    "epsilon": {"epsilon_cutoff": 0.1},
    "eta": {"eta_cutoff": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "bad_words": {"bad_words_ids": [[1], [2, 3]]},
    "prefix": {"prefix_allowed_tokens_fn": lambda batch, ids: [(int(ids[-1]) + k) % 5 for k in range(3)]},
    "bias": {"sequence_bias": [[[3], 1.0], [[0, 4], -2.0]]},
    "min_new_tokens": {"min_new_tokens": 3, "eos_token_id": 2},
    "forced_eos": {"forced_eos_token_id": 2},
    "mixed": {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.2},
}


def enumerated(target, ids, arguments) -> dict[tuple[int, ...], float]:
    """Exact probabilities of all continuations, from the scores of plain generate() forced along each of them."""
    eos, vocabulary = arguments.get("eos_token_id"), target.config.vocab_size
    probabilities = {(): 1.0}
    for step in range(SHORT):
        longer = {}
        for text, mass in probabilities.items():
            if eos is not None and eos in text:
                longer[text] = longer.get(text, 0) + mass
                continue

            def force(batch_id, row, text=text):
                place = len(row) - ids.shape[1]
                allowed = list(range(vocabulary))
                if "prefix_allowed_tokens_fn" in arguments:
                    allowed = arguments["prefix_allowed_tokens_fn"](batch_id, row)
                return [text[place]] if place < len(text) else allowed

            scores = target.generate(
                ids,
                do_sample=True,
                max_new_tokens=SHORT,
                return_dict_in_generate=True,
                output_scores=True,
                **{"top_k": 0, **arguments, "prefix_allowed_tokens_fn": force},
            ).scores
            for token, p in enumerate(scores[step][0].softmax(-1).tolist()):
                if p:
                    longer[(*text, token)] = mass * p
        probabilities = longer
    return probabilities


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(name):
    target = tiny_target("llama", seed=2, vocab_size=5, num_hidden_layers=1)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.3)
    drafter = bold_drafter(target)
    ids, runs = torch.tensor([[4, 0]]), 500
    if name in ("top_p", "typical_p", "min_p", "epsilon", "eta"):  # no state in the prefix beyond the logits
        runs = 300
    exact = enumerated(target, ids, PROCESSORS[name])
    assert abs(sum(exact.values()) - 1) < 1e-4
    torch.manual_seed(5)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(runs):
        text = target.generate(
            ids, assistant_model=drafter, do_sample=True, max_new_tokens=SHORT, **{"top_k": 0, **PROCESSORS[name]}
        )
        text = tuple(text[0, ids.shape[1] :].tolist())
        counts[text] = counts.get(text, 0) + 1
    assert set(counts) <= set(exact), "a text that the target never writes"

    # The joint distribution of the later tokens, which come from drafts; a text's first token never does.
    def tails(table):
        merged: dict[tuple[int, ...], float] = {}
        for text, weight in table.items():
            merged[text[1:3]] = merged.get(text[1:3], 0) + weight
        return merged

    expected, observed = tails(exact), tails(counts)
    bins = [[0.0, 0.0]]
    for tail, p in expected.items():
        if p * runs < 5:
            bins[0][0] += observed.get(tail, 0)
            bins[0][1] += p * runs
        else:
            bins.append([observed.get(tail, 0), p * runs])
    bins = [pair for pair in bins if pair[1] > 0]
    total = sum(pair[1] for pair in bins)
    if len(bins) > 1:
        assert chisquare([b[0] for b in bins], [b[1] * runs / total for b in bins]).pvalue > SIGNIFICANT


def test_enumeration_is_the_distribution_of_plain_sampling():
    """The reference itself: enumeration against the one-token distribution."""
    target = tiny_target("llama", seed=2, vocab_size=5, num_hidden_layers=1)
    ids = torch.tensor([[4, 0]])
    exact = enumerated(target, ids, {})
    with torch.no_grad():
        first = target(ids).logits[0, -1].softmax(-1)
    for token in range(5):
        mass = sum(p for text, p in exact.items() if text[0] == token)
        assert mass == pytest.approx(first[token].item(), abs=1e-5)
    assert len(exact) == len(list(itertools.product(range(5), repeat=SHORT)))
