"""The calls of a step whose costs are measured, with the keys under which a cache keeps them.

An op may need several measurements: the call that runs in the step, the call that recomputes it, and its slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from memfit.capture.training_step import Capture
from memfit.fxir.call import Call
from memfit.fxir.joint import JointOp
from memfit.fxir.signature import cost_key
from memfit.ir.graph import Variant
from memfit.ir.slicing import BySlices
from memfit.ops.chunking import candidate_chunks
from memfit.passes.conv_backward_split import halves_of
from memfit.profiling.benchmark import Costs, costs_added, costs_of, recompute_costs
from memfit.profiling.cost_cache import CostCache
from memfit.profiling.slice_benchmark import costs_in_slices

__all__ = ["Measurement", "Measurements", "measurements_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A call and the measurements of its costs.

    Attributes:
        keys: keys in the cache for the fields of `Costs`.
        slices: how the call runs slice by slice, if it does.
        over: position of the operand over which the call can run; None if it cannot.
        run: measures the call whole, in chunks and over the operand.
        run_slices: measures the slices of the call.
    """

    keys: tuple[str, str, str]
    slices: BySlices | None
    over: int | None
    run: Callable[[], Costs]
    run_slices: Callable[[], tuple[Variant, ...]]

    def known(self, cache: CostCache) -> Costs | None:
        """Costs of the call that the cache has; None if one is missing."""
        key, in_slices, in_place = self.keys
        if not self._knows_whole(cache) or (self.slices is not None and in_slices not in cache):
            return None
        return Costs(variants=cache[key], in_slices=cache.get(in_slices, ()), in_place=cache.get(in_place, ()))

    def measure(self, cache: CostCache) -> None:
        """Runs the call and adds its missing costs to the cache."""
        key, in_slices, in_place = self.keys
        if not self._knows_whole(cache):
            costs = self.run()
            cache.update({key: costs.variants, in_place: costs.in_place})
        if self.slices is not None:
            cache[in_slices] = self.run_slices() if cache[key] else ()

    def _knows_whole(self, cache: CostCache) -> bool:
        key, _, in_place = self.keys
        return key in cache and (self.over is None or in_place in cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The measurements of a step.

    Attributes:
        of_op: by the node of an op, its measurements: of the call, and of the call that recomputes it.
        halves: by the node of an op of the baseline step, the keys of the two calls into which passes split it.
    """

    of_op: Mapping[fx.Node, Sequence[Measurement]]
    halves: Mapping[fx.Node, tuple[str, ...]]

    def missing(self, cache: CostCache) -> list[Measurement]:
        """The measurements that the cache does not know, each once."""
        found: dict[tuple[str, ...], Measurement] = {}
        for measurement in (m for of_op in self.of_op.values() for m in of_op):
            if measurement.known(cache) is None:
                found.setdefault(measurement.keys, measurement)
        return list(found.values())

    def costs(self, joint: JointOp, cache: CostCache) -> list[Costs]:
        """The costs of an op, all of which the cache knows."""
        if joint.node in self.halves:
            return [Costs(variants=_one_after_the_other([cache[key] for key in self.halves[joint.node]]))]
        return [m.known(cache) or Costs(variants=()) for m in self.of_op[joint.node]]


def measurements_of(capture: Capture, device: torch.device) -> Measurements:
    """What is measured for a step and its baseline step."""
    of_baseline = [joint for joint in capture.baseline_ops if joint is not None]
    added = {
        id(op)
        for subgraph in capture.subgraphs.subgraphs
        for op in subgraph.reading.ops
        if not subgraph.reading.added_as_made.isdisjoint(op.writes)
    }
    of_op = {
        joint.node: [_measurement_added(joint.node, device)] if id(joint) in added else _measurements(joint, device)
        for joint in capture.joint_ops
        if joint is not None
    }
    planned_keys = {m.keys[0] for measurements in of_op.values() for m in measurements}
    halves = {
        joint.node: keys
        for joint in of_baseline
        if (keys := _keys_of_halves(joint.node)) and planned_keys.issuperset(keys)
    }
    # In this order: what an op of the planned step costs is often known when that of the baseline step is measured.
    of_op |= {joint.node: _measurements(joint, device) for joint in of_baseline if joint.node not in halves}
    return Measurements(of_op=of_op, halves=halves)


def _measurements(joint: JointOp, device: torch.device) -> list[Measurement]:
    """Measurements of the op, and of the call that recomputes it if that is another call."""
    slices = joint.by_slices
    # An op that can be chunked writes over its operand only in chunks, and is measured that way.
    over = None if candidate_chunks(joint.node) else joint.in_place_argument

    if joint.recompute_as is None:
        return [_measurement(joint.node, slices, over, device)]
    run = functools.partial(recompute_costs, joint.node, joint.recompute_as, over, device)
    later = replace(_measurement(joint.recompute_as, slices, over, device), run=run)
    return [_measurement(joint.node, None, over, device), later]


def _measurement(call: fx.Node | Call, slices: BySlices | None, over: int | None, device: torch.device) -> Measurement:
    key = cost_key(call)
    in_slices = ""
    if slices is not None:
        tiles = f" in {slices.grid} tiles" if slices.grid else ""
        in_slices = f"{key} by {slices.samples} of {slices.batch} samples{tiles}" + (
            ", rounded" if slices.first else ""
        )
    return Measurement(
        keys=(key, in_slices, f"{key} over operand {over}"),
        slices=slices,
        over=over,
        run=functools.partial(costs_of, call, over, device),
        run_slices=lambda: () if slices is None else costs_in_slices(call, slices, device),
    )


def _keys_of_halves(node: fx.Node) -> tuple[str, ...]:
    """Cache keys of the calls into which passes split an op that the baseline step runs at once; empty for none."""
    if node.target is not torch.ops.aten.convolution_backward.default:
        return ()
    return tuple(cost_key(half) for half in halves_of(node) or ())


def _one_after_the_other(calls: Sequence[tuple[Variant, ...]]) -> tuple[Variant, ...]:
    """The cost of calls that run whole, one after the other; empty if one of them cannot run."""
    if not all(calls):
        return ()
    whole = [variants[0] for variants in calls]
    seconds, workspace_bytes = sum(v.seconds for v in whole), max(v.workspace_bytes for v in whole)
    return (Variant(chunks=1, seconds=seconds, workspace_bytes=workspace_bytes),)


def _measurement_added(node: fx.Node, device: torch.device) -> Measurement:
    """Measurement of an op that adds its result to a gradient."""
    key = f"{cost_key(node)} added to a gradient"
    return Measurement(
        keys=(key, "", f"{key} over operand None"),
        slices=None,
        over=None,
        run=functools.partial(costs_added, node, device),
        run_slices=tuple,
    )
