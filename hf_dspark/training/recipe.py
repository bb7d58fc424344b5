"""From a target to a drafter: data, training, saving, each resumed where it stopped."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from ..modeling_dspark import DSparkModel
from .data import read_conversations, self_generated_conversations, write_conversations
from .trainer import DSparkTrainer, config_for, prune_vocabulary

HELD_OUT = 24  # sequences for the acceptance estimate


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
    anchors: int = 96,
    learning_rate: float = 1e-3,
    mask_token_id: int | None = None,
    seed: int = 0,
    **config_fields,
) -> DSparkModel:
    """
    Train a drafter for the target and save it in `output`.

    Args:
        target_path: folder or Hub repository of the target and its tokenizer.
        output: folder of the drafter; `output/checkpoints` holds the training state, `output/data.jsonl` the text
            that the target wrote if no data was given.
        data: a jsonl file of rows with `input_ids`.
        tokens: how much text to generate without data.
        steps, batch_size, anchors, learning_rate, seed: the training; `anchors` are draft blocks per sequence.
        mask_token_id: token that fills draft slots (default: a special token that is not in use).
        config_fields: [`DSparkConfig`] fields such as `num_hidden_layers`, `block_size`, `draft_vocab_size`.
    """
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    set_seed(seed)
    # On CPUs float32 is the faster for large batches; accelerators keep the dtype of the checkpoint.
    dtype = "auto" if torch.accelerator.is_available() else torch.float32
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=dtype).eval()
    if torch.accelerator.is_available():
        target.to(torch.accelerator.current_accelerator())
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    if data is None:
        data = output / "data.jsonl"
        write_conversations(data, self_generated_conversations(target, tokenizer, seed=seed), tokens)
    rows = read_conversations(data)
    if len(rows) <= HELD_OUT:
        raise ValueError(f"{data} has {len(rows)} rows; more than {HELD_OUT} are needed, that many are held out.")

    if mask_token_id is None:
        mask_token_id = unused_token(tokenizer)
    drafter = DSparkModel(config_for(target, mask_token_id, **config_fields)).to(target.device)
    prune_vocabulary(drafter, [row["input_ids"][row.get("prompt_length", 0) :] for row in rows])
    checkpoints = output / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        adam_beta2=0.95,
        weight_decay=0.01,
        bf16=torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
        eval_strategy="steps",
        eval_steps=max(1, steps // 4),
        save_steps=max(1, min(100, steps // 4)),
        save_total_limit=1,
        logging_steps=20,
        report_to=[],
        remove_unused_columns=False,
        seed=seed,
    )
    trainer = DSparkTrainer(drafter, target, arguments, rows[HELD_OUT:], rows[:HELD_OUT], num_anchors=anchors)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(checkpoints))
    trainer.evaluate()
    drafter.to(torch.bfloat16).save_pretrained(output)
    return drafter
