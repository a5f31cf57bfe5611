"""A loss of an output and a target, as `torch.nn.functional.cross_entropy` is, for planners that give the output only.

With a target of the example batch, the loss is planned with it. Without one, memfit cannot know it before the loop
computes it, so the loss stays outside of the model, and gradients are taken to arrive as for a model without `loss_fn`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from memfit.capture.loss.reading import LossFunction
from memfit.errors import SpecError

__all__ = ["loss_of_output", "takes_target"]


def loss_of_output(loss_fn: Callable[..., torch.Tensor] | None, target: Any) -> LossFunction | None:
    """The loss as a function of the output alone; None if it needs a target that is not given.

    Raises:
        SpecError: if a target is given for a loss that takes none.
    """
    if loss_fn is None and target is None:
        return None
    if loss_fn is None or (target is not None and not takes_target(loss_fn)):
        name = "no loss_fn" if loss_fn is None else getattr(loss_fn, "__qualname__", type(loss_fn).__name__)
        raise SpecError(
            f"a target is for a loss_fn that takes (output, target) (loss_fn: {name}); pass such a loss_fn, or leave "
            "the target out"
        )
    if not takes_target(loss_fn):
        return loss_fn
    if target is None:
        return None

    @functools.wraps(loss_fn, updated=())
    def loss(output: Any) -> torch.Tensor:
        return loss_fn(output, target)

    return loss


def takes_target(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss needs two arguments, an output and a target."""
    call = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # of built-in code
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters) == 2
