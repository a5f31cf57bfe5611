"""Emits the ops of a program into an FX graph, and each view at the place where it is read.

FX's generated code drops each value after its last use, so the lifetimes at run time are those of the simulation. Three
rules ensure this:

- the base of a storage is saved and passed on, never a view; views are recomputed where they are read, since
  a view that outlives its base would keep the memory;
- the elements of a tuple are extracted right after the op, so that the tuple does not keep them;
- an op marked in place runs the in-place call of `memfit.passes.conv_backward_split`, an op in chunks that of
  `memfit.ops.chunking`.

Calls of a `Swapper` swap a storage out and in. The first reader of a storage waits until the storage is swapped in.

A random op that runs more than once saves the state of its generator at the first run and replays that state later
(`torch._prims.rng_prims`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.joint import JointOp, JointReading
from memfit.ir.slicing import BySlices
from memfit.ops.chunking import call_in_chunks
from memfit.ops.kernels.convolution import convolution_input_gradient, input_half
from memfit.ops.recompute import without_statistics
from memfit.ops.registry import rule_of
from memfit.runtime.fused_region import FusedOp, fused_call
from memfit.runtime.grad_accumulation import Accumulation
from memfit.runtime.offload.engine import Swapper
from memfit.runtime.offload.graph_calls import SwapCalls, keep_unread
from memfit.torch_compat.core import detect_fake_mode, run_and_save_rng_state, run_with_rng_state

__all__ = ["OVERWRITTEN", "Emitter", "LocalInstruction", "LocalMove", "Move"]

OVERWRITTEN = "memfit_overwritten"
"""Mark in the `meta` of a node whose memory a later node takes over."""


@dataclass(frozen=True, slots=True)
class LocalInstruction:
    """Runs op `index` of the subgraph, optionally `recomputed`, `over` the memory of a storage, or in `chunks`.

    `save_state` and `replay` serve recomputed random ops, `from_statistics` recomputed batch normalisations. A `sliced`
    op runs slice by slice, and a `fused` one runs together with the next instruction; its results in `passed_on` exist
    as slices only. One half of a call (`memfit.planner.finalize.merge_conv_backward`) may run `with_next`, its other
    half.
    """

    index: int
    recomputed: bool = False
    over: int | None = None
    chunks: int = 1
    from_statistics: bool = False
    save_state: bool = False
    replay: bool = False
    fused: bool = False
    sliced: bool = False
    passed_on: tuple[int, ...] = ()
    with_next: bool = False


class Move(StrEnum):
    """Steps of a storage's swap: start to swap out, wait until the storage is out, start to swap in."""

    OUT = "out"
    GONE = "gone"
    IN = "in"


@dataclass(frozen=True, slots=True)
class LocalMove:
    """A move of a storage of the subgraph."""

    move: Move
    storage: int


