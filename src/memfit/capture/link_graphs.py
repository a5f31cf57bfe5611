"""Joins the captured subgraphs of a step into one step graph.

Every subgraph numbers its storages separately; here all storages get one numbering. An output of one subgraph that a
later subgraph takes is one storage, and so is the gradient of this output. The loss op stands between the last forward
op and the first backward op.

Known limits: a gradient that passes through code between subgraphs counts from the loss on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from msgspec import structs
from torch import fx

from memfit.capture.distributed.fsdp_hooks import Communication, communication
from memfit.capture.subgraphs import Operand, Subgraph, Subgraphs
from memfit.fxir.joint import JointOp, JointReading
from memfit.fxir.marks import HALF_OF, is_tangent
from memfit.ir.graph import Baseline, Op, Phase, StepGraph, Storage, StorageKind
from memfit.torch_compat.core import OpOverload

__all__ = ["join", "join_baseline"]

_RANDOM_STATE_BYTES = {"cpu": 5056, "cuda": 16}

_FREES_TANGENTS = hasattr(torch.autograd.Function, "boxed_grads_call")
"""Older torch passes tangents in a tuple that its caller holds until the backward pass of the subgraph ends."""

_GRADIENTS = (StorageKind.GRADIENT, StorageKind.BACKWARD, StorageKind.TANGENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passing:
    """Gradients on their way from one subgraph to an earlier one.

    Attributes:
        comes_as: by tangent of a subgraph, the gradient of a later subgraph that is the same storage.
        added: by subgraph, the gradients that are added to its tangents.
    """

    comes_as: dict[int, int] = field(default_factory=dict)
    added: dict[int, list[int]] = field(default_factory=dict)


def join(
    subgraphs: Subgraphs, loss_bytes: int, device_type: str, *, held_bytes: int = 0
) -> tuple[StepGraph, tuple[JointOp | None, ...]]:
    """Joins all subgraphs into one step.

    Args:
        subgraphs: in forward order, without tensors.
        loss_bytes: memory of the loss in addition to the storages that it reads and writes.
        device_type: the device type whose generator state counts.
        held_bytes: memory that the loss holds from then on until the step ends.

    Returns:
        The step, and for each of its ops the joint op that it came from; None for the loss and ops that memfit does not
        run.
    """
    storages, numbers = _numbered(subgraphs)
    passing = _passing_gradients(subgraphs, numbers, storages)
    storages, numbers, passing = _without_aliases(storages, numbers, passing)
    uses = _uses_added_up(subgraphs, numbers, storages)
    last = len(subgraphs.subgraphs) - 1
    around = _communication(subgraphs, numbers, storages, device_type)
    forward: list[tuple[Op, JointOp | None]] = []
    backward: list[tuple[Op, JointOp | None]] = []
    for index, subgraph in enumerate(subgraphs.subgraphs):
        here = [(_op(op, numbers[index], index, device_type), op) for op in subgraph.reading.ops]
        forward += _unrun(around.before_forward[index])
        forward += [pair for pair in here if pair[0].phase is Phase.FORWARD]
        forward += _unrun(around.after_forward[index])
        behind = _unrun(_added(passing.added.get(index, ()), index, storages))
        behind += _unrun(around.before_backward[index])
        behind += [pair for pair in here if pair[0].phase is Phase.BACKWARD]
        behind += _unrun(_end(subgraph, numbers[index], index, last))
        behind += _unrun(_added(uses.get(index, ()), index, storages))
        backward = behind + _unrun(around.after_backward[index]) + backward
    outputs = tuple(dict.fromkeys(numbers[last][s] for s in subgraphs.subgraphs[last].reading.output_storages))
    outputs = tuple(s for s in outputs if storages[s].kind is not StorageKind.STATIC)
    # A subgraph can recompute only its own ops, so a storage that crosses to a later subgraph is never recomputed.
    crossing = {
        numbers[i][s]
        for i, p in enumerate(subgraphs.subgraphs)
        for s, storage in enumerate(p.reading.storages)
        if storage.kind is StorageKind.STATIC and storages[numbers[i][s]].kind is StorageKind.FORWARD
    }
    forward = [
        (structs.replace(op, recomputable=False, recompute_as=None) if crossing.intersection(op.writes) else op, joint)
        for op, joint in forward
    ]
    # Plain code between subgraphs reads an output that no later subgraph reads, so the first run makes it whole.
    leaving = {numbers[i][s] for i, p in enumerate(subgraphs.subgraphs[:-1]) for s in p.reading.output_storages}
    leaving -= crossing
    forward = [(_whole_at_first(op) if leaving.intersection(op.writes) else op, joint) for op, joint in forward]
    tangents = tuple(
        dict.fromkeys(
            numbers[i][t]
            for i, p in enumerate(subgraphs.subgraphs)
            for t in _tangents(p.reading)
            if storages[numbers[i][t]].kind is StorageKind.TANGENT
        )
    )
    by_loss: tuple[int, ...] = ()
    if held_bytes:
        by_loss = (len(storages),)
        storages.append(Storage(name="held by the loss", nbytes=held_bytes, kind=StorageKind.TANGENT))
    final = tuple(numbers[last][s] for s in dict.fromkeys(subgraphs.subgraphs[last].reading.output_storages))
    loss = Op(
        name="loss",
        target="loss",
        phase=Phase.LOSS,
        subgraph=last,
        reads=tuple(s for s in final if storages[s].kind is not StorageKind.STATIC),
        writes=(*tangents, *by_loss),
        workspace_bytes=loss_bytes,
        recomputable=False,
    )
    pairs = [*forward, (loss, None), *backward]
    passed = {*passing.comes_as.values(), *(s for added in passing.added.values() for s in added)}
    returned_tangents = tuple(
        numbers[i][s]
        for i, p in enumerate(subgraphs.subgraphs)
        for s in p.reading.gradient_storages
        if storages[numbers[i][s]].kind is StorageKind.TANGENT and numbers[i][s] not in passed
    )
    held = returned_tangents if _FREES_TANGENTS or last else tangents
    graph = StepGraph(
        ops=tuple(op for op, _ in pairs),
        storages=tuple(storages),
        outputs=tuple(dict.fromkeys((*outputs, *held, *by_loss))),
    )
    return graph, tuple(joint for _, joint in pairs)


def join_baseline(
    subgraphs: Subgraphs, loss_bytes: int, device_type: str, *, held_bytes: int = 0
) -> tuple[Baseline, tuple[JointOp | None, ...]]:
    """Joins the baseline steps of all subgraphs into one, whose ops have no costs yet.

    Args:
        subgraphs: see `join`.
        loss_bytes: see `join`.
        device_type: see `join`.
        held_bytes: see `join`.

    Returns:
        The baseline step, and for each of its ops the joint op that it came from, as `join` returns them.
    """
    untouched: list[Subgraph] = []
    for subgraph in subgraphs.subgraphs:
        assert subgraph.trace is not None, "a captured subgraph was traced"
        untouched.append(replace(subgraph, reading=subgraph.trace.read_baseline()))
    graph, joint_ops = join(
        replace(subgraphs, subgraphs=tuple(untouched)), loss_bytes, device_type, held_bytes=held_bytes
    )
    ops = tuple(op.whole() for op in graph.ops)
    return Baseline(ops=ops, storages=graph.storages, outputs=graph.outputs), joint_ops


def _whole_at_first(op: Op) -> Op:
    """The op, which runs whole the first time; it may be recomputed slice by slice."""
    return op if op.by_slices is None else structs.replace(op, by_slices=structs.replace(op.by_slices, first=False))


def _numbered(subgraphs: Subgraphs) -> tuple[list[Storage], list[dict[int, int]]]:
    """The storages of all subgraphs, and for each subgraph the step's number of each of its local storages."""
    storages: list[Storage] = []
    numbers: list[dict[int, int]] = []
    returned: dict[int, int] = {}
    for index, subgraph in enumerate(subgraphs.subgraphs):
        reading = subgraph.reading
        number = _incoming(reading, subgraph.took, returned)
        for local, storage in enumerate(reading.storages):
            if local not in number:
                number[local] = len(storages)
                storages.append(
                    Storage(
                        name=storage.base.name if index == 0 else f"{storage.base.name}@{index}",
                        nbytes=storage.nbytes,
                        kind=storage.kind,
                        reusable=reading.is_reusable(local),
                    )
                )
        numbers.append(number)
        returned.update(_outgoing(reading, subgraph.gave, number))
    return storages, numbers


