"""Batches: every row's greedy output is plain generate()'s, every row's samples have the target's distribution."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import FAMILIES, SLIDING, drafter_config, prompt, tiny_drafter, tiny_target
from scipy.stats import chisquare
from test_greedy import PROCESSORS
from test_sampling import CURVES, SIGNIFICANT, bold_drafter, erratic_clock, memoryless_target  # noqa: F401
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList, TextStreamer, pipeline

from hf_dspark import DSparkModel, trace
from hf_dspark.compat import CACHE
from hf_dspark.generation import batch_drafter
from hf_dspark.generation.ragged_cache import RaggedCache
from hf_dspark.scheduling.batch import EachRow
from hf_dspark.scheduling.costs import RoundCosts
from hf_dspark.scheduling.schedulers import FixedLength

PAD = 2


class ScriptedBatchDrafter(DSparkModel):
    """
    Knows how the texts go on and errs now and then; checks that each row's context ends where its anchor stands.

    Args:
        scripts: the token ids of the texts, without padding.
        accuracy: share of slots in which the scripted token is the most likely one.
    """

    def __init__(self, config, scripts, accuracy):
        super().__init__(config)
        self.scripts, self.accuracy = scripts, accuracy
        self._generator = torch.Generator().manual_seed(0)
        self.passes = 0

    def forward(self, input_ids, context_hidden_states, position_ids=None, **kwargs):
        assert torch.isfinite(context_hidden_states).all()
        self.passes += 1
        self._ahead = []
        for token, anchor in zip(input_ids[:, 0].tolist(), position_ids[:, context_hidden_states.shape[1]].tolist()):
            texts = [text for text in self.scripts if anchor < len(text)]
            matching = [text for text in texts if text[anchor] == token]
            assert matching or not texts, f"the context ends at {anchor}, no text has its anchor there"
            self._ahead.append(matching[0][anchor + 1 :] if matching else [])
        return super().forward(input_ids, context_hidden_states, position_ids=position_ids, **kwargs)

    def base_logits(self, hidden):
        logits = torch.randn(*hidden.shape[:-1], self.config.vocab_size, generator=self._generator)
        for row, ahead in enumerate(self._ahead):
            for k, token in enumerate(ahead[: hidden.shape[1]]):
                if torch.rand((), generator=self._generator) < self.accuracy:
                    logits[row, k, token] += 20
        return logits


def scripted(target, texts, mask, accuracy=0.8, **fields):
    """A scripted drafter for texts (R, length) whose prompts have the mask (R, prompt length)."""
    scripts = [text[int((row == 0).sum()) :].tolist() for text, row in zip(texts, mask)]
    torch.manual_seed(1)
    fields = {"markov_rank": 0, "enable_confidence_head": False, **fields}
    return ScriptedBatchDrafter(drafter_config(target, **fields), scripts, accuracy).eval()


def batch(*lengths) -> dict[str, torch.Tensor]:
    """Prompts of these lengths, padded on the left."""
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), PAD), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = prompt(length, seed=length)[0]
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def check(target, inputs, accuracy=0.8, **arguments):
    """Compare with plain generate(); returns the text and the rounds."""
    arguments = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD, **arguments}
    plain = target.generate(**inputs, **arguments)
    drafter = scripted(target, plain, inputs["attention_mask"], accuracy)
    with trace(drafter) as rounds:
        drafted = target.generate(**inputs, assistant_model=drafter, **arguments)
    assert drafted.tolist() == plain.tolist()
    return plain, rounds


# Greedy: equal token for token


def attention_of(family: str) -> str:
    return "eager" if family == "gemma2" else "sdpa"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "lfm2"])
def test_families(family):
    target = tiny_target(family, attn_implementation=attention_of(family))
    _, rounds = check(target, batch(7, 20, 1))
    assert {a_round.accepted for a_round in rounds} - {0}, "no draft was ever accepted: this tests nothing"
    assert len({a_round.accepted for a_round in rounds}) > 2
    assert target.config._attn_implementation == attention_of(family)


@pytest.mark.parametrize("family", ["llama", "gpt2", *SLIDING])
def test_eager_attention(family):
    check(tiny_target(family, attn_implementation="eager"), batch(4, 9))


@pytest.mark.parametrize("family", SLIDING)
def test_across_the_sliding_window(family):
    target = tiny_target(family, attn_implementation=attention_of(family))
    window = target.config.sliding_window
    for accuracy in (0.5, 1.0):
        check(target, batch(window - 1, window, window + 1, 3 * window, 2), accuracy, max_new_tokens=30)


def test_prompts_of_the_same_length_without_a_mask():
    target = tiny_target("llama")
    ids = torch.cat([prompt(8, seed=seed) for seed in range(3)])
    check(target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def check_drafts(**fields):
    """Batched drafts and confidences are those of one row at a time."""
    target = tiny_target("gemma3_text")  # whose texts repeat themselves, so that random drafts are right at times
    drafter = tiny_drafter(target, **fields)
    inputs = batch(9, 4, 16)
    with trace(drafter) as rounds:
        out = target.generate(**inputs, assistant_model=drafter, max_new_tokens=15, do_sample=False, pad_token_id=PAD)
    for row, length in enumerate((9, 4, 16)):
        with trace(drafter) as alone:
            text = target.generate(**batch(length), assistant_model=drafter, max_new_tokens=15, do_sample=False)
        assert out[row, -length - 15 :].tolist() == text[0].tolist()
        mine = [one for one in rounds if one.row == row]
        assert [one.draft for one in mine] == [one.draft for one in alone]
        for one, other in zip(mine, alone):
            assert one.confidence == pytest.approx(other.confidence, abs=1e-4)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("from_anchor", [True, False])
def test_random_drafters(head, from_anchor):
    fields = {"markov_head_type": head} if head else {"markov_rank": 0}
    check_drafts(sample_from_anchor=from_anchor, **fields)


@pytest.mark.parametrize("causal", [True, False])
def test_drafters_with_windows(causal):
    kinds = ["sliding_attention", "full_attention"]
    check_drafts(layer_types=kinds, sliding_window=6, causal_in_block=causal)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 6])
def test_short_texts(max_new_tokens):
    check(tiny_target("llama"), batch(5, 8), accuracy=1.0, max_new_tokens=max_new_tokens)


def test_rows_end_where_their_text_ends():
    target = tiny_target("llama")
    inputs = batch(6, 11, 3)
    free = target.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=PAD)[:, 11:]
    for row, place in ((0, 0), (0, 7), (1, 3), (2, 5), (2, 12)):
        eos = free[row, place].item()
        check(target, inputs, accuracy=0.9, eos_token_id=eos)
        check(target, inputs, accuracy=0.9, eos_token_id=[eos, free[row - 1, 5].item()])
        plain, _ = check(target, inputs, accuracy=0.9, eos_token_id=eos, min_new_tokens=place + 2)
    assert (plain == PAD).any()


class FollowsRows(EachRow):
    """Expects every row to have the room that its last round left it, whichever rows have left since."""

    def __init__(self):
        super().__init__(FixedLength(3))
        self.rooms, self.left = None, 0

    def limits(self, rooms):
        assert self.rooms in (None, list(rooms))
        self.rooms = list(rooms)
        return super().limits(rooms)

    def observe(self, verified, accepted, seconds):
        self.rooms = [room - 1 - count for room, count in zip(self.rooms, accepted)]

    def select(self, rows):
        self.rooms = self.rooms and [self.rooms[row] for row in rows]
        self.left += 1


def test_schedulers_are_told_which_rows_stay(monkeypatch):
    scheduler = FollowsRows()
    monkeypatch.setattr("hf_dspark.generation.batched_decoding.batch_scheduler_of", lambda *_, **__: scheduler)
    target, inputs = tiny_target("llama"), batch(6, 11, 3, 8)
    free = target.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=PAD)[:, 11:]
    ends = [free[1, 0], free[0, 6], free[2, 6]]  # the first before anything is drafted
    check(target, inputs, accuracy=0.7, eos_token_id=[int(token) for token in ends])
    assert scheduler.left > 1


PROCESSORS = {
    **PROCESSORS,
    "prefix": {
        "prefix_allowed_tokens_fn": lambda batch, ids: [(int(ids[-1]) * 7 + k + 5 * batch) % 36 + 4 for k in range(9)]
    },
    "encoder_repetition": {"encoder_repetition_penalty": 1.7},
    "encoder_ngrams": {"encoder_no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_processors_see_each_rows_own_text(name):
    check(tiny_target("llama"), batch(8, 3, 12), accuracy=0.9, max_new_tokens=16, **PROCESSORS[name])


class StopAt(StoppingCriteria):
    """Stops a row at its first token of these."""

    def __init__(self, tokens, begin):
        self.tokens, self.begin = torch.tensor(tokens), begin

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, self.begin :], self.tokens).any(-1)


@pytest.mark.parametrize("eos", [None, 39])
def test_stopping_criteria_stop_rows_one_by_one(eos):
    """Without an end-of-sequence token, plain generate() lets rows that have ended go on until all have."""
    target = tiny_target("llama")
    free = target.generate(**batch(8, 5, 3), max_new_tokens=20, do_sample=False, pad_token_id=PAD)[:, 8:]
    for places in ((1, 9, 4), (12, 2, 2), (5, 5, 6)):
        stops = [free[row, place].item() for row, place in enumerate(places)]
        criteria = StoppingCriteriaList([StopAt(stops, 8)])
        check(target, batch(8, 5, 3), 0.9, stopping_criteria=criteria, eos_token_id=eos)


def test_stop_strings(tokenizer):
    target = tiny_target("llama")
    free = target.generate(**batch(8, 5), max_new_tokens=20, do_sample=False, pad_token_id=PAD)
    words = [tokenizer.decode(free[0, 11:13]), tokenizer.decode(free[1, 17:19])]
    plain, _ = check(target, batch(8, 5), stop_strings=words, tokenizer=tokenizer, eos_token_id=39)
    assert plain.shape[1] < free.shape[1]


def test_a_row_knows_nothing_of_its_neighbours():
    target = tiny_target("llama")
    lengths = (7, 2, 13, 4)
    drafter = tiny_drafter(target)
    arguments = {"assistant_model": drafter, "max_new_tokens": 18, "do_sample": False, "pad_token_id": PAD}
    alone = [target.generate(**batch(length), **arguments)[0, length:].tolist() for length in lengths]
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0), (1, 1, 3)):
        out = target.generate(**batch(*(lengths[row] for row in order)), **arguments)
        assert out[:, -18:].tolist() == [alone[row] for row in order]


def test_scores_and_logits():
    target = tiny_target("llama")
    inputs, eos = batch(8, 3), None
    arguments = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": PAD, "repetition_penalty": 1.3}
    arguments |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    eos = target.generate(**inputs, **arguments).sequences[1, 13].item()
    plain = target.generate(**inputs, **arguments, eos_token_id=eos)
    drafter = scripted(target, plain.sequences, inputs["attention_mask"])
    ours = target.generate(**inputs, **arguments, eos_token_id=eos, assistant_model=drafter)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(plain[name])
        for step, (one, other) in enumerate(zip(ours[name], plain[name])):
            for row in range(2):
                if PAD not in plain.sequences[row, 8 : 8 + step + 1]:
                    torch.testing.assert_close(one[row], other[row], atol=1e-4, rtol=1e-4)
                elif PAD in plain.sequences[row, 8 : 8 + step]:
                    assert not one[row].any()


def test_pipeline(tokenizer):
    target = tiny_target("llama")
    texts = [tokenizer.decode(prompt(length, seed=length)[0]) for length in (3, 9, 6, 5)]
    tokenizer.padding_side = "left"
    arguments = {"max_new_tokens": 15, "do_sample": False, "batch_size": 2}
    expected = pipeline("text-generation", model=target, tokenizer=tokenizer)(texts, **arguments)
    drafter = tiny_drafter(target)
    with trace(drafter) as rounds:
        drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)(
            texts, **arguments
        )
    assert drafted == expected
    assert {one.row for one in rounds} == {0, 1}


def test_chunked_prefill():
    check(tiny_target("llama"), batch(19, 3, 8), prefill_chunk_size=4)
    check(tiny_target("mistral"), batch(19, 3, 30), prefill_chunk_size=7)


def test_input_embeddings_instead_of_ids():
    target = tiny_target("llama")
    inputs = batch(6, 3)
    inputs = {"inputs_embeds": target.get_input_embeddings()(inputs["input_ids"])} | {
        "attention_mask": inputs["attention_mask"]
    }
    arguments = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD}
    plain = target.generate(**inputs, **arguments)
    out = target.generate(**inputs, **arguments, assistant_model=tiny_drafter(target))
    assert out.tolist() == plain.tolist()


def test_pruned_draft_vocabulary():
    target = tiny_target("llama")
    drafter = tiny_drafter(target, draft_vocab_size=10)
    drafter.d2t.copy_(torch.arange(10) * 3 + 5 - torch.arange(10))
    arguments = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD}
    plain = target.generate(**batch(6, 4), **arguments)
    with trace(drafter) as rounds:
        assert target.generate(**batch(6, 4), **arguments, assistant_model=drafter).tolist() == plain.tolist()
    assert {token for a_round in rounds for token in a_round.draft} <= {5 + 3 * k for k in range(10)}


# What is computed


def test_the_targets_layers_see_the_tokens_of_all_rows_and_no_padding():
    target = tiny_target("llama")
    seen = []
    handle = target.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    inputs = batch(9, 3, 5)
    eos = target.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=PAD)[1, -1].item()
    plain = target.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=PAD, eos_token_id=eos)
    drafter = scripted(target, plain, inputs["attention_mask"], accuracy=0.6)
    drafter.generation_config.num_assistant_tokens = 3
    seen.clear()
    with trace(drafter) as rounds:
        target.generate(
            **inputs, max_new_tokens=20, do_sample=False, pad_token_id=PAD, eos_token_id=eos, assistant_model=drafter
        )
    handle.remove()
    assert all(shape[0] == 1 for shape in seen)
    assert seen[0][1] == 9 + 3 + 5
    assert sum(shape[1] for shape in seen[1:]) == sum(1 + len(one.draft) for one in rounds)
    assert seen[-1][1] < seen[1][1], "rows that have ended are still computed"
    assert drafter.passes <= len(seen) - 1, "each row has a pass of its own"


def test_memory_grows_with_tokens_not_with_rounds():
    sizes = []
    original = RaggedCache.update

    def update(cache, *arguments, **keywords):
        views = original(cache, *arguments, **keywords)
        sizes.append(max(buffer.shape[2] for buffers in cache._buffers.values() for buffer in buffers))
        return views

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaggedCache, "update", update)
        check(tiny_target("llama"), batch(4, 4), accuracy=0.0, max_new_tokens=60)
    assert max(sizes) <= 2 * (4 + 60 + 6)


# Sampling


def transition_pvalues(target, drafter, rows=2, tokens=450, temperature=1.0, **arguments) -> list[float]:
    """By row, the chi-square of its transitions against the target's exact conditional distributions."""
    vocabulary = target.config.vocab_size
    with torch.no_grad():
        exact = (target(torch.arange(vocabulary)[:, None]).logits[:, -1] / temperature).double().softmax(-1)
    torch.manual_seed(11)
    ids = torch.arange(rows)[:, None] % vocabulary
    texts = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=drafter,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        max_new_tokens=tokens,
        **arguments,
    )
    values = []
    for text in texts:
        counts = torch.zeros(vocabulary, vocabulary).double()
        counts.index_put_((text[:-1], text[1:]), torch.ones(len(text) - 1).double(), accumulate=True)
        expected = counts.sum(-1, keepdim=True) * exact
        observed, expected = counts.flatten(), expected.flatten()
        rare = expected < 5
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        freedom_lost = int((counts.sum(-1) > 0).sum()) - 1
        values.append(chisquare(observed, expected, ddof=freedom_lost).pvalue)
    return values


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_every_row_has_the_targets_distribution(head):
    target = memoryless_target()
    drafter = bold_drafter(target, markov_head_type=head)
    with trace(drafter) as rounds:
        assert min(transition_pvalues(target, drafter)) > SIGNIFICANT
    assert {0, 1, 2} <= {one.accepted for one in rounds}


