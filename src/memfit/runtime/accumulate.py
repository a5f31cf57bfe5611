"""Adds gradients to `.grad` inside the backward pass, each when it is made.

Autograd adds the gradients that a graph returns after all of it has run, so over several micro-batches a planned stage
would hold every gradient twice. Here the graph adds each one itself and returns none.

The first gradient is that of `torch::autograd::AccumulateGrad`, bit for bit: it is taken as it is if it has the
parameter's layout and memory of its own, else copied; later ones are added in place. A gradient that is a product of
matrices, as that of every linear layer's weight, is added by the multiplication itself (BLAS's `beta`): it needs no
memory of its own, and is not written and read once more. So the sum over several micro-batches is rounded otherwise.

Parameters with hooks on their gradient are left to autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Accumulation", "accumulation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """What adds to the gradient of one parameter.

    Attributes:
        add: takes a gradient.
        add_product: takes two matrices, whose product is one that is laid out like the parameter.
    """

    add: Callable[[torch.Tensor], None]
    add_product: Callable[[torch.Tensor, torch.Tensor], None]


def accumulation(parameter: nn.Parameter) -> Accumulation:
    """What adds to one parameter's gradient."""

    def add(gradient: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.add_(gradient)
            return
        whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
        if whole and gradient.stride() == parameter.stride():
            parameter.grad = gradient.detach()
        else:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)

    def add_product(left: torch.Tensor, right: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.addmm_(left, right)
        else:
            add(torch.mm(left, right))

    return Accumulation(add=add, add_product=add_product)
