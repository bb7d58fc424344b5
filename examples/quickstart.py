"""The smallest use: load a target and its drafter, generate. Run `python examples/quickstart.py`."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dspark import DSparkModel, acceptance_length, trace
from hf_dspark.demo import DRAFTER, smollm2

target_path = smollm2()  # any decoder-only causal language model: a folder or a Hub repository
target = AutoModelForCausalLM.from_pretrained(target_path, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(target_path)
drafter = DSparkModel.from_pretrained(DRAFTER, dtype="float32")

messages = [{"role": "user", "content": "Why is the sky blue?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
with trace(drafter) as rounds:
    out = target.generate(**inputs, assistant_model=drafter, max_new_tokens=64, do_sample=False)

print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"{acceptance_length(rounds):.2f} tokens per forward pass of the target")
