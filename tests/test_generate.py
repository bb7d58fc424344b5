"""Everything else that generate() offers works with a drafter as it does without one."""

from __future__ import annotations

import copy
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import GOLDEN, prompt, scripted_drafter, tiny_drafter, tiny_target
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GenerationMixin,
    MaxTimeCriteria,
    QuantizedCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
    pipeline,
)
from transformers.cache_utils import Cache, DynamicLayer

import hf_dspark
from hf_dspark import DSparkModel, trace
from hf_dspark.compat import CACHE
from hf_dspark.scheduling.costs import RoundCosts


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def plain(target):
    return target.generate(prompt(7), max_new_tokens=25, do_sample=False)


@pytest.fixture
def drafter(target, plain):
    return scripted_drafter(target, plain[0])


# What comes back


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_logits_hidden_states_and_attentions(family):
    target = tiny_target(family, attn_implementation="eager")
    arguments = {
        "max_new_tokens": 15,
        "do_sample": False,
        "repetition_penalty": 1.3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
    }
    plain = target.generate(prompt(6), **arguments)
    drafter = scripted_drafter(target, plain.sequences[0])
    ours = target.generate(prompt(6), assistant_model=drafter, **arguments)
    assert type(ours) is type(plain)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        assert len(ours[name]) == 15
        torch.testing.assert_close(torch.stack(ours[name]), torch.stack(plain[name]), atol=1e-4, rtol=1e-4)
    for name in ("hidden_states", "attentions"):
        assert len(ours[name]) == len(plain[name])
        for our_layers, plain_layers in zip(ours[name], plain[name]):
            torch.testing.assert_close(our_layers, plain_layers, atol=1e-4, rtol=1e-4)
    assert ours[CACHE].get_seq_length() == plain[CACHE].get_seq_length() == 6 + 14


def test_the_cache_that_comes_back_is_that_of_plain_generate(target, plain, drafter):
    ours = target.generate(
        prompt(7), assistant_model=drafter, max_new_tokens=25, do_sample=False, return_dict_in_generate=True
    )[CACHE]
    theirs = target.generate(prompt(7), max_new_tokens=25, do_sample=False, return_dict_in_generate=True)[CACHE]
    for ours_layer, theirs_layer in zip(ours.layers, theirs.layers):
        torch.testing.assert_close(ours_layer.keys, theirs_layer.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours_layer.values, theirs_layer.values, atol=1e-4, rtol=1e-4)


# Streaming and stopping


class Recorder(TextStreamer):
    def __init__(self):
        self.calls: list = []

    def put(self, value):
        self.calls.append(value.tolist())

    def end(self):
        self.calls.append("end")


def test_streamers_get_what_plain_generate_gives_them(target, drafter):
    plain_streamer, streamer = Recorder(), Recorder()
    target.generate(prompt(7), max_new_tokens=20, do_sample=False, streamer=plain_streamer)
    target.generate(prompt(7), assistant_model=drafter, max_new_tokens=20, do_sample=False, streamer=streamer)
    assert streamer.calls == plain_streamer.calls


class StopAfter(StoppingCriteria):
    """Stops when the text has ended with a token `times` times."""

    def __init__(self, token, times):
        self.token, self.times = token, times

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids == self.token).sum(-1) >= self.times


def test_stopping_criteria_stop_inside_a_draft(target, plain):
    for place in range(8, 30):
        token = plain[0, place].item()
        times = int((plain[0, : place + 1] == token).sum())
        criteria = StoppingCriteriaList([StopAfter(token, times)])
        drafter = scripted_drafter(target, plain[0], accuracy=1.0)
        out = target.generate(
            prompt(7), assistant_model=drafter, max_new_tokens=25, do_sample=False, stopping_criteria=criteria
        )
        assert out.tolist() == plain[:, : place + 1].tolist()


def test_stop_strings(target, plain, tokenizer):
    words = tokenizer.decode(plain[0, 12:14])
    arguments = {"max_new_tokens": 25, "do_sample": False, "stop_strings": words, "tokenizer": tokenizer}
    expected = target.generate(prompt(7), **arguments)
    assert expected.shape[1] < plain.shape[1]
    drafter = scripted_drafter(target, plain[0], accuracy=1.0)
    assert target.generate(prompt(7), assistant_model=drafter, **arguments).tolist() == expected.tolist()


