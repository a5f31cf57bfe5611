"""The optimizer inside what users hand over: wrappers delegate to it, and a number stands for one.

accelerate's `AcceleratedOptimizer`, Lightning's `LightningOptimizer`, torch's `PostLocalSGDOptimizer` and the like show
the state and the parameter groups of the optimizer that they hold, some through properties whose setters write into it.
They are known by that alone: the state and the groups of what they hold are their own, the same objects. A wrapper
with state of its own (Lookahead, SAM) is an optimizer by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, cast

import torch

from memfit.errors import SpecError
from memfit.units import parse_bytes

__all__ = [
    "OptimizerLike",
    "check_optimizer",
    "inner_optimizers",
    "is_optimizer",
    "stated_bytes",
    "steppable",
    "unwrapped_optimizer",
]

OptimizerLike = torch.optim.Optimizer | int | str
"""An optimizer, or the bytes of its state: an integer or a string such as `"1.5GiB"`."""


def check_optimizer(given: object) -> None:
    """Refuses what is neither an optimizer nor an amount of memory.

    Raises:
        SpecError: saying what is taken.
    """
    if given is None or is_optimizer(unwrapped_optimizer(given)):
        return
    stated_bytes(given)


def stated_bytes(given: object) -> int:
    """The bytes that a number or a string states.

    Raises:
        SpecError: if it is neither.
    """
    if isinstance(given, int) and not isinstance(given, bool) and given == 0:
        return 0
    try:
        if isinstance(given, int | str):
            return parse_bytes(given)
    except SpecError:
        pass
    what = repr(given) if isinstance(given, int | float | str) else type(given).__name__
    raise SpecError(
        "optimizer must be an optimizer that has parameter groups, or the bytes that its state will take, such as "
        f"'1.5GiB' (optimizer: {what}); of schedulers, gradient scalers and lists pass the optimizer itself"
    )


def steppable(given: object) -> torch.optim.Optimizer | None:
    """The optimizer if it is one that can be stepped; None for a number or nothing."""
    return cast(torch.optim.Optimizer, given) if is_optimizer(given) else None


def is_optimizer(thing: object) -> bool:
    """Whether something has parameter groups, state and a step, as an optimizer has."""
    if isinstance(thing, type | torch.nn.Module):
        return False
    groups = getattr(thing, "param_groups", None)
    return isinstance(groups, list) and hasattr(thing, "state") and callable(getattr(thing, "step", None))


def unwrapped_optimizer(given: Any) -> Any:
    """The optimizer that holds the state, behind any number of wrappers; what is none comes back as it is."""
    seen: set[int] = set()
    while id(given) not in seen:
        seen.add(id(given))
        given = next((inner for _, inner in inner_optimizers(given) if _shows(given, inner)), given)
    return given


def inner_optimizers(optimizer: object) -> Iterator[tuple[str, Any]]:
    """The optimizers among an object's attributes, by name."""
    for name, value in list(getattr(optimizer, "__dict__", {}).items()):
        if value is not optimizer and is_optimizer(value):
            yield name, value


def _shows(wrapper: Any, inner: Any) -> bool:
    """Whether a wrapper shows the inner optimizer's state as its own, or shows none."""
    if not is_optimizer(wrapper):
        # A wrapper that hides the groups; a scheduler or a module holds an optimizer too, and stands for none.
        is_other = isinstance(wrapper, torch.nn.Module | torch.optim.lr_scheduler.LRScheduler)
        return not is_other and callable(getattr(wrapper, "step", None)) and hasattr(wrapper, "zero_grad")
    if wrapper.state is inner.state and wrapper.param_groups is inner.param_groups:
        return True
    # Each process steps the optimizer of its own part of the parameters.
    sharded = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    return sharded is not None and isinstance(wrapper, sharded)
