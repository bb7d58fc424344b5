"""Training a drafter for a frozen target with transformers' Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import DSparkModel
from ..taps import TargetTaps
from .objective import DSparkLoss, DSparkObjective
from .target_cache import STORED_AS, TargetCache

FAST = 5  # times the learning rate, for sequential and copy head and the scale of the base logits


def pad_sequences(rows: Sequence[dict]) -> dict[str, torch.Tensor]:
    """Right-padded `input_ids` and `attention_mask` (R, T) of rows with `input_ids`, and `prompt_lengths` (R,)."""
    sequences = [torch.as_tensor(row["input_ids"]) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(sequences, batch_first=True),
        "attention_mask": pad([torch.ones_like(sequence) for sequence in sequences], batch_first=True),
        "prompt_lengths": torch.tensor([row.get("prompt_length", 0) for row in rows]),
    }


def config_for(target: PreTrainedModel, mask_token_id: int, num_taps: int = 5, **fields) -> DSparkConfig:
    """
    A drafter configuration for `target`: its head geometry, taps spread over its layers, no tables of its own.

    `fields` are [`DSparkConfig`] fields that override what is taken from the target.
    """
    theirs = target.config.get_text_config(decoder=True)
    last = theirs.num_hidden_layers - 2
    taps = sorted({round(1 + i * (last - 1) / max(num_taps - 1, 1)) for i in range(num_taps)})
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    rope = getattr(theirs, "rope_parameters", None) or {}
    return DSparkConfig(
        **{
            "vocab_size": target.get_input_embeddings().num_embeddings,
            "hidden_size": theirs.hidden_size,
            "intermediate_size": getattr(theirs, "intermediate_size", None) or 4 * theirs.hidden_size,
            "num_attention_heads": theirs.num_attention_heads,
            "num_key_value_heads": getattr(theirs, "num_key_value_heads", None),
            "head_dim": head_dim,
            "max_position_embeddings": theirs.max_position_embeddings,
            "initializer_range": theirs.hidden_size**-0.5,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
            "num_target_layers": theirs.num_hidden_layers,
            "target_layer_ids": [layer for layer in taps if layer >= 0],
            "mask_token_id": mask_token_id,
            "copy_ngram_size": 6,
            **fields,
        }
    )


def count_tokens(vocab_size: int, sequences: Iterable[Sequence[int]]) -> torch.Tensor:
    """How often each token occurs, (vocab_size,)."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for sequence in sequences:
        counts += torch.bincount(torch.as_tensor(sequence), minlength=len(counts))
    return counts


def prune_vocabulary(drafter: DSparkModel, counts: torch.Tensor) -> None:
    """
    Point the drafter's `draft_vocab_size` slots at the tokens with the highest `counts` (V,), lower ids first among
    equals (a byte-pair vocabulary is ordered by frequency).
    """
    chosen = counts.argsort(descending=True, stable=True)[: drafter.config.draft_vocab_size].sort().values
    if drafter.d2t is not None:
        drafter.d2t.copy_(chosen - torch.arange(len(chosen)))