def test_max_time(target, drafter):
    begin = time.time()
    out = target.generate(prompt(7), assistant_model=drafter, max_new_tokens=200, do_sample=False, max_time=0.05)
    assert time.time() - begin < 5
    assert 8 <= out.shape[1] < 207
    criteria = StoppingCriteriaList([MaxTimeCriteria(max_time=-1.0)])
    out = target.generate(prompt(7), assistant_model=drafter, max_new_tokens=9, stopping_criteria=criteria)
    assert out.shape[1] == 8  # at once, as in plain generate


# Several turns on one cache


@pytest.fixture
def turns(target):
    """Two turns in plain decoding: (first prompt, first text, second prompt, second text)."""
    first = target.generate(prompt(6), max_new_tokens=12, do_sample=False)
    second_prompt = torch.cat([first, prompt(4, seed=9)], dim=-1)
    return prompt(6), first, second_prompt, target.generate(second_prompt, max_new_tokens=12, do_sample=False)


def run_turn(target, ids, drafter, cache, **arguments):
    return target.generate(
        ids,
        assistant_model=drafter,
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        **{CACHE: cache},
        **arguments,
    )


def test_a_second_turn_continues_the_drafters_context(target, turns):
    first_prompt, first, second_prompt, second = turns
    drafter = scripted_drafter(target, second[0])
    result = run_turn(target, first_prompt, drafter, DynamicCache(config=target.config))
    assert result.sequences.tolist() == first.tolist()
    passes = []
    handle = target.model.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append((args[0] if args else kwargs["input_ids"]).shape[1]),
        with_kwargs=True,
    )
    result = run_turn(target, second_prompt, drafter, result[CACHE])
    handle.remove()
    assert result.sequences.tolist() == second.tolist()
    assert passes[0] == 5, "the second turn's new tokens"
    assert max(passes) <= 6, f"the first turn was read again: {passes}"


@pytest.mark.parametrize("earlier", ["plain", "another drafter", "copied", *range(1, 12)])
def test_a_second_turn_on_a_cache_from_elsewhere(target, turns, earlier):
    """The drafter's context is rebuilt, or recognised, and never that of another text: the script checks positions."""
    first_prompt, first, second_prompt, second = turns
    drafter = scripted_drafter(target, second[0])
    cache = DynamicCache(config=target.config)
    if earlier == "plain":
        cache = run_turn(target, first_prompt, None, cache)[CACHE]
    elif earlier == "another drafter":
        cache = run_turn(target, first_prompt, scripted_drafter(target, first[0]), cache)[CACHE]
    else:
        cache = run_turn(target, first_prompt, drafter, cache)[CACHE]
        if earlier == "copied":
            cache = copy.deepcopy(cache)
        else:
            cache.crop(-earlier)
    result = run_turn(target, second_prompt, drafter, cache)
    assert result.sequences.tolist() == second.tolist()
    assert drafter.anchors[-1] > len(second_prompt[0])


def test_threads_that_share_a_target(target):
    texts = [target.generate(prompt(n), max_new_tokens=40, do_sample=False) for n in (4, 9, 14)]
    drafters = [scripted_drafter(target, text[0], accuracy=0.7) for text in texts]

    def run(n, drafter):
        return target.generate(prompt(n), assistant_model=drafter, max_new_tokens=40, do_sample=False)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run, (4, 9, 14), drafters))
    assert [r.tolist() for r in results] == [t.tolist() for t in texts]


