"""What the target says of the training text, kept on disk: only the first epoch has to ask it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ..files import written_together
from ..modeling_dspark import DSparkModel

STORED_AS = {"features": torch.bfloat16, "target_log_probs": torch.float16, "target_choice": torch.int32}


class TargetCache:
    """
    Features, log-probabilities and choices of the target, one file per text; a text is known by its token ids.

    A token takes two bytes for each tapped number and each token of the draft vocabulary (22 kB with five taps of 576
    and 8,192 tokens).

    Args:
        folder: where the files are, in a folder for each target, choice of taps and draft vocabulary.
        drafter: the drafter that is trained.
        target: its target.
    """

    def __init__(self, folder: str | os.PathLike, drafter: DSparkModel, target: PreTrainedModel):
        about = hashlib.sha256(f"{target.config.to_json_string()}{drafter.config.target_layer_ids}".encode())
        if (ids := drafter.draft_token_ids) is not None:
            about.update(ids.cpu().numpy().tobytes())
        self.folder = Path(folder) / about.hexdigest()[:16]

    @staticmethod
    def _name(text: torch.Tensor) -> str:
        return f"{hashlib.sha256(text.cpu().numpy().tobytes()).hexdigest()[:32]}.safetensors"

    def read(self, texts: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor] | None]:
        """Tensors (T, ...) of each text, in the types that they are kept in; `None` for a text that is missing."""
        files = [self.folder / self._name(text) for text in texts]
        return [load_file(file) if file.exists() else None for file in files]

    def write(self, texts: Sequence[torch.Tensor], tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Keep `tensors` (R, T, ...) of the texts; returns what [`read`] will."""
        entries = [
            {name: tensors[name][i, : len(text)].to("cpu", dtype).contiguous() for name, dtype in STORED_AS.items()}
            for i, text in enumerate(texts)
        ]
        with written_together(self.folder) as scratch:
            for text, entry in zip(texts, entries):
                save_file(entry, scratch / self._name(text))
        return entries