def test_confidence_threshold():
    target = memoryless_target()
    drafter = bold_drafter(target)
    drafter.generation_config.assistant_confidence_threshold = 0.5
    with trace(drafter) as rounds:
        assert min(transition_pvalues(target, drafter, temperature=0.8)) > SIGNIFICANT
    assert len({len(one.draft) for one in rounds}) > 2


@pytest.mark.parametrize("curve", CURVES)
def test_hardware_aware(curve, erratic_clock):  # noqa: F811
    target = memoryless_target()
    drafter = bold_drafter(target)
    with torch.no_grad():
        drafter.confidence_head.proj.bias.add_(-1.5)
    drafter.round_costs = CURVES[curve]
    with trace(drafter) as rounds:
        assert min(transition_pvalues(target, drafter)) > SIGNIFICANT
    lengths = [len(one.draft) for one in rounds]
    assert len(set(lengths)) > 3, "the scheduler decides too little to tell anything"


class SwappedScores(batch_drafter.BatchDrafter):
    """Wrong: rows get each other's q."""

    def draft(self, rows):
        super().draft(rows)
        if len({row.draft.shape[1] for row in rows}) == 1 and rows[0].draft_scores is not None:
            scores = [row.draft_scores for row in rows]
            for row, others in zip(rows, scores[1:] + scores[:1]):
                row.draft_scores = others