def _passing_gradients(subgraphs: Subgraphs, numbers: Sequence[dict[int, int]], storages: list[Storage]) -> _Passing:
    """Finds the gradients of subgraphs' inputs that are tangents of earlier subgraphs; they end within the step.

    Where several subgraphs take the same output, autograd adds up their gradients in the memory of the first gradient.
    """
    passing = _Passing()
    last = len(subgraphs.subgraphs) - 1
    final = {numbers[last][s] for s in subgraphs.subgraphs[last].reading.output_storages}
    coming: dict[int, list[int]] = {}
    for index in range(last, -1, -1):
        subgraph, number = subgraphs.subgraphs[index], numbers[index]
        for output, tangent in _tangent_of_output(subgraph, number).items():
            gradients = coming.pop(output, [])
            if gradients and output not in final:
                passing.comes_as[number[tangent]] = gradients.pop(0)
            if gradients:
                passing.added[index] = [*passing.added.get(index, ()), *gradients]
        for node, gradient in zip(subgraph.reading.primals(), subgraph.reading.gradient_of_input, strict=False):
            if gradient is not None and node in subgraph.reading.storage_of:
                if storages[number[gradient]].kind in _GRADIENTS:
                    coming.setdefault(number[subgraph.reading.storage_of[node]], []).append(number[gradient])
    for storage in (*passing.comes_as.values(), *(s for added in passing.added.values() for s in added)):
        if storages[storage].kind is StorageKind.GRADIENT:
            storages[storage] = structs.replace(storages[storage], kind=StorageKind.BACKWARD)
    return passing


