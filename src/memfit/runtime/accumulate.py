"""Adds gradients to `.grad` inside the backward pass, each when it is made.

Autograd adds the gradients that a graph returns after all of it has run, so over several micro-batches a planned stage
would hold every gradient twice. Here the graph adds each one itself and returns none.

The result is that of `torch::autograd::AccumulateGrad`, bit for bit: the first gradient is taken as it is if it has the
parameter's layout and memory of its own, else copied; later ones are added in place. Parameters with hooks on their
gradient are left to autograd.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["accumulation"]


def accumulation(parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
    """What adds a gradient to one parameter's."""

    def accumulate(gradient: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.add_(gradient)
            return
        whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
        if whole and gradient.stride() == parameter.stride():
            parameter.grad = gradient.detach()
        else:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)

    return accumulate