def test_the_rebuilt_context_has_the_features_of_the_whole_text(target, turns):
    first_prompt, first, second_prompt, second = turns
    features = {}
    for earlier in ("none", "plain", "drafted"):
        drafter = scripted_drafter(target, second[0], accuracy=1.0)
        cache = None
        if earlier != "none":
            cache = DynamicCache(config=target.config)
            cache = run_turn(target, first_prompt, drafter if earlier == "drafted" else None, cache)[CACHE]
        result = run_turn(target, second_prompt, drafter, cache)
        assert result.sequences.tolist() == second.tolist()
        context = result[CACHE]._dspark_context
        features[earlier] = context._cache._buffers[0][:, :, :, : len(second_prompt[0])]
    torch.testing.assert_close(features["plain"], features["none"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(features["drafted"], features["none"], atol=1e-4, rtol=1e-4)


def test_a_context_of_another_text_is_not_used(target, turns):
    """The same cache object, cropped and filled with other tokens behind our back."""
    first_prompt, _, second_prompt, _ = turns
    drafter = tiny_drafter(target)
    cache = run_turn(target, first_prompt, drafter, DynamicCache(config=target.config))[CACHE]
    other = prompt(cache.get_seq_length() + 3, seed=5)
    cache.crop(-cache.get_seq_length())
    with torch.no_grad():
        target(other[:, :-1], **{CACHE: cache})
    plain = target.generate(other, max_new_tokens=12, do_sample=False)
    scripted = scripted_drafter(target, plain[0])
    assert run_turn(target, other, scripted, cache).sequences.tolist() == plain.tolist()


def test_only_the_new_ids_are_passed(target, turns):
    first_prompt, first, second_prompt, second = turns
    drafter = tiny_drafter(target)
    cache = run_turn(target, first_prompt, None, DynamicCache(config=target.config))[CACHE]
    new = second_prompt[:, cache.get_seq_length() :]
    result = run_turn(target, new, drafter, cache, attention_mask=torch.ones_like(second_prompt))
    assert result.sequences[:, new.shape[1] :].tolist() == second[:, second_prompt.shape[1] :].tolist()


# The hook


def test_the_hook_is_idempotent_and_can_be_undone(target, plain, drafter):
    patched = GenerationMixin._assisted_decoding
    hf_dspark.install()
    assert GenerationMixin._assisted_decoding is patched
    hf_dspark.uninstall()
    try:
        assert GenerationMixin._assisted_decoding is not patched
        assert GenerationMixin._assisted_decoding.__module__ == "transformers.generation.utils"
        with pytest.raises((ValueError, TypeError, AttributeError)):
            target.generate(prompt(7), assistant_model=drafter, max_new_tokens=5)
    finally:
        hf_dspark.install()
    out = target.generate(prompt(7), assistant_model=drafter, max_new_tokens=25, do_sample=False)
    assert out.tolist() == plain.tolist()


def test_other_assistants_are_untouched(target, plain):
    assistant = tiny_target("llama", seed=4)
    out = target.generate(prompt(7), assistant_model=assistant, max_new_tokens=25, do_sample=False)
    assert out.tolist() == plain.tolist()
    out = target.generate(prompt(7), prompt_lookup_num_tokens=3, max_new_tokens=25, do_sample=False)
    assert out.tolist() == plain.tolist()


def test_pipeline(target, tokenizer, drafter):
    text = tokenizer.decode(prompt(7)[0])
    arguments = {"max_new_tokens": 25, "do_sample": False, "return_full_text": False}
    expected = pipeline("text-generation", model=target, tokenizer=tokenizer)(text, **arguments)
    with trace(drafter) as rounds:
        drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)(
            text, **arguments
        )
    assert drafted == expected
    assert any(a_round.accepted for a_round in rounds)


def test_pipeline_with_the_name_of_a_drafter(target, tokenizer, tmp_path):
    tiny_drafter(target).save_pretrained(tmp_path)
    generate = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=str(tmp_path))
    assert isinstance(generate.assistant_model, DSparkModel)
    arguments = {"max_new_tokens": 12, "do_sample": False}
    assert generate("abcdefg", **arguments) == pipeline("text-generation", model=target, tokenizer=tokenizer)(
        "abcdefg", **arguments
    )


def test_hooks_on_the_target_are_gone_afterwards(target, drafter):
    target.generate(prompt(7), assistant_model=drafter, max_new_tokens=5)
    with pytest.raises(RuntimeError, match="stop here"):
        drafter.base_logits = lambda hidden: (_ for _ in ()).throw(RuntimeError("stop here"))
        target.generate(prompt(7), assistant_model=drafter, max_new_tokens=5)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in target.model.layers)


# Devices


