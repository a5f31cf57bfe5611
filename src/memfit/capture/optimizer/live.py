"""Finds the optimizers that train a module, for a caller who did not name one.

Torch keeps no list of optimizers, so the objects that Python's garbage collector knows are searched, about 0.1 seconds
for half a million of them. A wrapper of an optimizer counts once, together with the optimizer that it holds.

Known limits: optimizers that are no `torch.optim.Optimizer` are not found.
"""

from __future__ import annotations

import gc

from torch import nn
from torch.optim import Optimizer

from memfit.capture.optimizer.state import optimizer_cost
from memfit.capture.optimizer.unwrapped import OptimizerLike, unwrapped_optimizer

__all__ = ["live_optimizer"]


def live_optimizer(model: nn.Module, device: str) -> OptimizerLike | None:
    """The optimizer of a module's parameters; the bytes of all states where there are several, None without any.

    Args:
        model: the module.
        device: type of the device whose bytes count.
    """
    mine = {id(parameter) for parameter in model.parameters()}
    found: dict[int, Optimizer] = {}
    for one in gc.get_objects():
        if not issubclass(type(one), Optimizer) or not hasattr(one, "param_groups"):
            continue
        if any(id(parameter) in mine for group in one.param_groups for parameter in group["params"]):
            held = unwrapped_optimizer(one)
            found[id(held)] = held
    if len(found) == 1:
        return next(iter(found.values()))
    return sum(optimizer_cost(one, device).state_bytes for one in found.values()) or None
