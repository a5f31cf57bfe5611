"""State of a module that a plan depends on and that may change from call to call: existing gradients, and hooks.

One walk over the modules reads both, since the walk runs at every call. A hook is identified by its place, its kind
and its code, so a loop that registers the same hooks anew in each step is planned once; Dynamo's guards watch the
variables in a hook's closure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as nn_module

__all__ = ["ModuleState", "module_state"]

_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleState:
    """State of a module, found in one walk over it.

    Attributes:
        accumulating: whether a parameter has a gradient.
        trains: whether a parameter needs a gradient.
        substituted: whether plain tensors stand where parameters were (`torch.func.functional_call`).
        hooks: the modules' hooks, by the place of the module, kind and code; empty without any.
    """

    accumulating: bool
    trains: bool
    substituted: bool
    hooks: tuple[Any, ...]


def module_state(model: nn.Module) -> ModuleState:
    """Reads the state of all parameters and hooks of a module."""
    accumulating = trains = substituted = False
    hooks: list[Any] = [
        (name, *map(_known_by, there.values())) for name in _GLOBAL_HOOKS if (there := getattr(nn_module, name, None))
    ]
    seen: set[int] = set()
    waiting: list[nn.Module] = [model]
    while waiting:
        here = waiting.pop()
        if id(here) in seen:
            continue
        seen.add(id(here))
        if here._forward_hooks or here._forward_pre_hooks or here._backward_hooks or here._backward_pre_hooks:
            hooks.append((len(seen), *(tuple(map(_known_by, getattr(here, name).values())) for name in _HOOKS)))
        parameters: dict[str, Any] = here._parameters
        for parameter in parameters.values():
            if parameter is None:
                continue
            if type(parameter) is not nn.Parameter and not isinstance(parameter, nn.Parameter):
                substituted = True
                continue
            trains = trains or parameter.requires_grad
            accumulating = accumulating or parameter.grad is not None
        waiting += [child for child in here._modules.values() if child is not None]
    return ModuleState(accumulating=accumulating, trains=trains, substituted=substituted, hooks=tuple(hooks))


def _known_by(hook: Any) -> Any:
    """Key that two hooks share if they do the same: their code, or the type of a callable object."""
    function = getattr(hook, "__func__", hook)
    return getattr(function, "__code__", None) or type(hook)
