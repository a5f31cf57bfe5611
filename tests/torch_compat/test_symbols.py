"""Each private interface of torch for symbols does what memfit relies on, on the oldest torch and the newest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from memfit.torch_compat import symbols
from memfit.torch_compat.core import FakeTensorMode
from tests.torch_compat.checks import Checks

CHECKS = Checks()
uses = CHECKS.uses


def sizes(*numbers: int) -> tuple[Any, torch.Tensor]:
    """The environment of symbols, and a tensor that has one for each size."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(numbers))  # type: ignore[var-annotated]
    return mode, mode.from_tensor(torch.ones(numbers), symbolic_context=context)


@uses("bound_symbols")
def sizes_below_a_bound_make_slices_without_an_end_no_slices() -> None:
    mode, made = sizes(5)
    (symbol,) = made.shape
    environment = symbol.node.shape_env  # type: ignore[attr-defined]
    large = 2**50
    assert environment._maybe_evaluate_static((symbol < large).node.expr) is None  # type: ignore[attr-defined]
    symbols.bound_symbols(mode, 2**40)
    assert environment._maybe_evaluate_static((symbol < large).node.expr) == True  # type: ignore[attr-defined] # noqa: E712
    assert environment.var_to_range[symbol.node.expr].upper == 2**40  # type: ignore[attr-defined]


@uses("symbols_computed_once")
def an_operation_on_sizes_is_computed_once() -> None:
    _, made = sizes(5, 7)
    one, other = made.shape
    with symbols.symbols_computed_once():
        assert (one * other).node is (one * other).node  # type: ignore[attr-defined]
        assert (one * other).node is not (one + other).node  # type: ignore[attr-defined]
        assert (one * 2).node.pytype is int and (one * 2.0).node.pytype is float  # type: ignore[attr-defined]
        _, others = sizes(5, 7)  # the symbols of another environment have the same names
        assert (others.shape[0] * others.shape[1]).node.shape_env is not (one * other).node.shape_env  # type: ignore[attr-defined]
    assert (one * other).node is not (one * other).node  # type: ignore[attr-defined]


def test_each_graph_has_its_own_operations_on_sizes() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(x.shape[0] * 2, x.shape[0] * 2)

    with symbols.symbols_computed_once():
        first = make_fx(double, tracing_mode="symbolic")(torch.ones(3, 4))
        mode, made = sizes(3, 4)
        with mode:
            graphs = [make_fx(double, tracing_mode="real", _allow_non_fake_inputs=True)(made) for _ in range(2)]
    for graph in (first, *graphs):
        assert graph(torch.ones(5, 2)).shape == (10, 10)


def test_each_name_is_checked() -> None:
    assert CHECKS.checked() == set(symbols.__all__)


@pytest.mark.smoke
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_symbols(check: Callable[[], None]) -> None:
    check()
