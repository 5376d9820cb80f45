"""Modules of a transformers model replaced by ones on the kernels in C; weights are shared, never copied."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.library import native
from ..kernels.linear import linear


class NativeLinear(nn.Linear):
    """`nn.Linear` by our kernels, over the very parameters of the module it replaces (so tied ones stay tied)."""

    def __init__(self, original: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = original.in_features, original.out_features
        self.weight, self.bias = original.weight, original.bias
        self.train(original.training)

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def fuse(module: PreTrainedModel) -> None:
    """Replace what the kernels do better; nothing where they cannot run: not float32, not the CPU, no compiler."""
    if module.dtype != torch.float32 or module.device.type != "cpu" or native() is None:
        return
    plain = [(name, child) for name, child in module.named_modules() if type(child) is nn.Linear]
    for name, child in plain:
        module.set_submodule(name, NativeLinear(child))