def test_a_batch_that_mixes_rows_up_is_caught(monkeypatch):
    target = memoryless_target()
    monkeypatch.setattr("hf_dspark.generation.batched_decoding.BatchDrafter", SwappedScores)
    assert min(transition_pvalues(target, bold_drafter(target))) < SIGNIFICANT**2


def test_several_samples_of_a_prompt():
    target = tiny_target("llama", seed=2, vocab_size=5, num_hidden_layers=1)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.3)
    ids = torch.tensor([[4, 0], [3, 1]])
    torch.manual_seed(0)
    out = target.generate(
        ids, do_sample=True, top_k=0, max_new_tokens=3, num_return_sequences=300, assistant_model=bold_drafter(target)
    )
    assert out.shape == (600, 5)
    assert out[:, :2].tolist() == ids.repeat_interleave(300, 0).tolist()
    for row in range(2):
        samples = out[300 * row : 300 * (row + 1), 2:]
        with torch.no_grad():
            first = target(ids[row : row + 1]).logits[0, -1].softmax(-1)
            second = first @ torch.stack(
                [target(torch.cat([ids[row], torch.tensor([x])])[None]).logits[0, -1].softmax(-1) for x in range(5)]
            )
        for place, exact in enumerate((first, second)):
            observed = torch.bincount(samples[:, place], minlength=5)
            assert chisquare(observed, 300 * exact.double() / exact.double().sum()).pvalue > SIGNIFICANT
    with pytest.raises(ValueError, match="num_return_sequences"):
        target.generate(ids, do_sample=False, num_return_sequences=2, assistant_model=bold_drafter(target))