def test_offloaded_target(tmp_path):
    """Weights on the meta device but while their layer runs, as `device_map` with offload leaves them."""
    target = tiny_target("llama")
    expected = target.generate(prompt(6), max_new_tokens=20, do_sample=False)
    target.save_pretrained(tmp_path)
    device_map = {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk"}
    device_map |= {"model.layers.2": "cpu", "model.layers.3": "disk", "model.norm": "cpu", "lm_head": "disk"}
    device_map["model.rotary_emb"] = "cpu"
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=device_map, offload_folder=tmp_path / "offload", dtype=torch.float32
    )
    offloaded.generation_config.eos_token_id = None
    assert offloaded.get_output_embeddings().weight.device.type == "meta"
    drafter = tiny_drafter(target)
    out = offloaded.generate(prompt(6), assistant_model=drafter, max_new_tokens=20, do_sample=False)
    assert out.tolist() == expected.tolist()
    with torch.no_grad():
        assert torch.equal(drafter.embed(torch.tensor([5])), target.get_input_embeddings().weight[5:6])


def test_mixed_dtypes(target, plain):
    drafter = tiny_drafter(target).to(torch.bfloat16)
    out = target.generate(prompt(7), assistant_model=drafter, max_new_tokens=25, do_sample=False)
    assert out.tolist() == plain.tolist()
    assert target.dtype == torch.float32


# Requests that are refused, with the reason


def refused(target, drafter, match, **arguments):
    ids = arguments.pop("ids", prompt(5))
    with pytest.raises(ValueError, match=match):
        target.generate(ids, assistant_model=drafter, max_new_tokens=4, **arguments)


def test_no_cache_is_refused(target, drafter):
    refused(target, drafter, "use_cache=True", use_cache=False)


def test_stateful_processors_are_refused(target, drafter):
    refused(target, drafter, "keeps a state", guidance_scale=1.5)


def test_quantized_caches_are_refused(target, drafter):
    class Backendless(QuantizedCache):  # the quantisation libraries themselves are not needed to see it refused
        def __init__(self):
            Cache.__init__(self, layer_class_to_replicate=DynamicLayer)

    refused(target, drafter, "take back", **{CACHE: Backendless()})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"target_hidden_size": 48}, "hidden size is 32, the drafter expects 48"),
        ({"target_layer_ids": [1, 4], "num_target_layers": None}, "4 layers, the drafter taps layers"),
        ({"num_target_layers": 6}, "4 layers, the drafter expects 6"),
        ({"vocab_size": 50}, "vocabulary has 40 tokens, the drafter's has 50"),
        ({"hidden_size": 16, "target_hidden_size": 32}, "embeddings of size 32"),
    ],
)
def test_drafters_for_another_target_are_refused(target, fields, match):
    refused(target, tiny_drafter(target, **fields), match)


def test_encoder_decoders_are_refused(target, drafter):
    config = AutoConfig.for_model("t5", vocab_size=40, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    seq2seq = AutoModelForSeq2SeqLM.from_config(config)
    refused(seq2seq, drafter, "encoder-decoder", decoder_start_token_id=0)


def test_thresholds_need_a_confidence_head(target, drafter):
    drafter.generation_config.assistant_confidence_threshold = 0.5
    refused(target, drafter, "confidence head")


@pytest.mark.parametrize("length", [-1, 6])
def test_lengths_that_cannot_be_drafted_are_refused(target, drafter, length):
    drafter.generation_config.num_assistant_tokens = length
    refused(target, drafter, "drafts 0 to 5 tokens")


def test_a_real_drafter_is_refused_by_a_foreign_target(target):
    refused(
        target, DSparkModel.from_pretrained(GOLDEN / "deepspec_qwen3_vanilla"), "Load the drafter that was trained"
    )


def test_requests_teach_those_that_follow_until_the_target_changes(target, drafter):
    drafter.round_costs = RoundCosts(draft=0.01, verify=(1.0,) * (drafter.config.num_draft_tokens + 1))

    def expected() -> float:
        return drafter.experience(do_sample=False).outlook.mean(0)

    new = expected()
    target.generate(prompt(7), assistant_model=drafter, max_new_tokens=25, do_sample=False)
    learned = expected()
    assert learned != new
    target.generate(prompt(7), assistant_model=drafter, max_new_tokens=25, do_sample=False)
    assert expected() != learned, "what a request alone teaches is what the first one did"
    assert drafter.experience(do_sample=True).outlook.mean(0) == new, "sampling is another matter"
    drafter.bind(tiny_target("llama", seed=1))
    assert expected() == new
