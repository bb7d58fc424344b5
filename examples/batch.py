"""Many requests at once: they share the drafter and its schedule. Run `python examples/batch.py`."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dspark import DSparkModel, trace
from hf_dspark.demo import DRAFTER, smollm2

target_path = smollm2()
target = AutoModelForCausalLM.from_pretrained(target_path, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(target_path, padding_side="left")  # as for any batch
drafter = DSparkModel.from_pretrained(DRAFTER, dtype="float32")

questions = ["Why is the sky blue?", "Name three uses of a paper clip.", "Write a haiku about rain."]
inputs = tokenizer.apply_chat_template(
    [[{"role": "user", "content": question}] for question in questions],
    add_generation_prompt=True,
    padding=True,
    return_tensors="pt",
    return_dict=True,
)
with trace(drafter) as rounds:
    out = target.generate(**inputs, assistant_model=drafter, max_new_tokens=64, do_sample=False)

for row, question in enumerate(questions):
    answer = tokenizer.decode(out[row, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    lengths = [len(one.draft) for one in rounds if one.row == row]
    print(f"{question}\n{answer}\n{sum(lengths) / len(lengths):.2f} drafts verified a round\n")
