"""The optimizer inside the object that users pass: wrappers delegate to an optimizer, and a number stands for one.

accelerate's `AcceleratedOptimizer`, Lightning's `LightningOptimizer`, torch's `PostLocalSGDOptimizer` and similar
wrappers expose the state and the parameter groups of the optimizer that they hold, some through properties whose
setters write into that optimizer. These wrappers are recognized by this alone: their state and groups are the same
objects as those of the held optimizer. A wrapper with its own state (Lookahead, SAM) counts as an optimizer.
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
    """Refuses a value that is neither an optimizer nor an amount of memory.

    Raises:
        SpecError: names the accepted values.
    """
    if given is None or is_optimizer(unwrapped_optimizer(given)):
        return
    stated_bytes(given)


def stated_bytes(given: object) -> int:
    """The bytes that a number or a string states.

    Raises:
        SpecError: if the value is neither a number of bytes nor such a string.
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
    """The optimizer if it can be stepped; None for a number or None."""
    return cast(torch.optim.Optimizer, given) if is_optimizer(given) else None


def is_optimizer(thing: object) -> bool:
    """Whether an object has parameter groups, state and a step, as an optimizer has."""
    if isinstance(thing, type | torch.nn.Module):
        return False
    groups = getattr(thing, "param_groups", None)
    return isinstance(groups, list) and hasattr(thing, "state") and callable(getattr(thing, "step", None))


def unwrapped_optimizer(given: Any) -> Any:
    """The optimizer that holds the state, inside any number of wrappers; any other value is returned as it is."""
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
    """Whether a wrapper exposes the inner optimizer's state as its own, or exposes no state."""
    if not is_optimizer(wrapper):
        # A wrapper that hides the groups. A scheduler or a module holds an optimizer too, but is no wrapper of it.
        is_other = isinstance(wrapper, torch.nn.Module | torch.optim.lr_scheduler.LRScheduler)
        return not is_other and callable(getattr(wrapper, "step", None)) and hasattr(wrapper, "zero_grad")
    if wrapper.state is inner.state and wrapper.param_groups is inner.param_groups:
        return True
    # Each process steps the optimizer of its own part of the parameters.
    sharded = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    return sharded is not None and isinstance(wrapper, sharded)
