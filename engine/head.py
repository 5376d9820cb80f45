"""Logits of a step's positions that are named only when its layers have run: a few at a time, whatever their number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..transfer.errors import UnsupportedModel


class Head:
    """The way from the last layer to the logits, which transformers offers no call for.

    A causal model's `forward` runs its decoder and then what makes logits of the hidden states (projection, soft cap,
    scaling). The decoder's output of a step is kept, and `forward` runs again over a decoder that just gives it back.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        """Raises UnsupportedModel."""
        self._module = module
        self._decoder = decoder_of(module)
        self._input_ids: Tensor | None = None
        self._output: Any = None  # whatever the decoder returns; its own model's forward is all that looks into it

    @contextmanager
    def keeping(self, input_ids: Tensor) -> Iterator[None]:  # [1, num_tokens]
        """Keep what the decoder returns for `input_ids` inside the block, until `drop` or the next such block."""
        self.drop()
        handle = self._decoder.register_forward_hook(self._keep)
        try:
            yield
        finally:
            handle.remove()
        self._input_ids = input_ids

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self._output = output

    def drop(self) -> None:
        self._input_ids = self._output = None

    @torch.inference_mode()
    def logits(self, rows: Sequence[int]) -> Tensor:  # [rows, vocab] float32
        """The logits after these tokens (by their place in the flattened batch) of the step that was kept."""
        assert self._input_ids is not None, "no step was kept"
        output = self._output
        self._decoder.forward = lambda *args, **kwargs: output  # in front of the class's own
        try:
            again = self._module(
                input_ids=self._input_ids,
                use_cache=False,
                logits_to_keep=torch.tensor(rows, dtype=torch.int64, device=self._input_ids.device),
            )
        finally:
            del self._decoder.forward
        logits: Tensor = again.logits[0]
        return logits.float()


def decoder_of(module: PreTrainedModel) -> nn.Module:
    """The part of a causal model that holds its input embeddings, and so its layers."""
    embeddings = module.get_input_embeddings()
    for child in module.children():
        if any(part is embeddings for part in child.modules()):
            return child
    raise UnsupportedModel(f"{type(module).__name__}: its layers and its head cannot be told apart")
