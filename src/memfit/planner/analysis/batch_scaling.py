"""The step at a batch size that was not captured.

Every size in a step is affine in the batch: activations grow with it, parameters do not. So two captures at
different batch sizes give the step at any other one, as long as both are the same graph. Sizes are rounded up,
never below zero; times follow the same line where it makes sense, else they are proportional or constant, so
that the noise of two small measurements is not extrapolated into nonsense.

Known limits: ops are not fused at such a size (`memfit.ir.fusion`); kernels may take another path at another
size (other workspace, other speed), and a model may run other ops; a size found this way is confirmed by a real
capture (`memfit.tools.max_batch`).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from memfit.errors import SpecError
from memfit.ir.graph import Baseline, Op, StepGraph, Storage, Variant
from memfit.ir.residents import Resident

__all__ = ["difference", "scaled"]


def difference(graph_a: StepGraph, graph_b: StepGraph) -> str:
    """The first difference of two steps in more than sizes and times, in words; empty if there is none."""
    if len(graph_a.ops) != len(graph_b.ops):
        return f"{len(graph_a.ops)} and {len(graph_b.ops)} ops"
    if len(graph_a.storages) != len(graph_b.storages):
        return f"{len(graph_a.storages)} and {len(graph_b.storages)} storages"
    for a, b in zip(graph_a.ops, graph_b.ops, strict=True):
        if _structure(a) != _structure(b):
            return f"op {a.name} ({a.target}) and op {b.name} ({b.target})"
    for s, t in zip(graph_a.storages, graph_b.storages, strict=True):
        if s.kind is not t.kind:
            return f"storage {s.name} ({s.kind}) and storage {t.name} ({t.kind})"
    if graph_a.outputs != graph_b.outputs:
        return "outputs"
    if graph_a.baseline is None and graph_b.baseline is None:
        return ""
    return difference(graph_a.without_memfit(), graph_b.without_memfit())


def scaled(graph_a: StepGraph, batch_a: int, graph_b: StepGraph, batch_b: int, batch: int) -> StepGraph:
    """The step at `batch`, from captures at two other batch sizes.

    Args:
        graph_a: the step at `batch_a`.
        batch_a: one batch size.
        graph_b: the step at `batch_b`.
        batch_b: another batch size.
        batch: the batch size asked for.

    Returns:
        The step with every size and time at `batch`; a program of a captured step is also a program of this step.

    Raises:
        SpecError: if the batch sizes are equal or the two steps are not the same graph.
    """
    if batch_a == batch_b:
        raise SpecError(f"two different batch sizes are needed to scale a step (both: {batch_a})")
    differs = difference(graph_a, graph_b)
    if differs:
        raise SpecError(f"the steps at batch {batch_a} and {batch_b} are different graphs: {differs}")
    if batch_a > batch_b:
        graph_a, batch_a, graph_b, batch_b = graph_b, batch_b, graph_a, batch_a
    rise, run = batch - batch_a, batch_b - batch_a

    def size(a: int, b: int) -> int:
        return a if a == b else max(0, a - (a - b) * rise // run)

    def seconds(a: float, b: float) -> float:
        if b <= a:
            return max(a, b)
        at_zero = a - (b - a) / run * batch_a
        return b * batch / batch_b if at_zero < 0 else at_zero + (b - a) / run * batch

    def between(a: Variant, b: Variant) -> Variant:
        nbytes = size(a.workspace_bytes, b.workspace_bytes)
        return Variant(chunks=max(a.chunks, b.chunks), seconds=seconds(a.seconds, b.seconds), workspace_bytes=nbytes)

    def op(a: Op, b: Op) -> Op:
        chunks = max(a.chunks, b.chunks)
        made = _with_variants(
            a, chunks, between(a.variant(1), b.variant(1)), between(a.variant(a.chunks), b.variant(b.chunks))
        )
        in_place = None
        if a.in_place_seconds is not None and b.in_place_seconds is not None:
            in_place = seconds(a.in_place_seconds, b.in_place_seconds)
        return structs.replace(made, in_place_seconds=in_place)

    def storages(a: Sequence[Storage], b: Sequence[Storage]) -> tuple[Storage, ...]:
        return tuple(structs.replace(s, nbytes=size(s.nbytes, t.nbytes)) for s, t in zip(a, b, strict=True))

    baseline_a, baseline_b = graph_a.without_memfit(), graph_b.without_memfit()
    held_a, held_b = ({(r.kind, r.name): r.nbytes for r in graph.residents} for graph in (graph_a, graph_b))
    return structs.replace(
        graph_a,
        ops=tuple(
            structs.replace(
                op(a, b), recompute_as=op(a.recompute_as, b.recompute_as) if a.recompute_as and b.recompute_as else None
            )
            for a, b in zip(graph_a.ops, graph_b.ops, strict=True)
        ),
        storages=storages(graph_a.storages, graph_b.storages),
        baseline=Baseline(
            ops=tuple(op(a, b) for a, b in zip(baseline_a.ops, baseline_b.ops, strict=True)),
            storages=storages(baseline_a.storages, baseline_b.storages),
            outputs=baseline_a.outputs,
        ),
        residents=tuple(
            Resident(kind=kind, name=name, nbytes=size(held_a.get((kind, name), 0), held_b.get((kind, name), 0)))
            for kind, name in dict.fromkeys((*held_a, *held_b))
        ),
        after_step_bytes=size(graph_a.after_step_bytes, graph_b.after_step_bytes),
        after_step_seconds=seconds(graph_a.after_step_seconds, graph_b.after_step_seconds),
    )


def _with_variants(op: Op, chunks: int, whole: Variant, chosen: Variant) -> Op:
    return structs.replace(
        op,
        seconds=chosen.seconds,
        workspace_bytes=chosen.workspace_bytes,
        chunks=chunks,
        variants=(whole, chosen) if chunks > 1 else (),
        by_slices=None,
    )


def _structure(op: Op) -> tuple[object, ...]:
    """Properties of an op that are equal in two captures of one model at any size."""
    return (
        *(op.target, op.module, op.phase, op.subgraph, op.reads, op.writes),
        *(op.in_place_over, op.random_state_bytes, op.recomputable),
    )
