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
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.joint import JointOp, JointReading
from memfit.ir.instructions import Compute, Free, Instruction, SwapIn, SwapOut, computes_in, freed_in
from memfit.ir.slicing import BySlices
from memfit.ops.chunking import call_in_chunks
from memfit.ops.kernels.convolution import convolution_input_gradient, input_half
from memfit.ops.kernels.library import direct
from memfit.ops.recompute import without_statistics
from memfit.ops.registry import rule_of
from memfit.runtime.fused_region import FusedOp, fused_call
from memfit.runtime.grad_accumulation import Accumulation
from memfit.runtime.offload.engine import Swapper
from memfit.runtime.offload.graph_calls import SwapCalls, keep_unread
from memfit.runtime.subgraph_program import Run, SubgraphProgram
from memfit.torch_compat.core import detect_fake_mode, run_and_save_rng_state, run_with_rng_state

__all__ = ["OVERWRITTEN", "Emitter"]

OVERWRITTEN = "memfit_overwritten"
"""Mark in the `meta` of a node whose memory a later node takes over."""


class Emitter:
    """Copies nodes of the joint graph into one new graph, and tracks the current copy of every storage.

    For storages that the caller holds (`held`), the current copy is always the first one.

    Args:
        reading: the joint graph.
        program: its program.
        swapper: swaps storages out and in.
        held: storages that the caller holds.
        before: the emitter of the forward pass, for the backward pass.
    """

    def __init__(
        self,
        reading: JointReading,
        program: SubgraphProgram,
        swapper: Swapper | None,
        held: Collection[int],
        *,
        before: Emitter | None = None,
    ) -> None:
        self.reading = reading
        self.program = program
        self.graph = fx.Graph()
        self.calls = SwapCalls(self.graph, swapper) if swapper is not None else None
        self.ran: set[int] = set() if before is None else set(before.ran)
        self.leaving: set[int] = set() if before is None else set(before.leaving)
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

    def run_all(self, runs: Sequence[Run]) -> None:
        """Emits runs in their order."""
        for run in runs:
            self.emit(run)

    def emit(self, run: Run) -> None:
        """Emits one instruction, a fused region, or both halves of a call."""
        computes = computes_in(run)
        if computes and computes[0].sliced:
            self.run_sliced(computes, freed_in(run))
        elif len(run) > 1:
            assert len(computes) == len(run), "only fused regions free storages"
            self.run_halves([self.reading.ops[i.op] for i in computes])
        elif computes:
            self.run(computes[0])
        else:
            self.move(run[0])
        self.ran.update(i.op for i in computes)

    def move(self, instruction: Instruction) -> None:
        """Emits a call of the swapper, if the instruction needs one."""
        if isinstance(instruction, Free):
            self.give_up(instruction.storage)
        elif isinstance(instruction, SwapOut):
            assert self.calls is not None
            self.leaving.add(instruction.storage)
            self.calls.out(instruction.storage, self.bases[instruction.storage])
        elif isinstance(instruction, SwapIn):
            assert self.calls is not None
            storage = instruction.storage
            self.coming[storage] = self.calls.start_in(storage, self.reading.storages[storage].base)
            self.set_base(storage, self.coming[storage])

    def give_up(self, storage: int) -> None:
        """Emits the wait for a storage that is being swapped out, before its memory is freed or overwritten."""
        if storage in self.leaving:
            assert self.calls is not None
            self.leaving.discard(storage)
            self.calls.gone(storage)

    def overwrite(self, storage: int) -> None:
        """Marks the current copy of a storage, whose memory the next call takes over."""
        self.give_up(storage)
        self.bases[storage].meta[OVERWRITTEN] = True

    def wait_for(self, storage: int) -> None:
        """Emits the wait for a storage that is being swapped in."""
        assert self.calls is not None
        self.set_base(storage, self.calls.wait_in(storage, self.coming.pop(storage)))

    def stream(self, storage: int, cut: BySlices) -> fx.Node:
        """Emits the call that moves slices of a tier-resident storage."""
        assert self.calls is not None
        return self.calls.slices(storage, self.reading.storages[storage].base, cut)

    def run_sliced(self, instructions: Sequence[Compute], freed: Sequence[int]) -> None:
        """Emits ops that run slice by slice, then extracts their results; what they free exists as slices only."""
        ops = [
            FusedOp(
                op=self.reading.ops[instruction.op],
                from_statistics=self.runs_from_statistics(instruction),
                passed_on=tuple(freed) if instruction is instructions[-1] else (),
                over=instruction.over,
            )
            for instruction in instructions
        ]
        call = fused_call(self.reading, ops, self.program.tier_resident)
        slices = ops[0].op.by_slices
        assert slices is not None
        passing = {s: self.stream(s, slices) for s in call.streams.values()}
        for instruction in instructions:
            if instruction.over is not None:
                self.overwrite(instruction.over)
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

    def runs_from_statistics(self, instruction: Compute) -> bool:
        """Whether an op is recomputed by another call, which reads statistics of the first run."""
        return instruction.op in self.ran and instruction.op in self.program.from_statistics

    def run(self, instruction: Compute) -> None:
        """Emits one op, then extracts its results."""
        op = self.reading.ops[instruction.op]
        recomputed, from_statistics = instruction.op in self.ran, self.runs_from_statistics(instruction)
        if op.writes and op.writes[0] in self.adding and op.writes[0] in self.reading.added_as_made:
            self.add(op)
            return
        call: fx.Node | Call = op.node
        writes = op.writes
        if from_statistics:
            assert op.recompute_as is not None
            call, writes = op.recompute_as, op.writes[:1]
        if instruction.op in self.program.replayed:
            made = self._random(instruction.op, op.node)
        else:
            target, args, kwargs = cast(Any, call.target), call.args, dict(call.kwargs)
            if instruction.chunks > 1:
                target, kwargs = call_in_chunks(target), {**kwargs, "chunks": instruction.chunks}
            if recomputed and not from_statistics and (rerun := without_statistics(op.node)):
                target, args = rerun
            elif target is convolution_input_gradient:
                target = input_half
            if instruction.over is not None:
                operands = [self.reading.storage_of.get(a) if isinstance(a, fx.Node) else None for a in call.args]
                target = rule_of(call.target).in_place[operands.index(instruction.over)]
                self.overwrite(instruction.over)
            args, kwargs = fx.map_arg(args, self.value), fx.map_arg(kwargs, self.value)
            made = self.graph.call_function(direct(target), args, kwargs)
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

    def _random(self, op: int, node: fx.Node) -> fx.Node:
        """Emits a random op that saves the state of its generator, or replays it when it is recomputed."""
        args = fx.map_arg(node.args, self.value)
        kwargs = fx.map_arg(node.kwargs, self.value)
        if op in self.ran:
            state = self.states[op]
            made = self.graph.call_function(run_with_rng_state, (state, cast(Any, node.target), *args), kwargs)
            made.meta = dict(node.meta)
            return made
        both = self.graph.call_function(run_and_save_rng_state, (cast(Any, node.target), *args), kwargs)
        state = self.graph.call_function(operator.getitem, (both, 0))
        mode = detect_fake_mode(_tensors(node.meta["val"]))
        device_type = next(iter(_tensors(node.meta["val"]))).device.type
        real = torch.cuda.get_rng_state() if device_type == "cuda" else torch.get_rng_state()
        state.meta = {"val": mode.from_tensor(real) if mode is not None else real}
        self.states[op] = state
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
