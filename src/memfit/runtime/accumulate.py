"""Adds gradients to `.grad` inside the backward pass, each when it is made.

Autograd adds the gradients that a graph returns after all of it has run, so over several micro-batches a planned stage
would hold every gradient twice. Here the graph adds each one itself and returns none.

The first gradient is that of `torch::autograd::AccumulateGrad`, bit for bit: it is taken as it is if it has the
parameter's layout and memory of its own, else copied. Later ones are added in place, where possible by the op that
makes them (`memfit.capture.adding`); a sum over several micro-batches is then rounded otherwise than autograd's.

Parameters with hooks on their gradient are left to autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.capture.adding import ADDING

__all__ = ["Accumulation", "accumulation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """What adds to the gradient of one parameter.

    Attributes:
        add: takes a gradient.
        add_made_by: of a call like this one, what takes its operands and adds its result, laid out like the parameter.
    """

    add: Callable[[torch.Tensor], None]
    add_made_by: Callable[[Any], Callable[..., None]]


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

    def add_made_by(target: Callable[..., torch.Tensor]) -> Callable[..., None]:
        add_result = ADDING[target]

        def made(*operands: Any) -> None:
            if parameter.grad is not None:
                add_result(parameter.grad, *operands)
            else:
                add(target(*operands))

        return made

    return Accumulation(add=add, add_made_by=add_made_by)
