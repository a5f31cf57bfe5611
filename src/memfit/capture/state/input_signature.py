"""Signature that distinguishes two calls of a module: a plan is made for one signature and never runs on another."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from memfit.capture.state.module_state import ModuleState, module_state
from memfit.ops.kernels.settings import kernel_settings
from memfit.torch_compat.core import pytree

__all__ = [
    "Signature",
    "differ_in_sizes",
    "differing_number",
    "is_larger",
    "is_same_call",
    "nearest",
    "signature",
]

Signature = tuple[Any, ...]


class _Tied(tuple[int, ...]):
    """For each tensor among the inputs, the place of the first tensor that is the same object."""

    __slots__ = ()


def signature(model: nn.Module, args: Any, kwargs: Any, state: ModuleState | None = None) -> Signature:
    """Properties of a call that a plan depends on and a caller may change.

    Shapes, dtypes, autocast, existing gradients, hooks; and the settings that select kernels, since the check that an
    op gives the same bits in chunks was made with these kernels.

    Args:
        model: the module.
        args: positional inputs.
        kwargs: keyword inputs.
        state: state of the module, if already known.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    inputs = tuple(
        (t.shape, t.dtype, t.device, t.requires_grad) if isinstance(t, torch.Tensor) else _value(t) for t in leaves
    )
    device = next((t.device.type for t in leaves if isinstance(t, torch.Tensor)), "cpu")
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    seen: dict[int, int] = {}
    tensors = (t for t in leaves if isinstance(t, torch.Tensor))
    same = _Tied(seen.setdefault(id(t), place) for place, t in enumerate(tensors))
    state = module_state(model) if state is None else state
    settings = (autocast, torch.get_default_dtype(), *kernel_settings(device))
    return (*inputs, same, (len(args), *kwargs), state.accumulating, state.hooks, settings)


def _value(value: object) -> object:
    """A plain Python value, since a graph may hold it as a constant; for other objects, only the type.

    Numbers are compared by type and `repr`: `1` equals `True`, and NaN does not equal itself, so each call would be
    planned anew.
    """
    if value is None or isinstance(value, str):
        return value
    return (type(value), repr(value)) if isinstance(value, bool | int | float) else type(value)


def is_larger(one: Signature, other: Signature) -> bool:
    """Whether two calls differ in sizes only, and no size of the other is larger."""
    sizes = _sizes_of_both(one, other)
    return sizes is not None and all(a >= b for a, b in sizes)


def nearest(key: Signature, others: Iterable[Signature]) -> list[Signature]:
    """The calls whose step mostly runs the same ops, the most alike first.

    They differ in sizes, numbers, arguments that are None, and in whether gradients exist already.
    """
    mine = _loosely(key)
    found = {other: sizes for other in others if (sizes := _sizes_of_both(mine, _loosely(other))) is not None}
    return sorted(found, key=lambda other: sum(abs(math.log((a + 1) / (b + 1))) for a, b in found[other]))


def is_same_call(one: Signature, other: Signature) -> bool:
    """Whether two calls differ in nothing but whether gradients exist already."""
    return _without_gradients(one) == _without_gradients(other)


def differing_number(one: Signature, other: Signature) -> int | None:
    """The place of the number in which alone two calls differ, among the leaves of the arguments; None without one."""
    mine, theirs = _without_gradients(one), _without_gradients(other)
    if len(mine) != len(theirs):
        return None
    places = [place for place, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]]
    if len(places) != 1 or not all(_is_number(key[places[0]]) for key in (mine, theirs)):
        return None
    return places[0]


def differ_in_sizes(one: Signature, other: Signature) -> bool:
    """Whether two calls differ in nothing but sizes, and whether gradients exist already."""
    return _sizes_of_both(_without_gradients(one), _without_gradients(other)) is not None


def _without_gradients(key: Signature) -> Signature:
    inputs, (same, form, _, *rest) = _divided(key)
    return (*inputs, same, form, *rest)


def _loosely(key: Signature) -> Signature:
    """A signature without what changes few ops of a step."""
    inputs, rest = _divided(key)
    kept = (entry[0] if _is_number(entry) else entry for entry in inputs)
    same, _, _, hooks, *settings = rest
    return (*(entry for entry in kept if entry is not None), same, hooks, *settings)


def _divided(key: Signature) -> tuple[Signature, Signature]:
    """The entries of a signature for the inputs, and the others."""
    begin = next(place for place, entry in enumerate(key) if isinstance(entry, _Tied))
    return key[:begin], key[begin:]


def _sizes_of_both(one: Signature, other: Signature) -> list[tuple[int, int]] | None:
    """The pairs of all sizes of two calls; None if they differ in more than sizes."""
    if len(one) != len(other):
        return None
    found: list[tuple[int, int]] = []
    for mine, theirs in zip(one, other, strict=True):
        if not _is_tensor(mine) or not _is_tensor(theirs):
            if mine != theirs:
                return None
        elif mine[1:] != theirs[1:] or len(mine[0]) != len(theirs[0]):
            return None
        else:
            found += zip(mine[0], theirs[0], strict=True)
    return found


def _is_number(entry: object) -> bool:
    return isinstance(entry, tuple) and bool(entry) and entry[0] in (int, float)


def _is_tensor(entry: object) -> bool:
    return isinstance(entry, tuple) and bool(entry) and isinstance(entry[0], torch.Size)
