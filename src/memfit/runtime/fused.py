"""Turns ops that run as one, slice of the batch by slice, into one call (`memfit.step.fusion`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from memfit.capture.again import Call
from memfit.capture.by_rows import AXIS, Rows, bands_of, rows_of
from memfit.capture.by_samples import Slice, in_slices, sliced_operands, sliced_target
from memfit.capture.joint import JointOp, JointReading, result_index
from memfit.runtime.banded import BandedOp, schedule

__all__ = ["FusedCall", "FusedOp", "fused_call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOp:
    """One of the ops.

    Attributes:
        op: which one; it has `by_slices`.
        from_statistics: whether what runs in its place later is called.
        handed_on: storages among its results that nothing reads after the ops, so that they exist as slices only.
        over: the storage whose memory its first result takes over, if any.
    """

    op: JointOp
    from_statistics: bool
    handed_on: tuple[int, ...]
    over: int | None

    @property
    def call(self) -> fx.Node | Call:
        """What is called."""
        return self.op.again if self.from_statistics and self.op.again is not None else self.op.node

    @property
    def writes(self) -> tuple[int, ...]:
        """Storages of its results."""
        return self.op.writes[:1] if self.from_statistics else self.op.writes


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedCall:
    """The call that runs them.

    Attributes:
        target: what is called; it returns a tuple.
        operands: nodes of the joint graph.
        results: storages, one for each item of the tuple.
    """

    target: Callable[..., tuple[torch.Tensor, ...]]
    operands: tuple[fx.Node, ...]
    results: tuple[int, ...]


def fused_call(reading: JointReading, ops: Sequence[FusedOp]) -> FusedCall:
    """Builds the call for ops that follow each other."""
    slices = ops[0].op.by_slices
    assert slices is not None
    in_bands = slices.bands > 1
    graph = fx.Graph()
    numbers = _Numbers(graph) if in_bands else None
    rows = [_rows(fused.call) if in_bands else None for fused in ops]
    made: dict[int, fx.Node] = {}
    operands: dict[tuple[fx.Node, bool], fx.Node] = {}
    for fused, how in zip(ops, rows, strict=True):
        call = fused.call
        sliced = sliced_operands(call) if how is None else frozenset(how.operands)

        def value(node: fx.Node, sliced: frozenset[fx.Node] = sliced) -> fx.Node:
            storage = reading.storage_of.get(node)
            if storage in made:
                return made[storage]
            key = node, node in sliced
            if key not in operands:
                operands[key] = graph.placeholder(f"operand_{len(operands)}")
            return operands[key]

        if how is None:
            arguments = fx.map_arg(call.args, value), fx.map_arg(call.kwargs, value)
            result = graph.call_function(sliced_target(call), *arguments)
        else:
            assert numbers is not None
            result = _call_on_rows(graph, call, how, value, numbers)
        alone = isinstance(call.meta["val"], torch.Tensor)
        for storage in fused.writes:
            index = result_index(reading.storages[storage].base)
            if alone or index >= 0:
                made[storage] = result if alone else graph.call_function(operator.getitem, (result, index))
    position = {reading.storage_of.get(node): i for i, (node, by_slices) in enumerate(operands) if by_slices}
    over: dict[int, int] = {}
    for fused in ops:
        if fused.over is not None and fused.over not in position:  # what nothing reads only leaves its memory
            position[fused.over] = len(operands)
            base = reading.storages[fused.over].base
            operands[base, False] = graph.placeholder(f"operand_{len(operands)}")
        if fused.over is not None:
            over[fused.writes[0]] = position[fused.over]
    handed_on = {s for fused in ops for s in fused.handed_on}
    sums = {s for fused in ops if fused.op.by_slices is not None for s in fused.op.by_slices.sums}
    results = tuple(s for s in made if s not in handed_on)
    values = [reading.storages[s].base.meta["val"] for s in results]
    bands: list[tuple[list[int], list[slice]]] = []
    if numbers is not None:
        stays = {s: value.shape[AXIS] for s, value in zip(results, values, strict=True) if s not in sums}
        graph.output(tuple(made[s] if s in sums else numbers.take(made[s]) for s in results))
        bands = _bands(reading, ops, [how for how in rows if how is not None], results, stays, slices.bands)
    else:
        graph.output(tuple(made[s] for s in results))
    target = in_slices(
        Slice(
            run=fx.GraphModule(torch.nn.Module(), graph).forward,
            sliced={i for i, (_, by_slices) in enumerate(operands) if by_slices},
            batch=slices.batch,
            samples=slices.samples,
            results=values,
            over=[over.get(s) for s in results],
            sums={place for place, s in enumerate(results) if s in sums},
            bands=bands,
        )
    )
    return FusedCall(target=target, operands=tuple(node for node, _ in operands), results=results)


class _Numbers:
    """The numbers of a band, as the call for it reads them one after the other."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.given = graph.placeholder("numbers")
        self.count = 0

    def next(self) -> fx.Node:
        """The next one."""
        self.count += 1
        return self.graph.call_function(operator.getitem, (self.given, self.count - 1))

    def take(self, tensor: fx.Node) -> fx.Node:
        """Rows of a tensor: the next two numbers are where they start and how many they are."""
        return self.graph.call_function(torch.narrow, (tensor, AXIS, self.next(), self.next()))


def _call_on_rows(
    graph: fx.Graph, call: fx.Node | Call, how: Rows, value: Callable[[fx.Node], fx.Node], numbers: _Numbers
) -> fx.Node:
    """Emits a call on a band: its rows, then those of its operands, are the next numbers."""
    start, stop = numbers.next(), numbers.next()
    taken = {node: numbers.take(value(node)) for node in how.operands}
    arguments = fx.map_arg(call.args, lambda node: taken[node] if node in taken else value(node))
    return graph.call_function(how.run, arguments, {"start": start, "stop": stop})


def _rows(call: fx.Node | Call) -> Rows:
    rows = rows_of(call)
    assert rows is not None, f"{call.name} does not run in bands"
    return rows


def _bands(
    reading: JointReading,
    ops: Sequence[FusedOp],
    rows: Sequence[Rows],
    results: Sequence[int],
    stays: Mapping[int, int],
    bands: int,
) -> list[tuple[list[int], list[slice]]]:
    """The numbers of each band in the order in which its call reads them, and its rows of the results."""
    banded = [
        BandedOp(
            call=fused.call,
            rows=how,
            operands=tuple(reading.storage_of[node] for node in how.operands),
            results={s: result_index(reading.storages[s].base) for s in fused.writes},
        )
        for fused, how in zip(ops, rows, strict=True)
    ]
    found: list[tuple[list[int], list[slice]]] = []
    for number, band in enumerate(schedule(banded, stays, bands)):
        numbers = [n for here in band for pair in (here.rows, *here.taken) for n in pair]
        first = {s: here.rows[0] for op, here in zip(banded, band, strict=True) for s in op.results}
        own = {s: bands_of(extent, bands)[number] for s, extent in stays.items()}
        for storage in results:
            if storage in own:
                start, stop = own[storage]
                numbers += [start - first[storage], stop - start]
        found.append((numbers, [slice(*own.get(s, (0, 0))) for s in results]))
    return found
