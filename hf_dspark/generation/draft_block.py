"""The slots of a draft block, left to right: what the heads say of each, once the token before it is known."""

from __future__ import annotations

import torch

from ..modeling_dspark import DSparkModel
from ..scheduling.calibration import Calibration
from .choice import top_2_margin


class DraftBlock:
    """
    One block for each of R rows. [`advance`] goes to the next slot; what is asked then is about this one.

    Args:
        drafter: the drafter, bound to the target.
        hidden: its final hidden states of the blocks, (R, B, hidden_size), or of the first rows alone.
        text: token ids up to and with the blocks' first ones, (R, T), aligned to the right with -1 before them; the
            last is enough for a drafter without copy head.
    """

    def __init__(self, drafter: DSparkModel, hidden: torch.Tensor, text: torch.Tensor):
        self.drafter, self._head = drafter, drafter.sequential_head
        self._text = text
        self._copied: torch.Tensor | None = None  # draft id of the token that a repetition goes on with
        self._repeated: torch.Tensor | None = None  # and how long that repetition is
        self._state: torch.Tensor | None = None
        self._embedding: torch.Tensor | None = None
        if self._head is not None:
            self._state = self._head.initial_state(hidden[:, 0])
            if not drafter.config.sample_from_anchor:  # slot 0 predicts nothing, but an RNN passes through it
                _, self._state = self._head.step(self._head.embed(text[:, -1]), hidden[:, 0], self._state)
        self._hidden = hidden[:, drafter.config.block_size - drafter.config.num_draft_tokens :]
        self._base_logits = drafter.base_logits(self._hidden)
        self._logits: torch.Tensor | None = None
        self._slot = -1

    def advance(self, previous: torch.Tensor) -> None:
        """Go to the next slot, behind the tokens `previous` (R,)."""
        self._slot, self._logits = self._slot + 1, None
        if self._head is not None:
            self._embedding = self._head.embed(previous)
        if self.drafter.copy_head is not None:
            if self._slot:
                self._text = torch.cat([self._text, previous[:, None]], dim=1)
            token, self._repeated = self.drafter.copy_head.find(self._text)
            self._copied = self.drafter.draft_ids_of(token)

    def read(self, calibration: Calibration, and_logit: bool = False) -> dict[str, torch.Tensor]:
        """
        What the calibration reads of the slot to tell c_k, by name, each (R,); none of it knows a token of this slot.
        The confidence head's logit comes in any case with `and_logit`.
        """
        head, known = self.drafter.confidence_head, {}
        if calibration.reads_logit or (and_logit and head is not None):
            known["logit"] = head(self._hidden[:, self._slot], self._embedding)
            if self._repeated is not None:
                known["logit"] = known["logit"] + self.drafter.copy_head.confidence(self._repeated)
        if calibration.reads_margin:
            known["margin"] = top_2_margin(self.logits())
        return known

    def logits(self) -> torch.Tensor:
        """The logits (R, V_d) of the slot, in float32."""
        if self._logits is None:
            logits = self._base_logits[:, self._slot]
            if self._head is not None:
                feature, self._state = self._head.step(self._embedding, self._hidden[:, self._slot], self._state)
                logits = self._head.logits(logits, feature)
            if self._repeated is not None:
                logits = self.drafter.copy_head.logits(logits, self._copied, self._repeated)
            self._logits = logits.float()
        return self._logits

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these of the rows only, by their numbers (R',)."""
        self._hidden, self._base_logits = self._hidden[rows], self._base_logits[rows]
        self._text = self._text[rows]
        for name in ("_state", "_embedding", "_logits", "_copied", "_repeated"):
            if (of_rows := getattr(self, name)) is not None:
                setattr(self, name, of_rows[rows])