class DSparkTrainer(Trainer):
    """
    [`~transformers.Trainer`] for a drafter whose target is frozen and run in the same step, or read from a cache of
    what it said in an earlier epoch.

    The share of cross-entropy in the loss falls from 1 to the paper's 0.1 over the first half of the training: total
    variation alone hardly moves a drafter that has learned nothing yet.

    Args:
        drafter: the drafter to train.
        target: its target, in any dtype, on the drafter's device.
        train_dataset, eval_dataset: sequences of rows with `input_ids`.
        num_anchors: blocks per sequence and step.
        cache_folder: where a [`TargetCache`] keeps what the target says; by default it is asked every time.
    """

    def __init__(
        self,
        drafter: DSparkModel,
        target: PreTrainedModel,
        args: TrainingArguments,
        train_dataset: Dataset | Sequence[dict],
        eval_dataset: Dataset | Sequence[dict] | None = None,
        num_anchors: int = 64,
        cache_folder: str | os.PathLike | None = None,
        **kwargs,
    ):
        drafter.bind(target)
        self.target = target.eval().requires_grad_(False)
        self.cache_folder = cache_folder
        self._cache: TargetCache | None = None
        super().__init__(
            model=DSparkObjective(drafter, num_anchors),
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=pad_sequences,
            **kwargs,
        )
        self.can_return_loss = True

    @property
    def drafter(self) -> DSparkModel:
        return self.model.drafter

    @torch.no_grad()
    def target_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The target's side of [`DSparkObjective.forward`]."""
        drafter = self.drafter
        drafter.bind(self.target)  # a resumed checkpoint may have brought another draft vocabulary
        if self.cache_folder is None:
            return self._ask_target(inputs)
        if self._cache is None:
            self._cache = TargetCache(self.cache_folder, drafter, self.target)
        texts = [ids[mask.bool()] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"])]
        entries = self._cache.read(texts)
        if missing := [i for i, entry in enumerate(entries) if entry is None]:
            asked = [texts[i] for i in missing]
            answer = self._ask_target({name: tensor[missing] for name, tensor in inputs.items()})
            for i, entry in zip(missing, self._cache.write(asked, answer)):
                entries[i] = entry
        kept = {name: pad_sequence([entry[name] for entry in entries], batch_first=True) for name in STORED_AS}
        return {
            "features": kept["features"].to(drafter.device, drafter.dtype),
            "target_log_probs": kept["target_log_probs"].to(drafter.device),
            "target_choice": kept["target_choice"].to(drafter.device, torch.long),
        }

    def _ask_target(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        drafter = self.drafter
        with TargetTaps(self.target, drafter.config.target_layer_ids) as taps:
            logits = self.target(inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits
            features = taps.take(drafter.device, drafter.dtype)
        normaliser = torch.stack([row.float().logsumexp(-1, keepdim=True) for row in logits])
        ids = drafter.draft_token_ids
        draft_logits = logits if ids is None else logits[..., ids.to(logits.device)]
        return {
            "features": features,
            "target_log_probs": (draft_logits.float() - normaliser).to(drafter.device),
            "target_choice": logits.argmax(-1).to(drafter.device),
        }

    def create_optimizer(self, model=None):
        """As the Trainer's, with a higher rate for what starts near zero and moves one logit at a time."""
        fast: list[torch.nn.Parameter] = []
        slow: list[torch.nn.Parameter] = []
        for name, parameter in self.drafter.named_parameters():
            if parameter.requires_grad:
                (fast if name.startswith(("markov_head.", "copy_head.")) or name == "norm.weight" else slow).append(
                    parameter
                )
        optimizer, arguments = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        groups = [
            {"params": slow, "weight_decay": self.args.weight_decay},
            {"params": fast, "weight_decay": 0.0, "lr": FAST * self.args.learning_rate},
        ]
        self.optimizer = optimizer(groups, **arguments)
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        progress = self.state.global_step / max(self.state.max_steps, 1)
        self.model.cross_entropy_weight = max(0.1, 1 - 1.8 * progress)
        output: DSparkLoss = model(**inputs, **self.target_inputs(inputs))
        return (output.loss, output) if return_outputs else output.loss

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """Loss and estimated acceptance lengths on held-out rows, with the same anchors every time."""
        self.model.eval()
        outputs: list[DSparkLoss] = []
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for inputs in self.get_eval_dataloader(eval_dataset):
                inputs = self._prepare_inputs(inputs)
                outputs.append(self.compute_loss(self.model, inputs, return_outputs=True)[1])
        self.model.train()
        metrics = {
            f"{metric_key_prefix}_{name}": torch.stack([output[name] for output in outputs]).nanmean().item()
            for name in ("loss", "total_variation", "acceptance_length", "greedy_acceptance_length")
        }
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
