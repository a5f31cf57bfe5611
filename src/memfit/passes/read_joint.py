"""Reads AOTAutograd's joint graph: ops, storages they read, write and may overwrite, and recomputable ops.

The joint graph is one FX graph with forward and backward nodes mixed. It is rewritten first, so that it takes less
memory and yields the same bits (design.md, §5, names the rewrites). Then the reading separates forward nodes from
backward nodes and ops from views, by dependencies and shared storages (`memfit.fxir.alias_analysis`), and ops with an
exact recomputation from other ops. The recomputation of a random op is exact, with its generator state; that of an op
that reads an input which the step overwrites is not, except for batch normalisation in training mode, whose result does
not depend on the running statistics it reads.

Known limits: static shapes only.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memfit.fxir.alias_analysis import find_storages, forward_nodes, overwritten_inputs, tuple_reads
from memfit.fxir.joint import JointOp, JointReading, JointStorage
from memfit.fxir.module_names import module_of
from memfit.fxir.refused import UnplannableGraphError, checkpoint_error
from memfit.fxir.signature import tensors_of
from memfit.fxir.user_lines import user_line
from memfit.ir.graph import Phase, StorageKind
from memfit.ir.slicing import BySlices
from memfit.ops.accumulation import can_add
from memfit.ops.recompute import from_statistics, new_statistics_are_read, without_statistics
from memfit.ops.registry import rule_of
from memfit.ops.slicing_plan import cutting
from memfit.passes.concat_weight_gradients import separable_weight_gradients, separated_keys
from memfit.passes.conv_backward_split import in_place_arguments, mark_halves
from memfit.passes.fused_cross_entropy import RUNS_ONCE
from memfit.passes.pass_list import PassSettings, run_passes
from memfit.torch_compat.core import OpOverload, pytree

__all__ = [
    "accumulated_storages",
    "is_random",
    "output_nodes",
    "read_joint",
    "result_index",
    "storages_read",
    "with_gradients",
]

_NEAR = 1000
"""About the most relatives of a node that are searched for its origin."""


def read_joint(
    module: fx.GraphModule,
    settings: PassSettings,
    *,
    accumulated: frozenset[int] = frozenset(),
    replaced: bool = False,
) -> JointReading:
    """Reads a joint graph; the same graph always gives the same reading.

    Args:
        module: the joint graph; rewritten in place.
        settings: the choices that the rewrites depend on.
        accumulated: inputs whose gradients are added to existing gradients when made
            (`memfit.runtime.grad_accumulation`).
        replaced: whether the marks of the model's own checkpoints are ignored.

    Returns:
        Ops, storages, and the nodes that share each storage.

    Raises:
        UnplannableGraphError: if sizes depend on data, or tensors are sparse.
        CaptureError: if the model checkpoints itself.
    """
    _refuse_unplannable(module.graph, replaced=replaced)
    run_passes(module, settings)
    num_forward_outputs, grid = settings.num_forward_outputs, settings.grid
    graph = module.graph
    outputs = output_nodes(graph)
    forward = forward_nodes(graph, outputs[:num_forward_outputs])

    storages, storage_of, ops_nodes = find_storages(graph, forward)
    gradients = tuple(storage_of[n] for n in outputs[num_forward_outputs:] if n in storage_of)
    added = accumulated_storages(outputs[num_forward_outputs:], accumulated, storages, storage_of)
    added_as_made = frozenset[int]()
    if settings.as_made and not grid:
        added_as_made = _added_as_made(graph, outputs[num_forward_outputs:], added, storages, storage_of)
    for storage in added_as_made:
        storages[storage] = replace(storages[storage], nbytes=0)
    mark_halves(graph, {node for node, written in ops_nodes.items() if not added_as_made.isdisjoint(written)})
    storages = with_gradients(storages, {*gradients} - added)
    overwritten = overwritten_inputs(graph, storage_of)
    returned = {storage_of[n] for n in outputs if n in storage_of}
    ops = [
        _joint_op(node, written, forward, storages, storage_of, overwritten, returned)
        for node, written in ops_nodes.items()
    ]
    ops = _with_slices(ops, storages, storage_of, grid)
    ops.sort(key=lambda op: op.phase is Phase.BACKWARD)
    return JointReading(
        module=module,
        num_forward_outputs=num_forward_outputs,
        ops=tuple(ops),
        storages=tuple(storages),
        storage_of=storage_of,
        output_storages=tuple(storage_of[n] for n in outputs[:num_forward_outputs] if n in storage_of),
        gradient_storages=gradients,
        gradient_of_input=tuple(None if n is None else storage_of.get(n) for n in outputs[num_forward_outputs:]),
        separated=separated_keys(graph),
        separable=tuple(separable_weight_gradients(graph)),
        grid=grid,
        accumulated=added,
        as_made=settings.as_made,
        added_as_made=added_as_made,
    )


def accumulated_storages(
    gradients: Sequence[fx.Node | None],
    inputs: Collection[int],
    storages: Sequence[JointStorage],
    storage_of: dict[fx.Node, int],
) -> frozenset[int]:
    """Storages made by the backward pass that hold the gradient of one of these inputs and of no other input.

    Two gradients that are the same tensor (those of two weights that are added, for example) are left to autograd,
    which copies one of them.
    """
    here = {place: storage_of[node] for place, node in enumerate(gradients) if node in storage_of}
    held = list(here.values())
    return frozenset(
        storage
        for place, storage in here.items()
        if place in inputs and held.count(storage) == 1 and storages[storage].kind is StorageKind.BACKWARD
    )


def _added_as_made(
    graph: fx.Graph,
    gradients: list[fx.Node | None],
    accumulated: frozenset[int],
    storages: list[JointStorage],
    storage_of: dict[fx.Node, int],
) -> frozenset[int]:
    """The storages of accumulated gradients that an op can add directly, with the layouts of their parameters.

    No other op may read such a gradient, because it never exists by itself.
    """
    found: set[int] = set()
    for parameter, gradient in zip(graph.find_nodes(op="placeholder"), gradients, strict=False):
        storage = None if gradient is None else storage_of.get(gradient)
        if gradient is None or storage is None or storage not in accumulated:
            continue
        made = storages[storage].base
        readers = {user for view in storage_of if storage_of[view] == storage for user in view.users}
        unread = all(user.op == "output" or storage_of.get(user) == storage for user in readers)
        values = [node.meta["val"] for node in (made, gradient, parameter)]
        layouts = {(value.shape, value.stride(), value.dtype) for value in values}
        if can_add(made) and unread and len(layouts) == 1:
            found.add(storage)
    return frozenset(found)


def output_nodes(graph: fx.Graph) -> list[fx.Node | None]:
    """The outputs of a joint graph: those of the forward pass, then the gradients of the inputs."""
    (output,) = graph.find_nodes(op="output")
    return list(output.args[0])


def with_gradients(storages: Sequence[JointStorage], gradients: Collection[int]) -> list[JointStorage]:
    """The storages, of which those of gradients that the backward pass makes stay after it."""
    return [
        replace(storage, kind=StorageKind.GRADIENT)
        if number in gradients and storage.kind is StorageKind.BACKWARD
        else storage
        for number, storage in enumerate(storages)
    ]


def storages_read(node: fx.Node, storage_of: dict[fx.Node, int]) -> tuple[int, ...]:
    """The storages that a node reads, without repetition."""
    reads = tuple(dict.fromkeys(storage_of[n] for n in node.all_input_nodes if n in storage_of))
    return reads + tuple(
        storage
        for argument in node.all_input_nodes
        if argument not in storage_of
        for storage in tuple_reads(argument, storage_of)
        if storage not in reads
    )


_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _refuse_unplannable(graph: fx.Graph, *, replaced: bool) -> None:
    for node in graph.nodes:
        # Partitioners mark some calls of any model as MUST_SAVE; only a checkpointed region has calls marked for
        # recomputation.
        if not replaced and node.op == "call_function" and node.meta.get("recompute") in _RECOMPUTED:
            raise checkpoint_error(_place(node))
        values = pytree.tree_leaves(node.meta.get("val"))
        if any(isinstance(v, torch.Tensor) and not _is_plain(v) for v in values):
            raise UnplannableGraphError(
                f"{node.name} is a sparse or nested tensor, whose memory is unknown ({_place(node)})"
            )
        if any(
            isinstance(v, torch.SymInt)
            or (isinstance(v, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in v.shape))
            for v in values
        ):
            raise UnplannableGraphError(
                f"the shape of {node.name} depends on data, so its memory is unknown before it runs ({_place(node)})"
            )


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _place(node: fx.Node) -> str:
    """The module and the user's line of a node, or of its nearest relative with them if the node has none."""
    relatives = [node]
    for relative in relatives:
        place = user_line(relative.stack_trace or "")
        module = module_of(relative)
        if place or module:
            return ", ".join(part for part in (module, place) if part)
        known = {*relatives}
        relatives += [r for r in (*relative.users, *relative.all_input_nodes) if r not in known][:50]
        if len(relatives) > _NEAR:
            break
    return "the model itself"


def _joint_op(
    node: fx.Node,
    written: tuple[int, ...],
    forward: set[fx.Node],
    storages: list[JointStorage],
    storage_of: dict[fx.Node, int],
    overwritten: set[int],
    returned: set[int],
) -> JointOp:
    reads = storages_read(node, storage_of)
    # A generator's state is saved and replayed, and running statistics are left out.
    recomputable = without_statistics(node) is not None or not (
        node.is_impure(impure_random=False) or any(s in overwritten for s in reads)
    )
    again = from_statistics(node) if recomputable else None
    if again is None and new_statistics_are_read(node):
        recomputable = False
    arguments = in_place_arguments(node, storages, storage_of, written)
    over = {argument: storage_of[cast(fx.Node, node.args[argument])] for argument in arguments}
    ours = {argument: s for argument, s in over.items() if s not in returned}  # not storages that the caller holds
    return JointOp(
        node=node,
        phase=Phase.FORWARD if node in forward else Phase.BACKWARD,
        module=module_of(node),
        reads=reads,
        writes=written,
        in_place_over=tuple(ours.values()),
        in_place_argument=next(iter(ours), None),
        random=is_random(node),
        recomputable=recomputable,
        recompute_as=again,
        recompute_reads=() if again is None else tuple(dict.fromkeys(storage_of[n] for n in again.all_input_nodes)),
    )


def _with_slices(
    ops: list[JointOp], storages: list[JointStorage], storage_of: dict[fx.Node, int], grid: tuple[int, ...]
) -> list[JointOp]:
    """Adds to ops how they can run slice by slice; times come from the profiler."""
    able = [op for op in ops if (grid or _may_keep_bits(op)) and op.recomputable and not op.random]
    cut = cutting(
        [op.recompute_as or op.node for op in able],
        grid,
        storage_of,
        lambda node: storages[storage_of[node]].base,
    )

    def slices(op: JointOp) -> BySlices | None:
        results = {s: result_index(storages[s].base) for s in op.writes}
        return cut.slices(op.recompute_as or op.node, results, first=bool(grid) and op.recompute_as is None)

    of = {op.node: slices(op) for op in able}
    return [
        replace(op, by_slices=of.get(op.node), recomputable=op.recomputable and RUNS_ONCE not in op.node.meta)
        for op in ops
    ]


def _may_keep_bits(op: JointOp) -> bool:
    """Whether slices of an op may have the bits of the whole; only for forward ops, since only they are recomputed."""
    on_cpu = all(t.device.type == "cpu" for t in tensors_of(op.node))
    call = op.recompute_as or op.node
    # With `alpha`, an op also multiplies, and is rounded once or twice.
    return op.phase is Phase.FORWARD and on_cpu and rule_of(call.target).slices_keep_bits and not call.kwargs


def result_index(base: fx.Node) -> int:
    """The index of a storage among the results of its op; -1 if no node reads it."""
    if base.target is operator.getitem:
        return cast(int, base.args[1])
    return 0 if isinstance(base.meta["val"], torch.Tensor) else -1


def is_random(node: fx.Node) -> bool:
    """Whether running the node advances a random generator."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    for name in ("dropout_p", "p", "dropout"):
        if name in names:
            position = names.index(name)
            default = target._schema.arguments[position].default_value
            value = node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
            return not (isinstance(value, int | float) and value == 0)
    return True
