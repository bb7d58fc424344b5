"""The same through `pipeline()`. Run `python examples/text_generation_pipeline.py`."""

from transformers import pipeline

from hf_dspark import DSparkModel
from hf_dspark.demo import DRAFTER, smollm2

drafter = DSparkModel.from_pretrained(DRAFTER, dtype="float32")
generate = pipeline("text-generation", model=str(smollm2()), assistant_model=drafter, dtype="float32")

messages = [{"role": "user", "content": "Name three uses of a paper clip."}]
answer = generate(messages, max_new_tokens=64, do_sample=True, temperature=0.7)
print(answer[0]["generated_text"][-1]["content"])