class Emitter:
    """Copies nodes of the joint graph into one new graph, and tracks the current copy of every storage.

    For storages that the caller holds (`held`), the current copy is always the first one.
    """

    def __init__(
        self,
        reading: JointReading,
        graph: fx.Graph,
        swapper: Swapper | None,
        tier_resident: Collection[int],
        held: Collection[int],
    ) -> None:
        self.reading = reading
        self.graph = graph
        self.calls = SwapCalls(graph, swapper) if swapper is not None else None
        self.tier_resident = tier_resident
        self.coming: dict[int, fx.Node] = {}
        self.bases: dict[int, fx.Node] = {}
        self.views: dict[fx.Node, fx.Node] = {}
        self.states: dict[int, fx.Node] = {}
        self.placed: dict[fx.Node, fx.Node] = {}
        self.held = held
        self.adding: dict[int, list[tuple[fx.Node, Accumulation]]] = {}
        self.added: dict[fx.Node, fx.Node] = {}

    def awaited_sums(self) -> set[fx.Node]:
        """Gradients that are not computed yet and that will be added to existing gradients."""
        return {gradient for waiting in self.adding.values() for gradient, _ in waiting}

    def place(self, nodes: Sequence[fx.Node], *, as_inputs: bool = False) -> None:
        """Copies nodes that need no operand: placeholders and attributes, or results that arrive as inputs."""
        for node in nodes:
            if as_inputs:
                copy = self.graph.placeholder(node.name)
                copy.meta = dict(node.meta)
            else:
                copy = self.graph.node_copy(node)
            self.placed[node] = copy
            storage = self.reading.storage_of.get(node)
            if storage is not None and self.reading.storages[storage].base is node:
                self.set_base(storage, copy)
            else:
                self.views[node] = copy

    def set_base(self, storage: int, node: fx.Node) -> None:
        """Makes `node` the current copy of a storage; views of an older copy are forgotten."""
        self.bases[storage] = node
        for view in [v for v in self.views if self.reading.storage_of.get(v) == storage]:
            del self.views[view]
        for gradient, accumulation in self.adding.pop(storage, ()):
            self.added[gradient] = self.graph.call_function(accumulation.add, (self.value(gradient),))
            self.added[gradient].meta = dict(gradient.meta)

    def value(self, node: fx.Node) -> fx.Node:
        """The node of this graph that holds the value of `node` of the joint graph."""
        storage = self.reading.storage_of.get(node)
        if storage is not None and storage in self.coming:
            self.wait_for(storage)
        if storage is not None and self.reading.storages[storage].base is node:
            return self.bases[storage]
        known = self.views.get(node)
        if known is None:
            if storage is None and node.op != "get_attr":
                raise AssertionError(f"{node.name} is neither a tensor nor an attribute")
            known = self.graph.node_copy(node, self.value)
            self.views[node] = known
        return known

    def run_all(self, instructions: Sequence[LocalInstruction | LocalMove]) -> None:
        """Emits ops and moves in their order, each fused region as one call."""
        run: list[LocalInstruction] = []
        for instruction in instructions:
            if isinstance(instruction, LocalMove):
                self.move(instruction)
                continue
            run.append(instruction)
            if not instruction.fused and not instruction.with_next:
                if instruction.sliced:
                    self.run_sliced(run)
                elif len(run) > 1:
                    self.run_halves([self.reading.ops[i.index] for i in run])
                else:
                    self.run(instruction)
                run = []

    def move(self, instruction: LocalMove) -> None:
        """Emits a call of the swapper."""
        calls, storage = self.calls, instruction.storage
        assert calls is not None
        if instruction.move is Move.OUT:
            calls.out(storage, self.bases[storage])
        elif instruction.move is Move.GONE:
            calls.gone(storage)
        else:
            self.coming[storage] = calls.start_in(storage, self.reading.storages[storage].base)
            self.set_base(storage, self.coming[storage])

    def wait_for(self, storage: int) -> None:
        """Emits the wait for a storage that is being swapped in."""
        assert self.calls is not None
        self.set_base(storage, self.calls.wait_in(storage, self.coming.pop(storage)))

    def stream(self, storage: int, cut: BySlices) -> fx.Node:
        """Emits the call that moves slices of a tier-resident storage."""
        assert self.calls is not None
        return self.calls.slices(storage, self.reading.storages[storage].base, cut)

    def run_sliced(self, instructions: Sequence[LocalInstruction]) -> None:
        """Emits ops that run slice by slice, then extracts their results."""
        ops = [
            FusedOp(
                op=self.reading.ops[instruction.index],
                from_statistics=instruction.from_statistics,
                passed_on=instruction.passed_on,
                over=instruction.over,
            )
            for instruction in instructions
        ]
        call = fused_call(self.reading, ops, self.tier_resident)
        slices = ops[0].op.by_slices
        assert slices is not None
        passing = {s: self.stream(s, slices) for s in call.streams.values()}
        for instruction in instructions:
            if instruction.over is not None:
                self.bases[instruction.over].meta[OVERWRITTEN] = True
        operands = [
            passing[call.streams[place]] if place in call.streams else self.value(node)
            for place, node in enumerate(call.operands)
        ]
        made = self.graph.call_function(call.target, tuple(operands))
        if not call.results:  # all results are tier-resident
            keep_unread(call.target)
        bases = [self.reading.storages[s].base for s in call.results]
        made.meta = {"val": tuple(base.meta["val"] for base in bases)}
        for place, (storage, base) in enumerate(zip(call.results, bases, strict=True)):
            taken = self.graph.call_function(operator.getitem, (made, place))
            taken.meta = dict(base.meta)
            self.set_base(storage, taken)

    def run(self, instruction: LocalInstruction) -> None:
        """Emits one op, then extracts its results."""
        op = self.reading.ops[instruction.index]
        if op.writes and op.writes[0] in self.adding and op.writes[0] in self.reading.added_as_made:
            self.add(op)
            return
        call: fx.Node | Call = op.node
        writes = op.writes
        if instruction.from_statistics:
            assert op.recompute_as is not None
            call, writes = op.recompute_as, op.writes[:1]
        if instruction.replay or instruction.save_state:
            made = self._random(instruction, op.node)
        else:
            target, args, kwargs = cast(Any, call.target), call.args, dict(call.kwargs)
            if instruction.chunks > 1:
                target, kwargs = call_in_chunks(target), {**kwargs, "chunks": instruction.chunks}
            if instruction.recomputed and not instruction.from_statistics and (rerun := without_statistics(op.node)):
                target, args = rerun
            elif target is convolution_input_gradient:
                target = input_half
            if instruction.over is not None:
                operands = [self.reading.storage_of.get(a) if isinstance(a, fx.Node) else None for a in call.args]
                target = rule_of(call.target).in_place[operands.index(instruction.over)]
                self.bases[instruction.over].meta[OVERWRITTEN] = True
            made = self.graph.call_function(target, fx.map_arg(args, self.value), fx.map_arg(kwargs, self.value))
            made.meta = dict(call.meta)
        self._take_results(made, writes)

    def run_halves(self, ops: Sequence[JointOp]) -> None:
        """Emits both halves of a convolution's backward pass as one call."""
        whole = torch.ops.aten.convolution_backward.default
        (weight_half,) = [op for op in ops if op.node.target is whole]
        (data_half,) = [op for op in ops if op is not weight_half]
        *operands, mask = weight_half.node.args
        args = fx.map_arg((*operands, [True, *cast(Any, mask)[1:]]), self.value)
        made = self.graph.call_function(whole, args)
        _, *values = weight_half.node.meta["val"]
        made.meta = {**weight_half.node.meta, "val": (data_half.node.meta["val"], *values)}
        data_gradient = self.graph.call_function(operator.getitem, (made, 0))
        data_gradient.meta = dict(data_half.node.meta)
        self.set_base(data_half.writes[0], data_gradient)
        self._take_results(made, weight_half.writes)

    def add(self, op: JointOp) -> None:
        """Emits an op that adds its result to the existing gradient."""
        ((gradient, accumulation),) = self.adding.pop(op.writes[0])
        operands = fx.map_arg(op.node.args, self.value)
        self.added[gradient] = self.graph.call_function(accumulation.add_made_by(op.node.target), operands)
        self.added[gradient].meta = dict(gradient.meta)

    def _random(self, instruction: LocalInstruction, node: fx.Node) -> fx.Node:
        args = fx.map_arg(node.args, self.value)
        kwargs = fx.map_arg(node.kwargs, self.value)
        if instruction.replay:
            state = self.states[instruction.index]
            made = self.graph.call_function(run_with_rng_state, (state, cast(Any, node.target), *args), kwargs)
            made.meta = dict(node.meta)
            return made
        both = self.graph.call_function(run_and_save_rng_state, (cast(Any, node.target), *args), kwargs)
        state = self.graph.call_function(operator.getitem, (both, 0))
        mode = detect_fake_mode(_tensors(node.meta["val"]))
        device_type = next(iter(_tensors(node.meta["val"]))).device.type
        real = torch.cuda.get_rng_state() if device_type == "cuda" else torch.get_rng_state()
        state.meta = {"val": mode.from_tensor(real) if mode is not None else real}
        self.states[instruction.index] = state
        made = self.graph.call_function(operator.getitem, (both, 1))
        made.meta = dict(node.meta)
        return made

    def _take_results(self, made: fx.Node, writes: Sequence[int]) -> None:
        alone = isinstance(made.meta.get("val"), torch.Tensor)  # an assertion has no result
        for storage in writes:
            if storage in self.held and storage in self.bases:
                continue  # a second copy is discarded
            if alone:
                self.set_base(storage, made)
            elif (base := self.reading.storages[storage].base).target is operator.getitem:  # else nothing reads it
                taken = self.graph.call_function(operator.getitem, (made, base.args[1]))
                taken.meta = dict(base.meta)
                self.set_base(storage, taken)


def _tensors(value: Any) -> list[torch.Tensor]:
    items = value if isinstance(value, list | tuple) else [value]
    return [t for t in items if isinstance(t, torch.Tensor)]
