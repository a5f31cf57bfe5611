"""Outputs the loss does not use: cut from the gradient, and loud if one arrives after all.

AOTAutograd feeds a differentiable output that receives no gradient with zeros: for the logits of a language
model that returns its own loss this is the largest tensor of the step. The plan cuts such outputs. Should
the training loop differentiate one after all, the gradient would silently be missing; this makes it an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfit.errors import PlanMismatchError

__all__ = ["refuse_gradient"]


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not any(g is not None and bool(g.any()) for g in gradients):
            return None, None  # what wraps the module may send zeros to every output, as DDP does
        raise PlanMismatchError(
            "a gradient arrived for an output that the loss given to memfit does not use; "
            "pass the loss you really use, memfit.fit(..., loss_fn=...)"
        )


def refuse_gradient(call: Callable[..., Any], positions: Sequence[int]) -> Callable[..., Any]:
    """Wraps a compiled graph so that differentiating the outputs at `positions` raises `PlanMismatchError`."""

    def run(*args: Any) -> tuple[Any, ...]:
        outputs = list(call(*args))
        anchor = torch.empty(0, requires_grad=True)
        for position in positions:
            outputs[position] = _Refuse.apply(outputs[position], anchor)
        return tuple(outputs)

    return run
