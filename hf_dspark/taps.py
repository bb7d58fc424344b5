"""The target's hidden states that the drafter reads, taken as the target's own forward passes produce them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import nn
from transformers import PreTrainedModel


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """
    The decoder layers of a causal language model, in order.

    Raises:
        ValueError: they are not where transformers models keep them.
    """
    decoder = target.get_decoder()
    for module in (decoder, getattr(decoder, "decoder", None), target.base_model):
        for name in ("layers", "h", "blocks"):
            if isinstance(layers := getattr(module, name, None), nn.ModuleList):
                return layers
    raise ValueError(f"Cannot find the decoder layers of {type(target).__name__}, which a DSpark drafter reads.")


def last_logits_only(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """
    Arguments of a forward pass that gives the logits of the last position alone, and still runs all rows through all
    layers: told a number of positions, a Gemma4 takes the others out before the layers that reuse keys and values.
    """
    return {"logits_to_keep": torch.tensor([-1])} if target._supports_logits_to_keep() else {}


class TargetTaps:
    """
    Context manager that records the tapped hidden states of every forward pass of the target.

    Layer `i` means the output of decoder layer `i`, -1 the input of the first. Hooks on the layers themselves give
    these before any final norm, hold nothing but the tapped layers, and mean the same in every transformers release.
    Passes that other threads run on the same model meanwhile are not recorded.

    Args:
        target: a decoder-only causal language model.
        layer_ids: the tapped layers, in the order in which they are concatenated.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int]):
        self._layers = decoder_layers(target)
        self._layer_ids = layer_ids
        self._passes: dict[int, list[torch.Tensor]] = {layer_id: [] for layer_id in layer_ids}
        self._handles: list = []
        self._thread = threading.get_ident()

    def __enter__(self) -> TargetTaps:
        for layer_id in self._layer_ids:
            if layer_id < 0:
                hook = self._layers[0].register_forward_pre_hook(self._record_input, with_kwargs=True)
            else:
                hook = self._layers[layer_id].register_forward_hook(self._recorder(layer_id))
            self._handles.append(hook)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.discard()

    def _record_input(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if threading.get_ident() == self._thread:
            self._passes[-1].append(args[0] if args else kwargs["hidden_states"])

    def _recorder(self, layer_id: int):
        def record(module: nn.Module, args: tuple, output) -> None:
            if threading.get_ident() == self._thread:
                self._passes[layer_id].append(output[0] if isinstance(output, tuple) else output)

        return record

    def discard(self) -> None:
        """Drop what was recorded."""
        for recorded in self._passes.values():
            recorded.clear()

    def take(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """
        The features (R, rows, K * hidden_size) of all passes since the last call, in order of position.

        Raises:
            RuntimeError: a tapped layer did not run (for example in a forward compiled before this was entered).
        """
        if any(len(recorded) != len(self._passes[self._layer_ids[0]]) for recorded in self._passes.values()):
            raise RuntimeError("Some tapped layers did not report; was the target's forward compiled by hand?")
        if not self._passes[self._layer_ids[0]]:
            raise RuntimeError("The tapped layers did not report; was the target's forward compiled by hand?")
        features = torch.cat(
            [torch.cat([rows.to(device, dtype) for rows in self._passes[i]], dim=1) for i in self._layer_ids], dim=-1
        )
        self.discard()
        return features
