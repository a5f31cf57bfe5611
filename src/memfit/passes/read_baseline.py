"""Reads the step without memfit from AOTAutograd's joint graph, which no pass for memory has rewritten.

A plan is compared with the step that the user has. That step runs the traced ops in their order, whole and once; its
storages are those that AOTAutograd traced. So the baseline step has ops and storages of its own, in place of marks on
the ops of the planned step.

Known limits: eager mode adds up gradients in place, where AOTAutograd traced sums in new memory. Ops that overwrite
their operand count with the time of that, and with memory of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from memfit.fxir.alias_analysis import find_storages, forward_nodes
from memfit.fxir.joint import JointOp, JointReading, JointStorage
from memfit.fxir.module_names import module_of
from memfit.ir.graph import Phase
from memfit.passes.conv_backward_split import in_place_arguments
from memfit.passes.pass_list import PassSettings, run_passes
from memfit.passes.read_joint import accumulated_storages, output_nodes, storages_read, with_gradients

__all__ = ["read_baseline"]


def read_baseline(
    module: fx.GraphModule,
    settings: PassSettings,
    *,
    in_place: frozenset[str] = frozenset(),
    accumulated: frozenset[int] = frozenset(),
) -> JointReading:
    """Reads the baseline step of a joint graph.

    Args:
        module: the joint graph; rewritten in place.
        settings: the choices that the passes depend on.
        in_place: nodes of Dynamo's graph that write over their operand.
        accumulated: inputs whose gradients are added to existing gradients when made.

    Returns:
        Ops that run whole and once, and their storages.
    """
    run_passes(module, settings, baseline=True)
    graph, count = module.graph, settings.num_forward_outputs
    outputs = output_nodes(graph)
    forward = forward_nodes(graph, outputs[:count])
    storages, storage_of, made = find_storages(graph, forward)
    gradients = tuple(storage_of[n] for n in outputs[count:] if n in storage_of)
    added = accumulated_storages(outputs[count:], accumulated, storages, storage_of)

    def op(node: fx.Node, written: tuple[int, ...]) -> JointOp:
        over: Sequence[int] = ()
        if node in forward and any(n.name in in_place for n in node.meta.get("from_node", ())[-1:]):
            over = in_place_arguments(node, storages, storage_of, written)
        return JointOp(
            node=node,
            phase=Phase.FORWARD if node in forward else Phase.BACKWARD,
            module=module_of(node),
            reads=storages_read(node, storage_of),
            writes=written,
            in_place_argument=next(iter(over), None),
        )

    ops = [op(node, written) for node, written in made.items()]
    return JointReading(
        module=module,
        num_forward_outputs=count,
        ops=tuple(sorted(ops, key=lambda op: op.phase is Phase.BACKWARD)),
        storages=tuple(_as_eager(s) for s in with_gradients(storages, {*gradients} - added)),
        storage_of=storage_of,
        output_storages=tuple(storage_of[n] for n in outputs[:count] if n in storage_of),
        gradient_storages=gradients,
        gradient_of_input=tuple(None if n is None else storage_of.get(n) for n in outputs[count:]),
        accumulated=added,
    )


def _as_eager(storage: JointStorage) -> JointStorage:
    """The storage with its size in eager mode, where the CPU kernel of dropout makes a mask of the data's dtype."""
    value = storage.base.meta["val"]
    source = storage.base.args[0] if storage.base.args else None
    if not isinstance(source, fx.Node) or source.target is not torch.ops.aten.native_dropout.default:
        return storage
    if value.dtype is not torch.bool or value.device.type != "cpu":
        return storage
    of_data = cast(fx.Node, source.args[0]).meta["val"].element_size()
    return JointStorage(base=storage.base, nbytes=int(value.numel() * of_data), kind=storage.kind)
