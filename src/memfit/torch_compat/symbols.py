"""Symbols for sizes: private interfaces of torch that memfit uses for them.

While a graph is traced with symbols, torch computes shapes, strides and questions about them anew for each tensor of
the graph, in Python: 77,000 operations for a GPT-2 of 6 layers, of which 700 differ. *Idea*: each is computed once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.value_ranges import ValueRanges

from memfit.torch_compat.core import FakeTensorMode

__all__ = ["bound_symbols", "symbols_computed_once"]

_OF_TWO = "_add _sub _mul _floordiv _mod _eq _ne _lt _le _gt _ge _sym_max _sym_min".split()
"""Operations on two sizes."""

_OF_SHAPES = (
    "_is_contiguous _is_channels_last_contiguous_2d _is_channels_last_contiguous_3d _is_channels_last_strides_2d "
    "_is_channels_last_strides_3d _is_non_overlapping_and_dense_indicator"
).split()
"""Questions about shapes and strides."""


def bound_symbols(mode: FakeTensorMode, most: int) -> None:
    """Tells torch that no size for which the mode has a symbol is above a number."""
    environment = mode.shape_env
    assert environment is not None, "there are symbols"
    for symbol, known in list(environment.var_to_range.items()):
        if known.upper > most:
            environment._update_var_to_range(symbol, ValueRanges(known.lower, most))
    environment._version_counter += 1  # what torch could not tell before is asked again


@contextlib.contextmanager
def symbols_computed_once() -> Iterator[None]:
    """While active, the same operation on the same sizes gives the node of its first result.

    An operation that is traced into a graph is a node of this graph, so the tracer is part of what is compared. None of
    these operations adds a condition on sizes; asking for the value of its result does, each time.
    """
    before = {name: getattr(SymNode, name) for name in (*_OF_TWO, *_OF_SHAPES) if hasattr(SymNode, name)}
    for name, compute in before.items():
        setattr(SymNode, name, _of_two_once(compute) if name in _OF_TWO else _of_shapes_once(compute))
    try:
        yield
    finally:
        for name, compute in before.items():
            setattr(SymNode, name, compute)


def _of_two_once(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    known: dict[Any, Any] = {}

    def once(one: Any, other: Any) -> Any:
        if not isinstance(other, SymNode) or float in (one.pytype, other.pytype):
            return compute(one, other)  # equal expressions of floats may be rounded in different orders
        key = (one._expr, one.pytype, other._expr, other.pytype, one.shape_env, _tracer())
        found = known.get(key)
        if found is None:
            found = known[key] = compute(one, other)
        return found

    return once


def _of_shapes_once(compute: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    known: dict[Any, Any] = {}

    def once(one: Any, shape: Sequence[Any], strides: Sequence[Any]) -> Any:
        key = (tuple(s._expr for s in shape), tuple(s._expr for s in strides), one.shape_env, _tracer())
        found = known.get(key)
        if found is None:
            found = known[key] = compute(one, shape, strides)
        return found

    return once


def _tracer() -> Any:
    """The tracer that operations on sizes are traced with, if any."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer
