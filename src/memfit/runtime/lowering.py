"""Lowers a program to the forward and backward FX graphs that AOTAutograd runs.

The order of the nodes is the order of the program (`memfit.runtime.emitter`). In addition to the results of the caller,
the forward graph returns the saved values of the program: bases of storages, states of random generators for replay,
and the ticket that stands for tensors that are swapped between the two passes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memfit.fxir.joint import JointReading
from memfit.fxir.marks import METADATA_ONLY_PREFIX, is_tangent
from memfit.ops.kernels.convolution import make_metadata_only
from memfit.runtime.deferred_backward import LATER
from memfit.runtime.emitter import Emitter
from memfit.runtime.grad_accumulation import Accumulation
from memfit.runtime.offload.engine import Swapper
from memfit.runtime.subgraph_program import SubgraphProgram
from memfit.torch_compat.core import SavedForBackwardsAOTOutput, unset_fake_temporarily

__all__ = ["attach_metadata_only", "lower"]


def lower(
    reading: JointReading,
    program: SubgraphProgram,
    *,
    swapper: Swapper | None = None,
    adding: Mapping[int, Accumulation] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Builds the two graph modules of one subgraph.

    Args:
        reading: the subgraph.
        program: its program.
        swapper: swaps storages out and in.
        adding: by place of a gradient, the functions that add it to the existing gradient; gradients in memory of their
            own are not returned.

    Returns:
        Forward and backward graph modules, with the calling convention of AOTAutograd's partitioners.
    """
    joint = reading.module
    (output,) = joint.graph.find_nodes(op="output")
    outputs, descriptions = list(output.args[0]), list(output.meta["desc"])
    count = reading.num_forward_outputs
    placeholders = joint.graph.find_nodes(op="placeholder")
    primals = [n for n in placeholders if not is_tangent(n)]

    in_forward = Emitter(reading, program, swapper, reading.output_storages)
    in_forward.place(primals)
    in_forward.place(joint.graph.find_nodes(op="get_attr"))
    in_forward.run_all(program.forward)

    in_backward = Emitter(reading, program, swapper, program.held, before=in_forward)
    in_backward.place(primals)
    for storage in program.kept:
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
    in_backward.run_all(program.backward[: program.waits_until])
    if program.waits_until is not None:
        for gradient in outputs[count:]:
            if isinstance(gradient, fx.Node) and gradient not in in_backward.awaited_sums():
                in_backward.value(gradient)
    waited = set(in_backward.graph.nodes)
    if program.waits_until is not None:
        in_backward.run_all(program.backward[program.waits_until :])
    if in_backward.calls is not None:
        in_backward.calls.end()
    if program.waits_until is not None:
        for node in in_backward.graph.nodes:
            node.meta[LATER] = node not in waited and node.op != "get_attr"
    in_backward.graph.call_function(donates_nothing)
    # An input with gradient None here would be cut off from the graph, so it is a call that returns None.
    gradients = tuple(
        in_backward.added[n] if n in in_backward.added else in_backward.value(n) if isinstance(n, fx.Node) else n
        for n in outputs[count:]
    )
    in_backward.graph.output(gradients).meta["desc"] = descriptions[count:]
    unread = [n for n in primals if not in_backward.placed[n].users]
    for node in unread:
        in_backward.graph.erase_node(in_backward.placed[node])

    for storage in [s for s in program.kept if s in in_forward.coming]:
        in_forward.wait_for(storage)  # storages for the backward graph are swapped in
    saved = [in_forward.placed[n] for n in primals if n not in unread]
    saved += [in_forward.bases[s] for s in program.kept]
    saved += list(in_forward.states.values())
    saved += tickets
    with_gradient = {getattr(n.meta.get("desc"), "output", None) for n in placeholders if is_tangent(n)}
    has_gradient = [description in with_gradient for description in descriptions[:count]]
    results = _unlinked(reading, in_forward, outputs[:count], has_gradient)
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


def _unlinked(reading: JointReading, forward: Emitter, outputs: list[Any], has_gradient: Sequence[bool]) -> list[Any]:
    """The forward results; one without a gradient is no view of a result whose storage it shares.

    `y.detach().T` next to `y` would else be a view of `y` for autograd, and such a view requires a gradient as soon as
    `y` does. A view with a gradient stays one, so that autograd sees when code writes to it in place.
    """
    storages = [reading.storage_of.get(n) if isinstance(n, fx.Node) else None for n in outputs]
    results = [forward.value(n) if isinstance(n, fx.Node) else n for n in outputs]
    for place, storage in enumerate(storages):
        if storage is None or storages.count(storage) == 1 or has_gradient[place]:
            continue
        if outputs[place] is reading.storages[storage].base:
            continue
        detached = forward.graph.call_function(torch.ops.aten.detach.default, (results[place],))
        detached.meta = dict(results[place].meta)
        results[place] = detached
    return results


def donates_nothing() -> None:
    """Does nothing; carries a tag that AOTAutograd looks for.

    Without the tag, AOTAutograd would treat saved tensors as memory that the backward pass may overwrite, and from the
    second step on refuse to keep the graph. memfit overwrites copies in that case.
    """


donates_nothing.tags = (torch.Tag.inplace_view,)  # type: ignore[attr-defined]


def _drop_unread(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        free = node.op == "get_attr" or node.target is operator.getitem
        if free and not node.users:
            graph.erase_node(node)


def _attributes(joint: fx.GraphModule) -> dict[str, Any]:
    """The attributes of the joint module; metadata-only tensors are attached later (`attach_metadata_only`).

    AOTAutograd copies the backward module deeply, and a copy of a metadata-only tensor would have memory.
    """
    attributes: dict[str, Any] = {}
    for node in joint.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        attributes[name] = (
            torch.empty(0, device="cpu") if name.startswith(METADATA_ONLY_PREFIX) else operator.attrgetter(name)(joint)
        )
    return attributes


def attach_metadata_only(module: fx.GraphModule) -> None:
    """Puts real metadata-only tensors where the graph reads them."""
    with unset_fake_temporarily():
        for node in module.graph.find_nodes(op="get_attr"):
            if str(node.target).startswith(METADATA_ONLY_PREFIX):
                setattr(module, str(node.target), make_metadata_only(node.meta["val"]))