# Hardware-aware, greedy


@pytest.mark.parametrize("confidence", [False, True])
def test_hardware_aware_greedy(confidence):
    target = tiny_target("llama")
    inputs = batch(6, 3, 9)
    arguments = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": PAD}
    plain = target.generate(**inputs, **arguments)
    arguments["eos_token_id"] = plain[1, 9].item()  # with which a text ends before anything is drafted
    plain = target.generate(**inputs, **arguments)
    assert (plain[1, 10:] == PAD).all()
    for curve, costs in {
        "never": RoundCosts(draft=9.0, verify=(1.0,) * 6),
        "linear": RoundCosts(draft=0.1, verify=(1.0, 1.3, 1.6, 1.9, 2.2, 2.5)),
        "free": RoundCosts(draft=0.0, verify=(1.0,) * 6),
        "dear heads": RoundCosts(draft=0.3, verify=(1.0, 1.02, 1.04, 1.06, 1.08, 1.1), head=0.05),
    }.items():
        drafter = scripted(target, plain, inputs["attention_mask"], 0.9, enable_confidence_head=confidence)
        if confidence:
            torch.nn.init.constant_(drafter.confidence_head.proj.bias, 2.0)
        drafter.round_costs = costs
        with trace(drafter) as rounds:
            out = target.generate(**inputs, **arguments, assistant_model=drafter)
        assert out.tolist() == plain.tolist()
        lengths = {len(one.draft) for one in rounds}
        assert (lengths == {0}) == (curve == "never")


