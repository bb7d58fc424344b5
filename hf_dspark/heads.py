"""Small heads on the backbone: sequential (Markov, gated Markov, RNN, candidate selector), copy and confidence."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .configuration_dspark import DSparkConfig


class MarkovHead(nn.Module):
    """
    Sequential head: a low-rank bias `B_k = W2 · f_k` on the logits of slot k that knows the token before it.

    The vanilla head has `f_k = e = W1[x_{k-1}]`. `W1` is indexed by target token ids, `W2` gives draft token ids.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        """e = W1[x_{k-1}] of shape (..., rank) for the target ids (...) of the tokens before the slots."""
        return self.markov_w1(previous)

    def initial_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """s_0 of shape (..., rank) for hidden states of shape (..., hidden_size); only the RNN head evolves it."""
        return hidden.new_zeros(*hidden.shape[:-1], self.markov_w2.in_features)

    def step(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(f_k, s_k) from e = W1[x_{k-1}], h_k and s_{k-1}; any leading dimensions."""
        return embedding, state

    def logits(self, base_logits: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        """U_k + B_k, the logits (..., V_d) of slots with base logits (..., V_d) and f_k (..., rank)."""
        return base_logits + self.markov_w2(feature)

    def unroll(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """f for all slots at once, given all previous tokens: embeddings (..., γ, rank), hidden (..., γ, H)."""
        state, features = self.initial_state(hidden[..., 0, :]), []
        for embedding, row in zip(embeddings.unbind(-2), hidden.unbind(-2)):
            feature, state = self.step(embedding, row, state)
            features.append(feature)
        return torch.stack(features, dim=-2)


class GatedMarkovHead(MarkovHead):
    """`f_k = σ(G[h_k; e]) · e`: the hidden state decides how much of the transition to trust."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def step(self, embedding, hidden, state):
        gate = self.gate_proj(torch.cat([hidden, embedding], dim=-1)).sigmoid()
        return gate * embedding, state


class RNNHead(MarkovHead):
    """`(g, c, o) = J[s; e; h_k]`, `s' = σ(g)·s + (1 - σ(g))·tanh(c)`, `f_k = tanh(o)`: it knows the whole prefix."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(config.hidden_size + 2 * config.markov_rank, 3 * config.markov_rank)

    def step(self, embedding, hidden, state):
        gate, candidate, output = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()


class CandidateSelector(nn.Module):
    """
    DFlash2's sequential head: `U_k[b] + S[b] · (P[x_{k-1}] ⊙ G h_k)` for the few most likely tokens b of the slot, no
    others.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.top_k = config.selector_top_k
        shape = config.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.randn(shape) * config.initializer_range)
        self.successor_codebook = nn.Parameter(torch.randn(shape) * config.initializer_range)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        """P[x_{k-1}] of shape (..., rank) for the target ids (...) of the tokens before the slots."""
        return self.predecessor_codebook[previous]

    def initial_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """An empty one, (..., 0): the token before is all that it knows of the block."""
        return hidden[..., :0]

    def step(
        self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """f_k = P[x_{k-1}] ⊙ G h_k (..., rank), from P[x_{k-1}] and h_k; any leading dimensions."""
        return embedding * self.hidden_projection(hidden), state

    def logits(self, base_logits: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        """The candidates' logits in (..., V), all others -inf, from base logits (..., V) and f_k (..., rank)."""
        unary, candidates = base_logits.topk(self.top_k, dim=-1)
        scores = unary + (self.successor_codebook[candidates] @ feature.unsqueeze(-1)).squeeze(-1)
        return torch.full_like(base_logits, -torch.inf).scatter(-1, candidates, scores)


SEQUENTIAL_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNHead}


class CopyHead(nn.Module):
    """
    Where the text ends with n tokens that it has had before, the token that came next then gets the bias
    `strength[n - 1]`, and the confidence in this slot the logit `certainty[n - 1]`.

    Of all repetitions the longest counts, up to `copy_ngram_size` tokens, and of these the latest. Like a sequential
    head it goes by the tokens before a slot alone. A new one trusts repetitions, and long ones more.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.strength = nn.Parameter(1 + 1.5 * torch.arange(1, config.copy_ngram_size + 1))
        self.certainty = nn.Parameter(torch.zeros(config.copy_ngram_size))

    def find(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        What may come after texts (R, T), aligned to the right with -1 before them: the token that came next the last
        time, (R,), and how many tokens have been repeated, (R,); 0 where nothing has.
        """
        longest = len(self.strength)
        ends = F.pad(text, (longest - 1, 0), value=-1).unfold(1, longest, 1)  # the last tokens up to each place
        same = ends[:, :-1] == ends[:, -1:]
        if not same.shape[1]:
            return text[:, -1], torch.zeros_like(text[:, -1])
        lengths = same.flip(-1).cumprod(-1, dtype=torch.uint8).sum(-1)
        places = torch.arange(lengths.shape[1], device=text.device)
        place = (lengths * lengths.shape[1] + places).argmax(-1, keepdim=True)
        return text.gather(-1, place + 1)[:, 0], lengths.gather(-1, place)[:, 0]

    def find_all(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What [`find`] says behind every token of one text (T,), from what stands before it: (T,) each."""
        return self.find(F.pad(text, (len(text) - 1, 0), value=-1).unfold(0, len(text), 1))

    def logits(self, logits: torch.Tensor, draft_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Logits (..., V_d) with the bias on the tokens `draft_ids` (...), of which -1 is none."""
        bias = F.pad(self.strength, (1, 0))[lengths] * (draft_ids >= 0)
        return logits.scatter_add(-1, draft_ids.clamp(min=0).unsqueeze(-1), bias.to(logits).unsqueeze(-1))

    def confidence(self, lengths: torch.Tensor) -> torch.Tensor:
        """What the logit of c_k gains, (...) in float32."""
        return F.pad(self.certainty, (1, 0))[lengths].float()


class ConfidenceHead(nn.Module):
    """Logit of c_k, the probability that x_k is accepted given that all before it were: `w·[h_k; e] + b`."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov and config.markov_rank > 0
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        """hidden (..., H), embedding of the token before (..., rank) or `None`; returns logits (...) in float32."""
        features = torch.cat([hidden, embedding], dim=-1) if self.with_markov else hidden
        return self.proj(features).squeeze(-1).float()
