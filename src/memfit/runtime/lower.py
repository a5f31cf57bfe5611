"""Lowers a program to the forward and backward FX graphs that AOTAutograd runs.

The order of the nodes is the order of the program, and FX's generated code drops each value after its last
use, so what runs is what was simulated. Three rules make that true:

- the base of a storage is saved and passed on, never a view; views are made again where they are read, since
  a view that outlives its base would keep the memory;
- the elements of a tuple are taken out right after the op, so that the tuple does not keep them;
- an op marked in place runs the in-place call of `memfit.capture.rewrite`, one in parts that of
  `memfit.capture.parts`.

A storage that is swapped leaves and comes back by calls of a `Swapper`; what stands in for it between the two passes is
the step's ticket. A tensor that comes back is waited for at its first reader.

A random op that runs more than once saves its generator's state the first time and replays it later
(`torch._prims.rng_prims`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput
from torch._guards import detect_fake_mode
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import unset_fake_temporarily

from memfit.capture.again import Call, without_statistics
from memfit.capture.parts import call_in_parts
from memfit.capture.reading import JointOp, JointReading
from memfit.capture.rewrite import (
    HOLLOW_PREFIX,
    IN_PLACE,
    convolution_input_gradient,
    input_half,
    is_tangent,
    make_hollow,
)
from memfit.runtime.accumulate import Accumulation
from memfit.runtime.fused import FusedOp, fused_call
from memfit.runtime.later import LATER
from memfit.runtime.swap.calls import SwapCalls, keep_unread
from memfit.runtime.swap.swapper import Swapper
from memfit.step.by_slices import BySlices

__all__ = [
    "OVERWRITTEN",
    "LocalInstruction",
    "LocalMove",
    "Move",
    "attach_hollow",
    "lower",
]

OVERWRITTEN = "memfit_overwritten"
"""Mark in the `meta` of a node whose memory a later one takes over."""


@dataclass(frozen=True, slots=True)
class LocalInstruction:
    """Run op `index` of the piece, perhaps `again`, `over` the memory of a storage, or in `parts`.

    `save_state` and `replay` serve random ops that run again, `from_statistics` batch normalisations that do. What
    is `sliced` runs slice by slice, and if `fused` as one with the next instruction; of its results, those `handed_on`
    exist as slices only. A half of a call (`memfit.planner.halves`) may run `with_next`, its other half.
    """

    index: int
    again: bool = False
    over: int | None = None
    parts: int = 1
    from_statistics: bool = False
    save_state: bool = False
    replay: bool = False
    fused: bool = False
    sliced: bool = False
    handed_on: tuple[int, ...] = ()
    with_next: bool = False


class Move(StrEnum):
    """What is done for a swapped storage: it starts out, it is waited for to be out, it starts back."""

    OUT = "out"
    GONE = "gone"
    IN = "in"


@dataclass(frozen=True, slots=True)
class LocalMove:
    """A move of a storage of the piece."""

    move: Move
    storage: int


class _Emitter:
    """Copies nodes of the joint graph into one new graph, keeping the current copy of every storage.

    Of those the caller holds, `held`, that is the first one.
    """

    def __init__(
        self,
        reading: JointReading,
        graph: fx.Graph,
        swapper: Swapper | None,
        streamed: Collection[int],
        held: Collection[int],
    ) -> None:
        self.reading = reading
        self.graph = graph
        self.calls = SwapCalls(graph, swapper) if swapper is not None else None
        self.streamed = streamed
        self.coming: dict[int, fx.Node] = {}
        self.bases: dict[int, fx.Node] = {}
        self.views: dict[fx.Node, fx.Node] = {}
        self.states: dict[int, fx.Node] = {}
        self.placed: dict[fx.Node, fx.Node] = {}
        self.held = held
        self.adding: dict[int, list[tuple[fx.Node, Accumulation]]] = {}
        self.added: dict[fx.Node, fx.Node] = {}

    def awaited_sums(self) -> set[fx.Node]:
        """Gradients that are not made yet, and then added to what is there."""
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
        """Makes `node` the current copy; views of an older copy are forgotten."""
        self.bases[storage] = node
        for view in [v for v in self.views if self.reading.storage_of.get(v) == storage]:
            del self.views[view]
        for gradient, accumulation in self.adding.pop(storage, ()):
            self.added[gradient] = self.graph.call_function(accumulation.add, (self.value(gradient),))
            self.added[gradient].meta = dict(gradient.meta)

    def value(self, node: fx.Node) -> fx.Node:
        """The node of this graph that holds what `node` of the joint graph holds."""
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
        """Emits ops in their order, fused ones as one, and moves."""
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
        """Emits that a storage that is on its way back is waited for."""
        assert self.calls is not None
        self.set_base(storage, self.calls.wait_in(storage, self.coming.pop(storage)))

    def stream(self, storage: int, cut: BySlices) -> fx.Node:
        """Emits what moves slices of a storage that lives on a tier."""
        assert self.calls is not None
        return self.calls.slices(storage, self.reading.storages[storage].base, cut)

    def run_sliced(self, instructions: Sequence[LocalInstruction]) -> None:
        """Emits ops that run slice by slice, then takes their results out."""
        ops = [
            FusedOp(
                op=self.reading.ops[instruction.index],
                from_statistics=instruction.from_statistics,
                handed_on=instruction.handed_on,
                over=instruction.over,
            )
            for instruction in instructions
        ]
        call = fused_call(self.reading, ops, self.streamed)
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
        if not call.results:  # all of it leaves
            keep_unread(call.target)
        bases = [self.reading.storages[s].base for s in call.results]
        made.meta = {"val": tuple(base.meta["val"] for base in bases)}
        for place, (storage, base) in enumerate(zip(call.results, bases, strict=True)):
            taken = self.graph.call_function(operator.getitem, (made, place))
            taken.meta = dict(base.meta)
            self.set_base(storage, taken)

    def run(self, instruction: LocalInstruction) -> None:
        """Emits one op, then takes its results out."""
        op = self.reading.ops[instruction.index]
        if op.writes and op.writes[0] in self.adding and op.writes[0] in self.reading.added_as_made:
            self.add(op)
            return
        call: fx.Node | Call = op.node
        writes = op.writes
        if instruction.from_statistics:
            assert op.again is not None
            call, writes = op.again, op.writes[:1]
        if instruction.replay or instruction.save_state:
            made = self._random(instruction, op.node)
        else:
            target, args, kwargs = cast(Any, call.target), call.args, dict(call.kwargs)
            if instruction.parts > 1:
                target, kwargs = call_in_parts(target), {**kwargs, "parts": instruction.parts}
            if instruction.again and not instruction.from_statistics and (rerun := without_statistics(op.node)):
                target, args = rerun
            elif target is convolution_input_gradient:
                target = input_half
            if instruction.over is not None:
                operands = [self.reading.storage_of.get(a) if isinstance(a, fx.Node) else None for a in call.args]
                target = IN_PLACE[call.target][operands.index(instruction.over)]
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
        """Emits an op that adds its result to the gradient that is there."""
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
        alone = isinstance(made.meta["val"], torch.Tensor)
        for storage in writes:
            if storage in self.held and storage in self.bases:
                continue  # a second copy is thrown away
            if alone:
                self.set_base(storage, made)
            else:
                base = self.reading.storages[storage].base
                taken = self.graph.call_function(operator.getitem, (made, base.args[1]))
                taken.meta = dict(base.meta)
                self.set_base(storage, taken)


def lower(
    reading: JointReading,
    forward: Sequence[LocalInstruction | LocalMove],
    backward: Sequence[LocalInstruction | LocalMove],
    kept: Sequence[int],
    held: Collection[int],
    swapper: Swapper | None = None,
    streamed: Collection[int] = (),
    adding: Mapping[int, Accumulation] | None = None,
    waits_until: int | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Builds the two graph modules of one piece.

    Args:
        reading: the piece.
        forward: what runs in the forward pass, in order.
        backward: what runs in the backward pass, in order.
        kept: local storages of forward results handed to the backward pass; inputs need not be named.
        held: local storages of results that the caller holds to the end of the step.
        swapper: moves what is swapped.
        streamed: local storages that live on tiers.
        adding: for places of gradients what adds them to what is there; those in memory of their own are not returned.
        waits_until: after so many instructions of the backward pass the rest can wait (`memfit.runtime.later`).

    Returns:
        Forward and backward graph modules, with the calling convention of AOTAutograd's partitioners.
    """
    joint = reading.module
    (output,) = joint.graph.find_nodes(op="output")
    outputs, descriptions = list(output.args[0]), list(output.meta["desc"])
    count = reading.num_forward_outputs
    placeholders = joint.graph.find_nodes(op="placeholder")
    primals = [n for n in placeholders if not is_tangent(n)]

    in_forward = _Emitter(reading, fx.Graph(), swapper, streamed, reading.output_storages)
    in_forward.place(primals)
    in_forward.place(joint.graph.find_nodes(op="get_attr"))
    in_forward.run_all(forward)

    in_backward = _Emitter(reading, fx.Graph(), swapper, streamed, held)
    in_backward.place(primals)
    for storage in kept:
        in_backward.place([reading.storages[storage].base], as_inputs=True)
    for index, state in in_forward.states.items():
        in_backward.states[index] = in_backward.graph.placeholder(f"random_state_{index}")
        in_backward.states[index].meta = dict(state.meta)
    tickets = [] if in_forward.calls is None or in_forward.calls.ticket is None else [in_forward.calls.ticket]
    for ticket in tickets:
        assert in_backward.calls is not None
        in_backward.calls.ticket = in_backward.graph.placeholder("swap_ticket")
        in_backward.calls.ticket.meta = dict(ticket.meta)
    in_backward.place([n for n in placeholders if is_tangent(n)])
    in_backward.place(joint.graph.find_nodes(op="get_attr"))
    for place, accumulation in (adding or {}).items():
        gradient = outputs[count + place]
        storage_of_gradient = reading.storage_of.get(gradient)
        if storage_of_gradient is not None and storage_of_gradient in reading.accumulated:
            in_backward.adding.setdefault(storage_of_gradient, []).append((gradient, accumulation))
    in_backward.run_all(backward[:waits_until])
    if waits_until is not None:
        for gradient in outputs[count:]:
            if isinstance(gradient, fx.Node) and gradient not in in_backward.awaited_sums():
                in_backward.value(gradient)
    waited = set(in_backward.graph.nodes)
    if waits_until is not None:
        in_backward.run_all(backward[waits_until:])
    if in_backward.calls is not None:
        in_backward.calls.end()
    if waits_until is not None:
        for node in in_backward.graph.nodes:
            node.meta[LATER] = node not in waited and node.op != "get_attr"
    in_backward.graph.call_function(donates_nothing)
    # An input whose gradient were None here would be cut off from the graph; the calls return none when they run.
    gradients = tuple(
        in_backward.added[n] if n in in_backward.added else in_backward.value(n) if isinstance(n, fx.Node) else n
        for n in outputs[count:]
    )
    in_backward.graph.output(gradients).meta["desc"] = descriptions[count:]
    unread = [n for n in primals if not in_backward.placed[n].users]
    for node in unread:
        in_backward.graph.erase_node(in_backward.placed[node])

    for storage in [s for s in kept if s in in_forward.coming]:
        in_forward.wait_for(storage)  # what the backward graph gets is back
    saved = [in_forward.placed[n] for n in primals if n not in unread]
    saved += [in_forward.bases[s] for s in kept]
    saved += list(in_forward.states.values())
    saved += tickets
    results = [in_forward.value(n) if isinstance(n, fx.Node) else n for n in outputs[:count]]
    made = in_forward.graph.output((*results, *saved))
    made.meta["desc"] = [*descriptions[:count], *(SavedForBackwardsAOTOutput(i) for i in range(len(saved)))]

    with unset_fake_temporarily():
        attributes = _attributes(joint)
    for graph in (in_forward.graph, in_backward.graph):
        _drop_unread(graph)
        graph.lint()
    return (
        fx.GraphModule(attributes, in_forward.graph, "PlannedForward"),
        fx.GraphModule(attributes, in_backward.graph, "PlannedBackward"),
    )


