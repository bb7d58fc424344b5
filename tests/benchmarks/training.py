"""
How fast the target writes training text, against its own batched decoding, and how fast a drafter trains on it.

    python tests/benchmarks/training.py [--target FOLDER] [--batch-size 128] [--steps 10]
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from typing import Annotated

import torch
import typer
from transformers import TrainingArguments

from hf_dspark import DSparkModel
from hf_dspark.cli import target_folder
from hf_dspark.devices import multiplies_bfloat16
from hf_dspark.training.conversations import answer_header, self_written, user_turn_prompts
from hf_dspark.training.recipe import load_target, unused_token
from hf_dspark.training.trainer import DSparkTrainer, config_for, pad_sequences


def decoding_rate(target, tokenizer, batch_size: int, tokens: int = 160) -> float:
    """New tokens per second of a batched `generate()` that nothing ends early."""
    prompt = user_turn_prompts(tokenizer, ("Explain",))[0]
    inputs = torch.tensor([prompt] * batch_size, device=target.device)
    begin = time.perf_counter()
    mask = torch.ones_like(inputs)
    target.generate(
        inputs, attention_mask=mask, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=True, top_k=50
    )
    return batch_size * tokens / (time.perf_counter() - begin)


def writing_rate(target, tokenizer, batch_size: int, rows: int) -> tuple[float, list[dict]]:
    """Tokens per second that the target writes (without its template) once the batch has mixed, and the text."""
    template = len(user_turn_prompts(tokenizer, ("",))[0]) + len(answer_header(tokenizer))
    source = self_written(target, tokenizer, batch_size=batch_size)
    list(itertools.islice(source, batch_size))
    begin = time.perf_counter()
    written = list(itertools.islice(source, rows))
    seconds = time.perf_counter() - begin
    return sum(len(row["input_ids"]) - template for row in written) / seconds, written


def training_split(target, tokenizer, rows: list[dict], steps: int) -> dict[str, float]:
    """Seconds a step by part, medians, and tokens of text a second."""
    config = config_for(target, unused_token(tokenizer), num_hidden_layers=2, block_size=5, draft_vocab_size=8192)
    drafter = DSparkModel(config).to(target.device)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(scratch, report_to=[], max_steps=steps)
        trainer = DSparkTrainer(drafter, target, arguments, rows, num_anchors=96)
        trainer.create_optimizer_and_scheduler(steps)
    parts: dict[str, list[float]] = {name: [] for name in ("target", "drafter forward", "backward", "optimizer")}
    tokens = 0
    begin = clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        if target.device.type != "cpu":
            torch.accelerator.synchronize()
        now = time.perf_counter()
        parts[name].append(now - clock)
        clock = now

    for step in range(steps):
        batch = pad_sequences(rows[4 * step : 4 * step + 4])
        batch = {name: tensor.to(target.device) for name, tensor in batch.items()}
        tokens += int(batch["attention_mask"].sum())
        clock = time.perf_counter()
        theirs = trainer.target_inputs(batch)
        lap("target")
        with torch.autocast(target.device.type, torch.bfloat16, enabled=multiplies_bfloat16(target.device)):
            loss = trainer.model(**batch, **theirs).loss
        lap("drafter forward")
        loss.backward()
        lap("backward")
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        lap("optimizer")
    rate = tokens / (time.perf_counter() - begin)
    return {"tokens/s": rate, **{name: statistics.median(seconds) for name, seconds in parts.items()}}


def main(
    target: Annotated[str, typer.Option(help="Folder of the target, or `smollm2`.")] = "smollm2",
    batch_size: int = 128,
    steps: int = 10,
) -> None:
    model, tokenizer = load_target(target_folder(target))
    typer.echo(f"batched generate() of {batch_size}: {decoding_rate(model, tokenizer, batch_size):.0f} tokens/s")
    writing, rows = writing_rate(model, tokenizer, batch_size, batch_size)
    typer.echo(f"self-written text: {writing:.0f} tokens/s")
    split = training_split(model, tokenizer, rows, min(steps, len(rows) // 4))
    typer.echo(f"training on {split.pop('tokens/s'):.0f} tokens of text a second")
    for name, seconds in split.items():
        typer.echo(f"  {name:16} {seconds:6.3f} s  {seconds / sum(split.values()):4.0%}")


if __name__ == "__main__":
    typer.run(main)
