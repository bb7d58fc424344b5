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

from ..devices import multiplies_bfloat16
from ..files import write_text
from ..heads import CopyHead
from ..hub import repository_of
from ..modeling_dspark import DSparkModel
from .data import load_data, write_data
from .initialisation import feature_sizes, finish, initialise, prepare
from .trainer import DSparkTrainer, config_for, count_tokens, prune_vocabulary

HELD_OUT = 24  # sequences for the acceptance estimate


def load_target(path: str | os.PathLike) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    The target on this process's device, and its tokenizer. The dtype is the checkpoint's, but on CPUs that do not
    multiply in bfloat16, where float32 is the faster for large batches.
    """
    device = PartialState().device
    dtype = "auto" if multiplies_bfloat16(device) else torch.float32
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
    drafter_path: str | os.PathLike | None = None,
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
        drafter_path: folder or Hub repository of a drafter for this target to go on from, instead of a new one.
        config_fields: [`DSparkConfig`] fields such as `num_hidden_layers`, `block_size`, `draft_vocab_size`; of a
            drafter that is there, `block_size` and `copy_ngram_size` alone can change.
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

    set_seed(seed)
    config_fields = {"base_model": repository_of(target), **config_fields}
    counts = count_tokens(
        target.get_input_embeddings().num_embeddings,
        (row["input_ids"][row.get("prompt_length") or 0 :] for row in rows),
    )
    if drafter_path is None:
        if mask_token_id is None:
            mask_token_id = unused_token(tokenizer)
        drafter = DSparkModel(config_for(target, mask_token_id, **config_fields)).to(target.device)
        prune_vocabulary(drafter, counts)
    else:
        changes = (config_fields.get(name) for name in ("block_size", "copy_ngram_size"))
        drafter = drafter_to_go_on_from(drafter_path, *changes).to(target.device)
    sizes = feature_sizes(drafter, target, rows[:64]["input_ids"])
    if drafter_path is None:
        initialise(drafter, target, sizes)
    prepare(drafter, sizes)
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
        bf16=multiplies_bfloat16(target.device),
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
            **({} if drafter.d2t is None else {"draft_vocabulary_coverage": coverage(drafter, counts)}),
        )
        drafter.to(torch.bfloat16).save_pretrained(output)
    return drafter


def drafter_to_go_on_from(
    path: str | os.PathLike, block_size: int | None = None, copy_ngram_size: int | None = None
) -> DSparkModel:
    """
    The drafter of that path in float32, with blocks of so many rows and a copy head for repetitions of so many tokens
    (default: its own). A head that it has not had, or not of that size, starts as a new drafter's. What was measured
    of it before is left behind.
    """
    size = {} if block_size is None else {"block_size": block_size}
    drafter = DSparkModel.from_pretrained(path, dtype=torch.float32, **size)
    drafter.hardware_profile = None
    if copy_ngram_size not in (None, drafter.config.copy_ngram_size):
        drafter.config.copy_ngram_size = copy_ngram_size
        drafter.copy_head = CopyHead(drafter.config) if copy_ngram_size else None
    return drafter


def coverage(drafter: DSparkModel, counts: torch.Tensor) -> float:
    """The share of the tokens that were counted, (V,), that the draft vocabulary has."""
    return round((counts[drafter.draft_token_ids.cpu()].sum() / counts.sum().clamp(min=1)).item(), 4)


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
