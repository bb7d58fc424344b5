"""A chat in the terminal. One cache serves all turns, for the target and the drafter alike; an empty line ends it."""

from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextStreamer

from hf_dspark import DSparkModel
from hf_dspark.compat import CACHE
from hf_dspark.demo import DRAFTER, smollm2

target_path = smollm2()
target = AutoModelForCausalLM.from_pretrained(target_path, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(target_path)
drafter = DSparkModel.from_pretrained(DRAFTER, dtype="float32")
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

cache, cached = DynamicCache(config=target.config), None
messages: list[dict[str, str]] = []
while text := input("> ").strip():
    messages.append({"role": "user", "content": text})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    if cached is not None and not cached.equal(inputs["input_ids"][:, : cached.shape[1]]):
        cache = DynamicCache(config=target.config)  # the template renders the past turns in another way: start over
    out = target.generate(
        **inputs,
        **{CACHE: cache},  # `cache`, or `past_key_values` in older transformers
        assistant_model=drafter,
        streamer=streamer,
        max_new_tokens=256,
        do_sample=True,
        temperature=0.7,
    )
    cached = out[:, : cache.get_seq_length()]
    reply = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": reply})
