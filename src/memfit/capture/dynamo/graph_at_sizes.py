"""A traced graph with symbols for sizes, turned into the graph for some sizes.

Tracing a graph for each length of a text takes seconds. Traced once with symbols (Dynamo's dynamic shapes), the graph
for a length needs no tracing: every size in it is an expression, which is computed. Sizes become numbers, tensors
become fake tensors of these sizes that alias each other as before, and calls that compute sizes are left out. The
result is the graph that tracing with these sizes would give, as long as the conditions on sizes that tracing relied on
hold (`sizes_of`).

Known limits: sizes 0 and 1 are never symbols.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from memfit.capture.dynamo.kept_trace import KeptTrace
from memfit.errors import MemfitError
from memfit.torch_compat.core import (
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    make_graph_module,
    use_lazy_graph_module,
)

__all__ = ["NotOfSizesError", "Sizes", "sizes_of", "trace_at_sizes"]

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_DYNAMIC = "dynamic_dims"
"""Field of AOTAutograd's metadata with the dimensions of an output whose size is a symbol."""


class NotOfSizesError(MemfitError):
    """A graph with symbols is not valid for some sizes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sizes:
    """Numbers for the symbols of a graph.

    Attributes:
        numbers: by symbol.
        fake_mode: makes fake tensors of these sizes.
        known: numbers of expressions that were computed.
        tensors: fake tensors that were made, by the identity of the tensor with symbols, which is kept too.
        storages: by the identity of a storage with symbols, the storage that was made for it.
    """

    numbers: Mapping[Any, Any]
    fake_mode: FakeTensorMode
    known: dict[Any, Any] = dataclasses.field(default_factory=dict)
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=dict)
    storages: dict[int, torch.UntypedStorage] = dataclasses.field(default_factory=dict)

    def number(self, value: Any) -> Any:
        """The number of a size, or the value of a condition on sizes.

        Raises:
            NotOfSizesError: if it depends on anything but the sizes of inputs.
        """
        if isinstance(value, torch.Size | tuple | list):
            return type(value)([self.number(part) for part in value])
        if not isinstance(value, _SYMBOLS):
            return value
        expression = value.node.expr
        if expression not in self.known:
            self.known[expression] = self.of_expression(expression)
        return self.known[expression]

    def of_expression(self, expression: Any) -> Any:
        """The number of an expression, or the value of a condition.

        Raises:
            NotOfSizesError: if it depends on anything but the sizes of inputs.
        """
        found = expression.xreplace(self.numbers)
        if found.free_symbols:
            raise NotOfSizesError(f"{expression} is no size of an input")
        if found.is_Boolean:
            return bool(found)
        return int(found) if found.is_integer else float(found)

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """The fake tensor of these sizes for one with symbols; tensors that share memory still do."""
        if not value._has_symbolic_sizes_strides and isinstance(value.untyped_storage().nbytes(), int):
            return value
        if id(value) not in self.tensors:
            self.tensors[id(value)] = value, self._made(value)
        return self.tensors[id(value)][1]

    def _made(self, value: torch.Tensor) -> torch.Tensor:
        shape, strides = self.number(tuple(value.shape)), self.number(tuple(value.stride()))
        offset = self.number(value.storage_offset())
        storage = value.untyped_storage()
        key = int(storage._cdata)
        if key not in self.storages:
            nbytes = storage.nbytes()
            made_for = torch.empty(self.number(nbytes), dtype=torch.uint8, device="meta").untyped_storage()
            self.storages[key] = storage if isinstance(nbytes, int) else made_for
        made = torch.empty(0, dtype=value.dtype, device="meta").set_(self.storages[key], offset, shape, strides)
        fake = FakeTensor(self.fake_mode, made, value.device)
        return fake.requires_grad_() if value.requires_grad else fake


def sizes_of(inputs: Sequence[tuple[Any, Any]], fake_mode: FakeTensorMode) -> Sizes:
    """The sizes with which a graph with symbols takes some inputs.

    Args:
        inputs: inputs of the graph, each with a fake tensor that has symbols.
        fake_mode: the mode of these fake tensors.

    Raises:
        NotOfSizesError: if the inputs differ from the examples in more than sizes, or conditions on sizes do not hold.
    """
    numbers: dict[Any, Any] = {}
    pairs = [(v, e) for v, e in inputs if isinstance(e, torch.Tensor)]
    for value, example in pairs:
        symbols: Sequence[Any] = example.shape
        for size, symbol in zip(value.shape, symbols, strict=True):
            if isinstance(symbol, torch.SymInt) and symbol.node.expr.is_Symbol:
                numbers.setdefault(symbol.node.expr, sympy.Integer(int(size)))
    found = Sizes(numbers=numbers, fake_mode=fake_mode)
    for value, example in pairs:
        if tuple(value.shape) != found.number(tuple(example.shape)):
            raise NotOfSizesError(f"an input has the shape {tuple(value.shape)}, not {tuple(example.shape)}")
        if value.layout is torch.strided and tuple(value.stride()) != found.number(tuple(example.stride())):
            raise NotOfSizesError(f"an input has the strides {tuple(value.stride())}, not {tuple(example.stride())}")
    environment = fake_mode.shape_env
    assert environment is not None, "there are symbols"
    for guard in environment.guards:
        if found.of_expression(environment.replace(guard.expr)) is not True:
            raise NotOfSizesError(f"{guard.expr} does not hold")
    for symbol, number in numbers.items():
        bounds = environment.var_to_range.get(symbol)
        if bounds is not None and not bounds.lower <= number <= bounds.upper:
            raise NotOfSizesError(f"{symbol} is {number}, not between {bounds.lower} and {bounds.upper}")
    return found


def trace_at_sizes(trace: KeptTrace, sizes: Sizes) -> KeptTrace:
    """The trace for some sizes.

    Args:
        trace: with symbols.
        sizes: numbers for the symbols.

    Raises:
        NotOfSizesError: if something in it depends on more than sizes of inputs.
    """
    with disable_current_modes(), torch.no_grad():
        return dataclasses.replace(
            trace,
            analysed=_at(trace.analysed, sizes),
            passed_on=_at(trace.passed_on, sizes),
            traced=_at(trace.traced, sizes),
        )


def _at(value: Any, sizes: Sizes) -> Any:
    """A value of AOTAutograd with numbers in place of symbols; objects without sizes are shared."""
    if isinstance(value, torch.Tensor):
        return sizes.tensor(value)
    if isinstance(value, _SYMBOLS):
        return sizes.number(value)
    if isinstance(value, fx.GraphModule):
        return _graph_at(value, sizes)
    if isinstance(value, torch.Size):
        return sizes.number(value)
    if isinstance(value, list | tuple | set) and not hasattr(value, "_fields"):
        return type(value)(_at(part, sizes) for part in value)
    if isinstance(value, dict):
        same = copy.copy(value)
        same.update((key, _at(part, sizes)) for key, part in value.items())
        return same
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            part = getattr(value, field.name, None)
            new = set() if field.name == _DYNAMIC and part is not None else _at(part, sizes)
            if new is not part:
                object.__setattr__(made, field.name, new)
        return made
    return value


def _graph_at(gm: fx.GraphModule, sizes: Sizes) -> fx.GraphModule:
    """The graph with numbers in place of symbols, without the calls that compute sizes."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op != "output" and isinstance(value, _SYMBOLS):
            copies[node] = sizes.number(value)
            continue
        new = graph.node_copy(node, lambda n: copies[n])
        new.args = fx.node.map_aggregate(new.args, sizes.number)
        new.kwargs = fx.node.map_aggregate(new.kwargs, sizes.number)
        new.meta = dict(node.meta)
        if "val" in node.meta:
            new.meta["val"] = _at(value, sizes)
        new.meta.pop("tensor_meta", None)
        copies[node] = new
    with use_lazy_graph_module(True):
        made = make_graph_module(gm, graph)
    made.meta = dict(gm.meta)
    return made