# Requests that are refused, and what is left when something fails


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"streamer": True}, "batch"),
        ({"cache_implementation": "static"}, "`cache_implementation` unset"),
        ({CACHE: "filled"}, "cannot continue from a cache"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}, "on the left"),
        ({"use_cache": False}, "use_cache=True"),
        ({"guidance_scale": 1.5}, "keeps a state"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_before_anything_is_computed(arguments, match, tokenizer):
    target = tiny_target("llama")
    ids = torch.cat([prompt(4, seed=seed) for seed in range(2)])
    if arguments.get(CACHE) == "filled":
        cache = DynamicCache(config=target.config)
        with torch.no_grad():
            target(ids, **{CACHE: cache})
        ids, arguments = torch.cat([ids, ids], dim=1), {CACHE: cache}
    if "streamer" in arguments:
        arguments = {"streamer": TextStreamer(tokenizer)}
    target.forward = lambda *args, input_ids=None, position_ids=None, **kwargs: pytest.fail("something was computed")
    arguments = {"attention_mask": torch.ones_like(ids), **arguments}
    with pytest.raises(ValueError, match=match):
        target.generate(ids, assistant_model=tiny_drafter(tiny_target("llama")), max_new_tokens=4, **arguments)


def test_convolutions_are_refused():
    target = tiny_target("lfm2")
    with pytest.raises(ValueError, match="one sequence at a time"):
        target.generate(**batch(4, 6), assistant_model=tiny_drafter(target), max_new_tokens=4)


def test_models_are_as_before_when_memory_runs_out():
    target = tiny_target("llama", attn_implementation="sdpa")
    drafter = tiny_drafter(target)

    def run_out(module, args):
        raise torch.OutOfMemoryError("out of memory")

    handle = target.model.layers[2].register_forward_pre_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError):
        target.generate(**batch(4, 6), assistant_model=drafter, max_new_tokens=9, pad_token_id=PAD)
    handle.remove()
    assert target.config._attn_implementation == "sdpa"
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in target.model.layers)
    check(target, batch(4, 6))


def test_threads_that_share_a_target():
    """Ragged and plain passes at the same time, on one model."""
    target = tiny_target("mistral", attn_implementation="sdpa")
    arguments = {"max_new_tokens": 25, "do_sample": False, "pad_token_id": PAD}
    jobs = [batch(5, 9), batch(14), batch(3, 17, 8)]
    texts = [target.generate(**job, **arguments) for job in jobs]

    def run(place):
        drafter = None if place % 2 else tiny_drafter(target)
        return target.generate(**jobs[place // 2], **arguments, assistant_model=drafter)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run, range(6)))
    assert [result.tolist() for result in results] == [texts[place // 2].tolist() for place in range(6)]
    assert target.config._attn_implementation == "sdpa"