def _uses_added_up(
    subgraphs: Subgraphs, numbers: Sequence[dict[int, int]], storages: list[Storage]
) -> dict[int, tuple[int, ...]]:
    """By subgraph, the gradients of parameters and inputs that are added up when the subgraph has computed one more.

    Only the last gradient, from the first subgraph, stays; the others end where they are added up.
    """
    added: dict[int, tuple[int, ...]] = {}
    brought: dict[int, list[int]] = {}
    for index in range(len(subgraphs.subgraphs) - 1, -1, -1):
        subgraph, number = subgraphs.subgraphs[index], numbers[index]
        gathered = {parameter for unit in subgraph.gathered for parameter in unit.parameters}
        here: dict[int, None] = {}
        for value, local in zip(subgraph.took, subgraph.reading.gradient_of_input, strict=False):
            if local is None or value is None or not value.is_leaf or value.tensor in gathered:
                continue
            if storages[number[local]].kind is StorageKind.GRADIENT and number[local] not in here:
                here[number[local]] = None
                brought.setdefault(value.tensor, []).append(number[local])
        last = [gradients for gradients in brought.values() if len(gradients) > 1 and gradients[-1] in here]
        if last:
            added[index] = tuple(dict.fromkeys(gradient for gradients in last for gradient in gradients))
    for gradients in brought.values():
        for storage in gradients[:-1]:
            storages[storage] = structs.replace(storages[storage], kind=StorageKind.BACKWARD)
    return added


def _tangent_of_output(subgraph: Subgraph, number: dict[int, int]) -> dict[int, int]:
    """By output of a subgraph, numbered as in the step, the local storage of its gradient; empty if uncertain."""
    reading = subgraph.reading
    tangents = _tangents(reading)
    outputs = [
        number[reading.storage_of[node]]
        for node, value in _returned(reading, subgraph.gave)
        if value is not None and value.requires_grad and node in reading.storage_of
    ]
    if len(outputs) != len(tangents) or len(set(outputs)) != len(outputs):
        return {}
    return dict(zip(outputs, tangents, strict=True))


def _without_aliases(
    storages: list[Storage], numbers: list[dict[int, int]], passing: _Passing
) -> tuple[list[Storage], list[dict[int, int]], _Passing]:
    """Renumbers the storages without those that are the same as another storage."""
    if not passing.comes_as:
        return storages, numbers, passing
    kept = [s for s in range(len(storages)) if s not in passing.comes_as]
    place = {s: n for n, s in enumerate(kept)}

    def new(storage: int) -> int:
        while storage in passing.comes_as:
            storage = passing.comes_as[storage]
        return place[storage]

    return (
        [storages[s] for s in kept],
        [{local: new(s) for local, s in number.items()} for number in numbers],
        _Passing(
            comes_as={s: new(gradient) for s, gradient in passing.comes_as.items()},
            added={subgraph: [new(s) for s in added] for subgraph, added in passing.added.items()},
        ),
    )


def _added(gradients: Sequence[int], subgraph: int, storages: Sequence[Storage]) -> tuple[Op, ...]:
    """Ops of autograd's sums of gradients that come from several subgraphs.

    Autograd adds in place, except where a dispatch mode is active, such as a mode that counts operations or bytes.
    """
    if not gradients:
        return ()
    sum_bytes = max(storages[gradient].nbytes for gradient in gradients)
    return (structs.replace(_between("add-gradients", Phase.BACKWARD, subgraph, gradients), workspace_bytes=sum_bytes),)


def _end(subgraph: Subgraph, number: dict[int, int], index: int, last: int) -> tuple[Op, ...]:
    """An op that holds the tangents of a subgraph until its backward pass ends, where torch holds them that long."""
    if _FREES_TANGENTS or not last:
        return ()
    tangents = dict.fromkeys(number[t] for t in _tangents(subgraph.reading))
    return (_between("end", Phase.BACKWARD, index, tuple(tangents)),) if tangents else ()


