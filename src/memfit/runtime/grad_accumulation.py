"""Adds gradients to `.grad` inside the backward pass, each as soon as it is computed.

Autograd adds the gradients that a graph returns only after the whole graph has run, so over several micro-batches a
planned stage would hold every gradient twice. Here the graph adds each gradient itself and returns none.

The first gradient is taken as `torch::autograd::AccumulateGrad` does: without a copy if it has the parameter's layout
and memory of its own, else copied. Later gradients are added in place. If the op that computes a gradient can add its
result to the existing gradient (`memfit.ops.accumulation`), the op does so, and the sum over several micro-batches is
rounded differently from autograd's.

Parameters with hooks on their gradient are left to autograd.

Known limits: where the layout of the caller's gradient differs from that of the parameter, a convolution's weight
gradient is computed before it is added; that memory is not planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.ops.accumulation import adding

__all__ = ["Accumulation", "accumulation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """Functions that add to the gradient of one parameter.

    Attributes:
        add: takes a gradient.
        add_made_by: takes a call target; returns a function that takes the operands of such a call and adds its result,
            in the layout of the parameter.
    """

    add: Callable[[torch.Tensor], None]
    add_made_by: Callable[[Any], Callable[..., None]]


def accumulation(parameter: nn.Parameter) -> Accumulation:
    """Makes the functions that add to the gradient of one parameter."""

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
        add_result = adding(target)

        def made(*operands: Any) -> None:
            if parameter.grad is not None:
                add_result(parameter.grad, *operands)
                return
            gradient = torch.empty_like(parameter)
            add_result(gradient, *operands, beta=0)
            parameter.grad = gradient

        return made

    return Accumulation(add=add, add_made_by=add_made_by)
