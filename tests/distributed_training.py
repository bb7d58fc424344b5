"""Trains a tiny drafter for a few steps of eight sequences, on however many processes there are; see test_training."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from conftest import prompt, tiny_drafter, tiny_target
from transformers import TrainingArguments

from hf_dspark.training import objective
from hf_dspark.training.trainer import DSparkTrainer


def spread_anchors(lengths, starts, num_anchors):
    """Anchors that depend on nothing but the text, as random ones depend on the process."""
    return 1 + (torch.arange(num_anchors) * (lengths - 2).unsqueeze(-1) / num_anchors).long()


def main(output: Path) -> None:
    objective.sample_anchors = spread_anchors
    target = tiny_target("llama")
    rows = [{"input_ids": prompt(length, seed=length)[0].tolist()} for length in range(9, 41)]
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    processes = arguments.world_size
    arguments.gradient_accumulation_steps = 2 // processes
    trainer = DSparkTrainer(tiny_drafter(target), target, arguments, rows, num_anchors=6)
    trainer.train()
    if arguments.process_index == 0:
        result = {
            "processes": processes,
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "weights": trainer.drafter.state_dict(),
        }
        torch.save(result, output / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