def _between(what: str, phase: Phase, subgraph: int, reads: Sequence[int]) -> Op:
    return Op(
        name=f"{what}@{subgraph}",
        target=f"hook.{what}.default",
        phase=phase,
        subgraph=subgraph,
        reads=tuple(reads),
        writes=(),
        recomputable=False,
    )


def _communication(
    subgraphs: Subgraphs, numbers: Sequence[dict[int, int]], storages: list[Storage], device_type: str
) -> Communication:
    """Ops of a sharded module's hooks around subgraphs; adds their storages, and ends whole gradients in the step."""
    gradients: dict[str, list[int]] = {}
    for subgraph, number in zip(subgraphs.subgraphs, numbers, strict=True):
        unit_of = {parameter: unit.name for unit in subgraph.gathered for parameter in unit.parameters}
        for value, local_storage in zip(subgraph.took, subgraph.reading.gradient_of_input, strict=False):
            if value is not None and value.tensor in unit_of and local_storage is not None:
                storage = number[local_storage]
                if storages[storage].kind is StorageKind.GRADIENT:
                    storages[storage] = structs.replace(storages[storage], kind=StorageKind.BACKWARD)
                gradients.setdefault(unit_of[value.tensor], []).append(storage)
    gathered = [subgraph.gathered for subgraph in subgraphs.subgraphs]
    made = communication(gathered, subgraphs.staying, gradients, len(storages), copies=device_type == "cpu")
    storages += made.storages
    return made


def _unrun(ops: Sequence[Op]) -> list[tuple[Op, JointOp | None]]:
    return [(op, None) for op in ops]


def _name(op: JointOp, subgraph: int) -> str:
    return op.node.name if subgraph == 0 else f"{op.node.name}@{subgraph}"


def _target_name(target: object) -> str:
    return str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))


def _op(op: JointOp, number: dict[int, int], subgraph: int, device_type: str) -> Op:
    made = Op(
        name=_name(op, subgraph),
        target=_target_name(op.node.target),
        module=op.module,
        phase=op.phase,
        subgraph=subgraph,
        reads=tuple(dict.fromkeys(number[s] for s in op.reads)),
        writes=tuple(number[s] for s in op.writes),
        in_place_over=tuple(number[s] for s in op.in_place_over),
        random_state_bytes=_RANDOM_STATE_BYTES.get(device_type, 16) if op.random else 0,
        recomputable=op.recomputable,
        half_of=op.node.meta.get(HALF_OF, ""),
    )
    slices = op.by_slices and structs.replace(
        op.by_slices,
        reads=tuple(dict.fromkeys(number[s] for s in op.by_slices.reads)),
        sums=tuple(number[s] for s in op.by_slices.sums),
    )
    if op.recompute_as is None:
        return structs.replace(made, by_slices=slices)
    again = structs.replace(
        made,
        by_slices=slices,
        target=_target_name(op.recompute_as.target),
        reads=tuple(dict.fromkeys(number[s] for s in op.recompute_reads)),
        writes=made.writes[:1],
    )
    return structs.replace(made, recompute_as=again)


def _incoming(reading: JointReading, took: Sequence[Operand | None], returned: dict[int, int]) -> dict[int, int]:
    """By local storage of an input that an earlier subgraph returned, its number in the step."""
    number: dict[int, int] = {}
    for node, value in zip(reading.primals(), took, strict=False):
        if value is not None and node in reading.storage_of:
            known = returned.get(value.storage)
            if known is not None:
                number[reading.storage_of[node]] = known
    return number


def _outgoing(reading: JointReading, gave: Sequence[Operand | None], number: dict[int, int]) -> dict[int, int]:
    """By identity of a storage that a subgraph returned, its number in the step."""
    return {
        value.storage: number[reading.storage_of[node]]
        for node, value in _returned(reading, gave)
        if value is not None and node in reading.storage_of
    }


def _returned(reading: JointReading, outputs: Sequence[Operand | None]) -> list[tuple[fx.Node, Operand | None]]:
    """Outputs of a subgraph, with their nodes; the graph returns new values of mutated inputs before them."""
    (output,) = reading.module.graph.find_nodes(op="output")
    nodes = list(output.args[0])[: reading.num_forward_outputs]
    nodes = nodes[len(nodes) - len(outputs) :] if len(nodes) >= len(outputs) else []
    return list(zip(nodes, outputs, strict=False))


def _tangents(reading: JointReading) -> list[int]:
    """Storages of the gradients of a subgraph's outputs."""
    placeholders = reading.module.graph.find_nodes(op="placeholder")
    return [reading.storage_of[node] for node in placeholders if is_tangent(node) and node in reading.storage_of]
