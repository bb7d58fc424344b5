"""The paper's training objective: cross-entropy, total variation and confidence on blocks packed in one forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from ..backbone.attention_mask import attention_masks
from ..modeling_dspark import DSparkModel


@dataclass
class DSparkLoss(ModelOutput):
    """
    Args:
        loss: the objective.
        cross_entropy, total_variation, confidence: its three terms, means over blocks of the weighted slots. Slots
            behind the end of a text count as 0, so that every block weighs the same in whatever batch it comes, and
            the mean over processes or accumulated batches is that of one large batch.
        acceptance: mean probability per slot that a sampled draft token is accepted given its prefix, (γ,).
        acceptance_length: tokens per target forward that this makes, sampled at temperature 1 (teacher-forced).
        greedy_acceptance_length: the same for greedy drafts and verification.
    """

    loss: torch.Tensor | None = None
    cross_entropy: torch.Tensor | None = None
    total_variation: torch.Tensor | None = None
    confidence: torch.Tensor | None = None
    acceptance: torch.Tensor | None = None
    acceptance_length: torch.Tensor | None = None
    greedy_acceptance_length: torch.Tensor | None = None


def sample_anchors(lengths: torch.Tensor, starts: torch.Tensor, num_anchors: int) -> torch.Tensor:
    """
    Anchor positions (R, num_anchors), drawn from where the answer starts to length - 2: as in generation, each has a
    context and is a token of the answer, and a next token follows.
    """
    last = (lengths - 2).clamp(min=1).unsqueeze(-1)
    first = starts.clamp(min=1).unsqueeze(-1).minimum(last)
    return first + (torch.rand(len(lengths), num_anchors, device=lengths.device) * (last - first + 1)).long()


def packed_positions(anchors: torch.Tensor, block_size: int, context_length: int) -> torch.Tensor:
    """Positions (R, T + N * B) of the context followed by all blocks."""
    blocks = anchors.unsqueeze(-1) + torch.arange(block_size, device=anchors.device)
    context = torch.arange(context_length, device=anchors.device).expand(len(anchors), -1)
    return torch.cat([context, blocks.flatten(1)], dim=1)


class DSparkObjective(nn.Module):
    """
    `L = w · CE + (1 - w) · TV + BCE(c, 1 - TV)` with slots weighted by `exp(-(k - 1) / position_decay)`.

    The paper's w is 0.1. CE is taken with the target's whole distribution, which says more than the one token that was
    drawn from it: `-Σ p log q`. The confidence term trains the confidence head alone.

    Args:
        drafter: the drafter to train, bound to its target.
        num_anchors: blocks per sequence and step.
        position_decay: γ_decay; the larger, the more the late slots count (default: half of the block's drafts).
        chunk_size: rows of vocabulary-sized logits in memory at a time.

    Raises:
        ValueError: the drafter has a candidate selector.
    """

    def __init__(
        self,
        drafter: DSparkModel,
        num_anchors: int = 64,
        position_decay: float | None = None,
        chunk_size: int = 4096,
    ):
        if drafter.candidate_selector is not None:
            raise ValueError(
                "A drafter with a candidate selector cannot be trained here: its loss would be infinite wherever the "
                "target's token is no candidate. Train one with `selector_rank=0` and a Markov head."
            )
        super().__init__()
        self.drafter = drafter
        self.num_anchors = num_anchors
        self.position_decay = position_decay or drafter.config.num_draft_tokens / 2
        self.chunk_size = chunk_size
        self.cross_entropy_weight = 0.1

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        features: torch.Tensor,
        target_log_probs: torch.Tensor,
        target_choice: torch.Tensor,
        prompt_lengths: torch.Tensor | None = None,
        anchors: torch.Tensor | None = None,
    ) -> DSparkLoss:
        """
        Args:
            input_ids, attention_mask: right-padded sequences, (R, T).
            features: tapped hidden states of the target, (R, T, K * target_hidden_size).
            target_log_probs: log p of the draft vocabulary after each position, (R, T, V_d); p is normalised over V.
            target_choice: the target's greedy token after each position, in target ids, (R, T).
            prompt_lengths: where the answers start, (R,); 0 if absent.
            anchors: (R, N); drawn at random in the answers if absent.
        """
        config, length = self.drafter.config, input_ids.shape[1]
        lengths = attention_mask.sum(-1)
        if anchors is None:
            starts = torch.zeros_like(lengths) if prompt_lengths is None else prompt_lengths
            anchors = sample_anchors(lengths, starts, self.num_anchors)
        hidden = self._block_hidden(input_ids, features, anchors)  # (R, N, B, H)

        # Slot k knows the token at a + k and predicts the one after it; a + k runs over `places`.
        unused = config.block_size - config.num_draft_tokens
        places = anchors.unsqueeze(-1) + torch.arange(config.num_draft_tokens, device=anchors.device)
        valid = places + 1 < lengths[:, None, None]
        places = places.clamp(max=length - 1)
        rows = torch.arange(len(input_ids), device=anchors.device)[:, None, None].expand_as(places)

        embeddings = sequential = None
        if self.drafter.markov_head is not None:
            previous = input_ids[rows, places]
            if unused:  # a block that starts at slot 1 still steps an RNN through slot 0, with the anchor before it
                previous = torch.cat([previous[..., :1], previous], dim=-1)
            embeddings = self.drafter.markov_head.embed(previous)
            sequential = self.drafter.markov_head.unroll(embeddings, hidden)[..., unused:, :]
            embeddings = embeddings[..., unused:, :]
        hidden = hidden[..., unused:, :]

        copied = repeated = None
        if self.drafter.copy_head is not None:
            found = zip(*map(self.drafter.copy_head.find_all, input_ids))
            tokens, repeated = (torch.stack(of_texts)[rows, places] for of_texts in found)
            copied = self.drafter.draft_ids_of(tokens)

        keep = valid.flatten()
        per_row = self._chunked(
            hidden.flatten(0, 2)[keep],
            None if sequential is None else sequential.flatten(0, 2)[keep],
            None if copied is None else (copied.flatten()[keep], repeated.flatten()[keep]),
            target_log_probs,
            target_choice,
            rows.flatten()[keep],
            places.flatten()[keep],
        )
        cross_entropy, total_variation, matches = (
            torch.zeros_like(keep, dtype=torch.float32).masked_scatter(keep, term).view_as(valid) for term in per_row
        )

        slots = torch.arange(config.num_draft_tokens, device=anchors.device)
        weight = torch.exp(-slots / self.position_decay)
        weight = weight / weight.sum() * valid / anchors.numel()
        terms = {
            "cross_entropy": (weight * cross_entropy).sum(),
            "total_variation": (weight * total_variation).sum(),
        }
        share = self.cross_entropy_weight
        loss = share * terms["cross_entropy"] + (1 - share) * terms["total_variation"]
        if self.drafter.confidence_head is not None:
            logits = self.drafter.confidence_head(hidden.detach(), None if embeddings is None else embeddings.detach())
            if repeated is not None:
                logits = logits + self.drafter.copy_head.confidence(repeated)
            error = F.binary_cross_entropy_with_logits(logits, 1 - total_variation.detach(), reduction="none")
            terms["confidence"] = (weight * error).sum()
            loss = loss + terms["confidence"]

        whole = valid.all(-1)  # blocks that no sequence end cuts short
        accepted = (1 - total_variation.detach())[whole]
        return DSparkLoss(
            loss=loss,
            acceptance=accepted.mean(0),
            acceptance_length=1 + accepted.cumprod(-1).sum(-1).mean(),
            greedy_acceptance_length=1 + matches[whole].cumprod(-1).sum(-1).mean(),
            **{name: term.detach() for name, term in terms.items()},
        )

    def _block_hidden(self, input_ids: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        block_size, length = self.drafter.config.block_size, input_ids.shape[1]
        tokens = input_ids.gather(1, anchors).unsqueeze(-1)
        positions = packed_positions(anchors, block_size, length)
        masks = attention_masks(
            self.drafter.attention_patterns,
            block_positions=positions[:, length:],
            context_positions=positions[:, :length],
            block_size=block_size,
            dtype=features.dtype,
        )
        hidden = self.drafter(
            self.drafter.block_ids(tokens).flatten(1),
            features,
            position_ids=positions,
            attention_mask=masks,
        ).last_hidden_state
        return hidden.unflatten(1, (-1, block_size))

    def _chunked(self, hidden, sequential, copies, target_log_probs, target_choice, rows, places):
        chunks = []
        for start in range(0, len(hidden), self.chunk_size):
            part = slice(start, start + self.chunk_size)
            arguments = (
                hidden[part],
                None if sequential is None else sequential[part],
                None if copies is None else tuple(of_rows[part] for of_rows in copies),
                target_log_probs,
                target_choice,
                rows[part],
                places[part],
            )
            if torch.is_grad_enabled() and len(hidden) > self.chunk_size:
                chunks.append(checkpoint(self._row_terms, *arguments, use_reentrant=False))
            else:
                chunks.append(self._row_terms(*arguments))
        if not chunks:
            empty = hidden.new_zeros(0, dtype=torch.float32)
            return empty, empty, empty
        return (torch.cat(term) for term in zip(*chunks))

    def _row_terms(self, hidden, sequential, copies, target_log_probs, target_choice, rows, places):
        """Cross-entropy, total variation and greedy agreement of each row, (rows,) each."""
        logits = self.drafter.base_logits(hidden)
        if sequential is not None:
            logits = self.drafter.markov_head.logits(logits, sequential)
        if copies is not None:
            logits = self.drafter.copy_head.logits(logits, *copies)
        log_q = logits.float().log_softmax(-1)
        p = target_log_probs[rows, places].float().exp()
        cross_entropy = -(p * log_q).sum(-1)
        # 1 - Σ min(p, q): the part of p outside a pruned draft vocabulary is missed whatever q is.
        total_variation = 1 - torch.minimum(log_q.exp(), p).sum(-1)
        choice = self.drafter.target_ids_of(log_q.argmax(-1))
        return cross_entropy, total_variation, (choice == target_choice[rows, places]).float()
