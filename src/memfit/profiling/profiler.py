"""Costs measured on the device: each distinct op once, one at a time.

FLOP counts rank ops wrongly (a pointwise op has few FLOPs and takes long), so every distinct combination of op, shapes,
dtypes and strides is timed (`memfit.profiling.benchmark`). Only one op's operands exist at a time, so a model that does
not fit in memory can be profiled. Results are cached per machine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from msgspec import structs
from torch import fx

from memfit.capture.training_step import Capture, read_again
from memfit.errors import CaptureError
from memfit.fxir.call import Call
from memfit.fxir.joint import JointOp
from memfit.fxir.signature import cost_key
from memfit.ir.graph import Op, StepGraph, Variant
from memfit.ir.residents import ResidentKind
from memfit.ir.slicing import BySlices
from memfit.ops.chunking import candidate_chunks
from memfit.ops.recompute import new_statistics_are_read
from memfit.passes.concat_weight_gradients import is_separable_key, separable_key
from memfit.profiling.benchmark import Costs, whole_if_separable
from memfit.profiling.cost_cache import CostCache
from memfit.profiling.library_workspace import library_bytes
from memfit.profiling.measurements import measurements_of
from memfit.profiling.roofline import roofline_seconds
from memfit.profiling.sampled_workspace import SampledWorkspace

__all__ = ["known_separable", "profile_ops", "separated", "with_rooflines"]

_WHOLE_HANDICAP = 1.05
"""A chunked variant takes less memory, so it is preferred at about equal time."""

Progress = Callable[[int, int], None]


def profile_ops(
    capture: Capture, device: torch.device, cache: CostCache, *, progress: Progress | None = None
) -> StepGraph:
    """Measures the ops that are not in the cache, and returns the graph with times and workspaces.

    Args:
        capture: the captured step.
        device: device to run the ops on.
        cache: known costs, extended by the new ones.
        progress: called with the number of ops done and to do.

    Returns:
        The step graph of the capture with its costs set; its static bytes include the memory that libraries hold.
    """
    measurements = measurements_of(capture, device)
    missing = measurements.missing(cache)
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        for done, measurement in enumerate(missing):
            if progress is not None:
                progress(done, len(missing))
            if measurement.known(cache) is None:
                measurement.measure(cache)
    if progress is not None and missing:
        progress(len(missing), len(missing))
    cache.save()

    graph = with_costs(capture, lambda joint: measurements.costs(joint, cache))
    nodes = list({cost_key(joint.node): joint.node for joint in capture.joint_ops if joint is not None}.values())
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        library = library_bytes(graph, device, nodes, plain_code=bool(capture.subgraphs.breaks))
    return graph.beside("workspaces of libraries", library, ResidentKind.LIBRARY)


def known_separable(cache: CostCache) -> Callable[[str], bool]:
    """Tells which weight gradients a cache knows to be separable into parts (`separate` of `capture_step`)."""
    # Dynamo keeps the returned function alive while it captures a model, so it holds a few keys and not the cache.
    return frozenset(key for key in cache if is_separable_key(key) and cache.get(key)).__contains__


def separated(capture: Capture, device: torch.device, cache: CostCache) -> Capture:
    """The step with weight gradients of concatenations computed part by part where that gives the same bits.

    Args:
        capture: capture of the step, with the gradients that the cache knows computed so.
        device: device to run the gradients on that the cache does not know.
        cache: known costs, extended by the new ones.
    """
    keys = _separable_keys(capture, device, cache)
    if keys == capture.separated:
        return capture
    return read_again(capture, separate=keys.__contains__, grid=capture.grid, device_type=device.type)


def _separable_keys(capture: Capture, device: torch.device, cache: CostCache) -> frozenset[str]:
    found: set[str] = set()
    for subgraph in capture.subgraphs.subgraphs:
        found |= subgraph.reading.separated
        for node in subgraph.reading.separable:
            key = separable_key(node)
            if key not in cache:
                devices = [device.index or 0] if device.type == "cuda" else []
                with torch.random.fork_rng(devices=devices), torch.no_grad():
                    cache[key] = whole_if_separable(node, device)
            if cache[key]:
                found.add(key)
    return frozenset(found)


def with_rooflines(capture: Capture) -> StepGraph:
    """The step graph with times from rooflines, and workspaces of convolutions from a few samples; no op runs whole."""
    workspace_bytes = SampledWorkspace()

    def costs(joint: JointOp) -> list[Costs]:
        calls: list[fx.Node | Call] = [joint.node] if joint.recompute_as is None else [joint.node, joint.recompute_as]
        return [
            Costs(variants=_roofline_variants(call, workspace_bytes(call)), in_slices=_roofline_variants(call)[:1])
            for call in calls
        ]

    return with_costs(capture, costs)


def with_costs(capture: Capture, costs_of_op: Callable[[JointOp], list[Costs]]) -> StepGraph:
    ops: list[Op] = []
    for op, joint in zip(capture.graph.ops, capture.joint_ops, strict=True):
        if joint is None:
            ops.append(op)
            continue
        costs, *again = costs_of_op(joint)
        # Slices are those of the call that recomputes the op.
        made = _with_variants(op if not again else structs.replace(op, by_slices=None), costs, joint.node)
        if joint.recompute_as is not None and op.recompute_as is not None:
            if again[0].variants:
                made = structs.replace(made, recompute_as=_with_variants(op.recompute_as, again[0], joint.recompute_as))
            else:  # the whole kernel recomputes it, which makes no running statistics
                recomputable = made.recomputable and not new_statistics_are_read(joint.node)
                made = structs.replace(made, recompute_as=None, recomputable=recomputable)
        ops.append(made)
    baseline = capture.graph.as_baseline()
    pairs = zip(baseline.ops, capture.baseline_ops, strict=True)
    whole = tuple(op if joint is None else _with_cost(op, joint, costs_of_op(joint)[0]) for op, joint in pairs)
    return structs.replace(capture.graph, ops=tuple(ops), baseline=structs.replace(baseline, ops=whole))


def _with_cost(op: Op, joint: JointOp, costs: Costs) -> Op:
    """An op of the baseline step with its cost; one that overwrites its operand has the time of that."""
    if not costs.variants:
        raise _cannot_run(op)
    whole = costs.variants[0]
    over_operand = joint.in_place_argument is not None and costs.in_place
    seconds = costs.in_place[0].seconds if over_operand else whole.seconds
    return structs.replace(op, seconds=seconds, workspace_bytes=whole.workspace_bytes)


def _cannot_run(op: Op) -> CaptureError:
    return CaptureError(f"{op.name} (in {op.module or 'the model itself'}) cannot run on operands laid out as they are")


def _with_variants(op: Op, costs: Costs, call: fx.Node | Call) -> Op:
    """The op with its costs, set to run in its fastest variant."""
    if not costs.variants:
        raise _cannot_run(op)
    variants, in_chunks, in_place_over = costs.variants, costs.variants[1:], op.in_place_over
    best = min(variants, key=lambda variant: variant.seconds * (1.0 if variant.chunks > 1 else _WHOLE_HANDICAP))
    if in_place_over and candidate_chunks(call):  # such a kernel writes over its operand only in chunks
        best, in_place_over = (in_chunks[0], in_place_over) if in_chunks else (best, ())
    return structs.replace(
        op,
        in_place_over=in_place_over,
        seconds=best.seconds,
        in_place_seconds=costs.in_place[0].seconds if costs.in_place else None,
        workspace_bytes=best.workspace_bytes,
        chunks=best.chunks,
        variants=variants if in_chunks else (),
        by_slices=_with_slices(op.by_slices, costs.in_slices),
    )


def _with_slices(slices: BySlices | None, costs: tuple[Variant, ...]) -> BySlices | None:
    """How the op runs in slices, with its costs; None if its slices do not have the same bits."""
    if slices is None or not costs:
        return None
    made, *together = costs
    copy, copy_over = together if together else (Variant(chunks=1, seconds=0.0, workspace_bytes=0),) * 2
    return structs.replace(
        slices,
        seconds=made.seconds,
        workspace_bytes=made.workspace_bytes,
        copy_seconds=copy.seconds,
        copy_over_seconds=copy_over.seconds,
    )


def _roofline_variants(node: fx.Node | Call, workspace_bytes: int = 0) -> tuple[Variant, ...]:
    """Variants whole and in chunks; the workspace of chunks is not measured and counts as zero, a lower bound."""
    seconds = roofline_seconds(node)
    whole = Variant(chunks=1, seconds=seconds, workspace_bytes=workspace_bytes)
    return (whole, *(Variant(chunks=chunks, seconds=seconds, workspace_bytes=0) for chunks in candidate_chunks(node)))