def donates_nothing() -> None:
    """Does nothing, under a tag for which AOTAutograd looks.

    It would take saved tensors for memory that the backward pass may write over, and from the second step on refuse to
    keep the graph. memfit writes over copies then.
    """


donates_nothing.tags = (torch.Tag.inplace_view,)  # type: ignore[attr-defined]


def _drop_unread(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        free = node.op == "get_attr" or node.target is operator.getitem
        if free and not node.users:
            graph.erase_node(node)


def _attributes(joint: fx.GraphModule) -> dict[str, Any]:
    """The attributes of the joint module; hollow tensors come later (`attach_hollow`).

    AOTAutograd copies the backward module deeply, and a copy of a hollow tensor would have memory.
    """
    attributes: dict[str, Any] = {}
    for node in joint.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        attributes[name] = torch.empty(0) if name.startswith(HOLLOW_PREFIX) else operator.attrgetter(name)(joint)
    return attributes


def attach_hollow(module: fx.GraphModule) -> None:
    """Puts real hollow tensors where the graph reads them."""
    with unset_fake_temporarily():
        for node in module.graph.find_nodes(op="get_attr"):
            if str(node.target).startswith(HOLLOW_PREFIX):
                setattr(module, str(node.target), make_hollow(node.meta["val"]))


def _tensors(value: Any) -> list[torch.Tensor]:
    items = value if isinstance(value, list | tuple) else [value]
    return [t for t in items if isinstance(t, torch.Tensor)]
