"""From a target to a drafter: data, training, saving, each resumed where it stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from ..files import write_text
from ..hub import repository_of
from ..modeling_dspark import DSparkModel
from .data import load_data, write_data
from .initialisation import finish, initialise
from .trainer import DSparkTrainer, config_for, prune_vocabulary

HELD_OUT = 24  # sequences for the acceptance estimate


def load_target(path: str | os.PathLike) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    The target on this process's device, and its tokenizer. An accelerator keeps the dtype of the checkpoint; on CPUs
    float32 is the faster for large batches.
    """
    device = PartialState().device
    dtype = torch.float32 if device.type == "cpu" else "auto"
    target = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().to(device)
    return target, AutoTokenizer.from_pretrained(path)


def unused_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """
    The last special token that is neither padding nor part of the chat template: a mask for draft blocks.

    Raises:
        ValueError: there is none.
    """
    taken = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    text = tokenizer.apply_chat_template([{"role": "user", "content": "-"}], tokenize=True, return_dict=True)
    free = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    free = {token for token in free - taken - set(text["input_ids"]) if token < len(tokenizer)}
    if not free:
        raise ValueError("No special token is free to mask draft slots with; name one with `mask_token_id`.")
    return max(free)


def train_drafter(
    target_path: str | os.PathLike,
    output: str | os.PathLike,
    data: str | os.PathLike | None = None,
    tokens: int = 500_000,
    steps: int = 1000,
    batch_size: int = 4,
    gradient_accumulation: int = 1,
    anchors: int = 96,
    learning_rate: float = 1e-3,
    mask_token_id: int | None = None,
    seed: int = 0,
    cache: bool = False,
    **config_fields,
) -> DSparkModel:
    """
    Train a drafter for the target and save it in `output`, with a `training.json` that says how.

    Works in one process or under `accelerate launch`, where every process takes `batch_size` sequences a step.

    Args:
        target_path: folder or Hub repository of the target and its tokenizer.
        output: folder of the drafter; `output/checkpoints` holds the training state, `output/data` the text that the
            target wrote if no data was given.
        data: a folder that `hf-dspark data` wrote, or a jsonl file of rows with `input_ids`.
        tokens: how much text to generate without data.
        steps, batch_size, gradient_accumulation, anchors, learning_rate, seed: the training; `anchors` are draft
            blocks per sequence.
        cache: keep what the target says of the text in `output/target_cache`, so that it runs in the first epoch only.
        mask_token_id: token that fills draft slots (default: a special token that is not in use).
        config_fields: [`DSparkConfig`] fields such as `num_hidden_layers`, `block_size`, `draft_vocab_size`.
    """
    output, state = Path(output), PartialState()
    output.mkdir(parents=True, exist_ok=True)
    target, tokenizer = load_target(target_path)
    if data is None:
        data = output / "data"
        write_data(target, tokenizer, data, tokens=tokens, seed=seed)
        state.wait_for_everyone()
    with state.main_process_first():
        rows = load_data(data)
    if len(rows) <= HELD_OUT:
        raise ValueError(f"{data} has {len(rows)} rows; more than {HELD_OUT} are needed, that many are held out.")
    held_out, rows = rows.select(range(HELD_OUT)), rows.select(range(HELD_OUT, len(rows)))

    if mask_token_id is None:
        mask_token_id = unused_token(tokenizer)
    set_seed(seed)
    config_fields = {"base_model": repository_of(target), **config_fields}
    drafter = DSparkModel(config_for(target, mask_token_id, **config_fields)).to(target.device)
    coverage = prune_vocabulary(drafter, (row["input_ids"][row.get("prompt_length") or 0 :] for row in rows))
    checkpoints = output / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    on_accelerator = target.device.type != "cpu"
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        adam_beta2=0.95,
        weight_decay=0.01,
        bf16=on_accelerator,
        use_cpu=not on_accelerator,
        dataloader_pin_memory=on_accelerator,
        ddp_find_unused_parameters=False,
        eval_strategy="steps",
        eval_steps=max(1, steps // 8),
        save_steps=max(1, min(100, steps // 4)),
        save_total_limit=1,
        logging_steps=20,
        include_num_input_tokens_seen="non_padding",
        report_to=[],
        remove_unused_columns=False,
        seed=seed,
    )
    initialise(drafter, target, rows[:64]["input_ids"])
    trainer = DSparkTrainer(
        drafter, target, arguments, rows, held_out, anchors, output / "target_cache" if cache else None
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(checkpoints))
    trainer.evaluate()
    finish(drafter)
    if state.is_main_process:
        _write_record(
            output / "training.json",
            trainer,
            sequences=len(rows),
            tokens=sum(map(len, rows["input_ids"])),
            batch_size=batch_size * gradient_accumulation * state.num_processes,
            anchors=anchors,
            learning_rate=learning_rate,
            seed=seed,
            **({} if drafter.d2t is None else {"draft_vocabulary_coverage": round(coverage, 4)}),
        )
        drafter.to(torch.bfloat16).save_pretrained(output)
    return drafter


def _write_record(file: Path, trainer: DSparkTrainer, **facts) -> None:
    """How the drafter was trained, and how its acceptance grew on held-out text."""
    names = ("acceptance_length", "greedy_acceptance_length")
    curve = {  # by step: the last evaluation may be there twice
        entry["step"]: {"step": entry["step"], "tokens": entry["num_input_tokens_seen"]}
        | {name: round(entry[f"eval_{name}"], 3) for name in names}
        for entry in trainer.state.log_history
        if f"eval_{names[0]}" in entry
    }
    record = {**facts, "steps": trainer.state.max_steps, "curve": list(curve.values())}
    write_text(file, json.dumps(record, indent=2) + "\n")
