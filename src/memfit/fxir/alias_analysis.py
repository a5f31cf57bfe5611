"""The storages of a joint graph: which nodes are views, which nodes share memory, which belong to the forward pass.

A functional graph tells which node reads which result, not which results share memory. A node whose result lies in the
memory of an operand costs nothing and is not an op; a node that allocates memory is an op, and its memory lives as long
as its last view.

The technique: fake tensors share storages exactly as real tensors do, so nodes whose fake tensors have the same storage
have the same storage here, made by the first of these nodes. The forward pass consists of the nodes that its outputs
depend on, and of all nodes traced before the first node that depends on a tangent: autograd saves the results of the
latter. The position of a node in the graph is not enough, as `getitem` and `detach` nodes of forward values lie among
the backward nodes.

Known limits: static sizes only; a storage is as large as its fake tensor says. Where a kernel gives its result another
layout, `memfit.capture.eager.fake_strides` corrects the fake tensor before.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from memfit.fxir.joint import JointStorage
from memfit.fxir.marks import is_tangent
from memfit.fxir.signature import tensors_of
from memfit.ir.graph import StorageKind
from memfit.torch_compat.core import InputMutationAOTOutput

__all__ = ["find_storages", "forward_nodes", "overwritten_inputs", "tuple_reads", "written_inputs"]


def forward_nodes(graph: fx.Graph, outputs: list[fx.Node | None]) -> set[fx.Node]:
    """Nodes that the forward outputs depend on, and nodes traced before backward began (saved by the forward pass)."""
    needed: set[fx.Node] = set()
    stack = [n for n in outputs if isinstance(n, fx.Node)]
    for node in graph.nodes:
        if node.op == "call_function":
            if any(is_tangent(a) for a in node.all_input_nodes):
                break
            stack.append(node)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def find_storages(
    graph: fx.Graph, forward: set[fx.Node]
) -> tuple[list[JointStorage], dict[fx.Node, int], dict[fx.Node, tuple[int, ...]]]:
    """Tells ops from views, and finds the storage of each tensor of a joint graph.

    Args:
        graph: the joint graph; its nodes carry fake tensors.
        forward: see `forward_nodes`.

    Returns:
        The storages, in the order they are made; for each node that yields a tensor, the number of its storage; for
        each op, the numbers of the storages it makes.
    """
    storages: list[JointStorage] = []
    number: dict[int, int] = {}
    storage_of: dict[fx.Node, int] = {}
    ops: dict[fx.Node, tuple[int, ...]] = {}

    def storage_number(tensor: torch.Tensor, base: fx.Node, kind: StorageKind) -> tuple[int, bool]:
        memory = tensor.untyped_storage()
        known = number.get(memory._cdata)
        if known is not None:
            return known, False
        number[memory._cdata] = len(storages)
        storages.append(JointStorage(base=base, nbytes=int(memory.nbytes()), kind=kind))
        return len(storages) - 1, True

    for node in graph.nodes:
        tensors = tensors_of(node)
        if node.op in ("placeholder", "get_attr"):
            kind = StorageKind.TANGENT if is_tangent(node) else StorageKind.STATIC
            for tensor in tensors:
                storage_of[node], _ = storage_number(tensor, node, kind)
        elif node.op == "call_function" and node.target is operator.getitem:
            for tensor in tensors:
                # An element of a tuple is the base of its storage: the tuple itself is no tensor.
                storage, _ = storage_number(tensor, node, StorageKind.FORWARD)
                old = storages[storage]
                if old.base is node.args[0]:
                    storages[storage] = JointStorage(base=node, nbytes=old.nbytes, kind=old.kind)
                storage_of[node] = storage
        elif node.op == "call_function":
            kind = StorageKind.FORWARD if node in forward else StorageKind.BACKWARD
            written: list[int] = []
            for tensor in tensors:
                storage, new = storage_number(tensor, node, kind)
                if new:
                    written.append(storage)
                if isinstance(node.meta["val"], torch.Tensor) or not new:
                    storage_of[node] = storage  # a list of views, as `split` makes, shares their storage
            if written or node.is_impure() or not tensors:
                ops[node] = tuple(written)
    return storages, storage_of, ops


def overwritten_inputs(graph: fx.Graph, storage_of: dict[fx.Node, int]) -> set[int]:
    """Storages of the inputs that the step writes to."""
    return {storage_of[n] for n in written_inputs(graph) if n in storage_of}


def written_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The inputs that the step writes to, in the graph or in AOTAutograd's epilogue."""
    (output,) = graph.find_nodes(op="output")
    mutated = [d.mutated_input for d in output.meta["desc"] if isinstance(d, InputMutationAOTOutput)]
    written = [n for n in graph.find_nodes(op="placeholder") if n.meta.get("desc") in mutated]
    return written + [n.args[0] for n in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)]


def tuple_reads(argument: fx.Node, storage_of: dict[fx.Node, int]) -> list[int]:
    """The storages of the elements of a tuple, for an op that takes the tuple itself."""
    return [storage_of[user] for user in argument.users if user in storage_of and user.target is operator.getitem]
