"""A fresh optimizer of the user's class over stand-in parameters, which is stepped in place of the user's optimizer.

The user's optimizer is never stepped, and never copied: a copy shares the objects that the optimizer holds, and setters
of a wrapper's copy reach the real optimizer. Instead, the class's own `__init__` makes a new optimizer, from groups
with the same options and stand-ins for the parameters; further arguments are found among the defaults and the plain
attributes. Inner optimizers (Lookahead, SAM) are made in the same way. While the new optimizer steps, hooks on every
optimizer's step are removed.

Known limits: an `__init__` that takes another argument, such as a model, is not called; then there is no fresh
optimizer. While hooks are removed, an optimizer that another thread steps runs without them too.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import optimizer as _torch_optimizer

from memfit.capture.optimizer.unwrapped import inner_optimizers
from memfit.torch_compat.core import pytree

__all__ = ["all_optimizers", "fresh_optimizer", "hooks_aside", "stepper", "steps_apart"]

_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_PLAIN = (type(None), bool, int, float, complex, str)
_MOST_STEPS_APART = 64


def fresh_optimizer(optimizer: Any, stand_ins: Mapping[int, torch.Tensor]) -> Any:
    """A new optimizer of the same class, groups and options.

    Args:
        optimizer: any optimizer; it is only read.
        stand_ins: by identity of a parameter, its stand-in; parameters without a stand-in are left out.

    Raises:
        TypeError: if `__init__` needs an argument that cannot be found; other errors of `__init__` are raised as they
            are.
    """
    cls = type(optimizer)
    groups = [_group(group, stand_ins) for group in optimizer.param_groups]
    groups = [group for group in groups if group["params"]]
    inner = dict(inner_optimizers(optimizer))
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    takes_groups = False
    for place, parameter in enumerate(list(inspect.signature(cls.__init__).parameters.values())[1:]):
        name, kind = parameter.name, parameter.kind
        nested = inner.get(name, inner.get(f"_{name}"))
        if nested is not None:
            # Next to parameters, the argument is the class of the inner optimizer; without them, the inner optimizer.
            value = type(nested) if takes_groups else fresh_optimizer(nested, stand_ins)
        elif place == 0:
            value, takes_groups = groups, True
        elif kind is inspect.Parameter.VAR_KEYWORD:
            keywords.update(_passed_on(cls, optimizer.defaults, keywords))
            continue
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        else:
            value = _argument(optimizer, name, parameter.default)
            if value is inspect.Parameter.empty:
                raise TypeError(f"{cls.__name__}.__init__ needs {name!r}, which is neither a default nor an attribute")
        if kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL) or place == 0:
            positional.append(value)
        else:
            keywords[name] = value
    made = cls(*positional, **keywords)
    _take_over(optimizer, made)
    return made


def stepper(optimizer: Any, parameters: Sequence[torch.Tensor], *, closure: bool) -> Callable[[], None]:
    """Makes a function that steps the optimizer once, as a training loop would, with or without a loss closure."""
    gradients = [p.grad for p in parameters]

    def evaluate() -> torch.Tensor:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return torch.zeros((), device=parameters[0].device)

    def step() -> None:
        evaluate()
        if closure:
            optimizer.step(evaluate)
        else:
            optimizer.step()

    return step


def steps_apart(optimizer: Any) -> int:
    """The number of steps after which every kind of step has occurred; one unless it wraps another optimizer."""
    if not any(True for _ in inner_optimizers(optimizer)):
        return 1
    options = [*vars(optimizer).values(), *(v for group in optimizer.param_groups for v in group.values())]
    whole = [v for v in options if isinstance(v, int) and not isinstance(v, bool) and 1 < v <= _MOST_STEPS_APART]
    return max(whole, default=1)


def all_optimizers(optimizer: Any) -> list[Any]:
    """An optimizer and its inner optimizers."""
    found = {id(optimizer): optimizer}
    waiting = [optimizer]
    while waiting:
        for _, inner in inner_optimizers(waiting.pop()):
            if id(inner) not in found:
                found[id(inner)] = inner
                waiting.append(inner)
    return list(found.values())


@contextlib.contextmanager
def hooks_aside() -> Iterator[None]:
    """While active, removes the hooks on every optimizer's step; then restores them and the random generators."""
    hooks = [getattr(_torch_optimizer, name, {}) for name in _GLOBAL_HOOKS]
    saved = [dict(of) for of in hooks]
    python_state = random.getstate()
    for of in hooks:
        of.clear()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        for of, before in zip(hooks, saved, strict=True):
            of.clear()
            of.update(before)


def _group(group: Mapping[str, Any], stand_ins: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    options = {name: pytree.tree_map(_own, value) for name, value in group.items() if name != "params"}
    kept = [place for place, p in enumerate(group["params"]) if id(p) in stand_ins]
    if len(names := options.get("param_names", ())) == len(group["params"]):
        options["param_names"] = [names[place] for place in kept]
    return options | {"params": [stand_ins[id(group["params"][place])] for place in kept]}


def _own(value: Any) -> Any:
    """A separate copy of an option: a learning rate may be a tensor."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _argument(optimizer: Any, name: str, default: Any) -> Any:
    """The argument that `__init__` received under this name, as far as it can be found; otherwise its default."""
    if name in optimizer.defaults:
        return _own(optimizer.defaults[name])
    for attribute in (name, f"_{name}"):
        value = vars(optimizer).get(attribute, inspect.Parameter.empty)
        if value is not inspect.Parameter.empty and _is_plain(value):
            return value
    return default


def _passed_on(cls: type, defaults: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that a base class's `__init__` takes by name, for an `__init__` that passes its keywords on."""
    names: set[str] = set()
    for base in cls.__mro__[1:]:
        if "__init__" in vars(base) and base not in (object, torch.optim.Optimizer):
            names.update(inspect.signature(vars(base)["__init__"]).parameters)
    return {name: _own(value) for name, value in defaults.items() if name in names and name not in known}


def _take_over(optimizer: Any, made: Any) -> None:
    """Gives the new optimizer the plain attributes that the old one has, such as counters and switches."""
    for name, value in vars(optimizer).items():
        if _is_plain(value):
            vars(made)[name] = value


def _is_plain(value: Any) -> bool:
    """Whether a value can be shared: it is no mutable container, no tensor and no object with state."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, type, torch.dtype, torch.device))
