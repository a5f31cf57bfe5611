"""Costs of a step whose ops were measured for inputs of another size.

A step for longer texts runs the same ops on larger tensors. Measuring them again takes longer than everything else that
a plan for another size needs. So the measured costs are scaled: times by the ratio of rooflines (Williams et al.,
2009), workspaces by the ratio of bytes, where that grows. Ops that the cost cache knows have their own costs, and
convolutions are measured: their workspace depends on the kernel that is taken for their sizes.

Known limits: whether an op gives the same bits in chunks, or by the call that recomputes it, is known for the measured
size only. So the ops that a plan runs in this way are measured before the plan is used (`measure`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import structs
from torch import fx

from memfit.capture.training_step import Capture
from memfit.fxir.call import Call
from memfit.fxir.joint import JointOp
from memfit.fxir.signature import tensors_of
from memfit.ir.graph import StepGraph, Variant
from memfit.ir.residents import ResidentKind, bytes_of
from memfit.profiling.benchmark import Costs
from memfit.profiling.cost_cache import CostCache
from memfit.profiling.measurements import Measurement, Measurements, measurements_of
from memfit.profiling.profiler import with_costs
from memfit.profiling.roofline import roofline_seconds
from memfit.profiling.sampled_workspace import is_convolution

__all__ = ["ScaledCosts", "same_ops", "scaled_costs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledCosts:
    """The costs of a step, scaled from those of a step that runs the same kinds of ops on tensors of other sizes.

    Attributes:
        capture: the step.
        like: by node of an op, the op of the measured step whose costs are scaled.
        measurements: what could be measured of the step.
        known: what was measured of the other step.
        library_bytes: memory that libraries hold, as in the other step.
        device: where the ops run.
        cache: known costs.
    """

    capture: Capture
    like: dict[fx.Node, JointOp]
    measurements: Measurements
    known: Measurements
    library_bytes: int
    device: torch.device
    cache: CostCache

    def graph(self) -> StepGraph:
        """The step graph with the costs that are known now."""
        graph = with_costs(self.capture, self._costs)
        return graph.beside("workspaces of libraries", self.library_bytes, ResidentKind.LIBRARY)

    def measure(self, ops: Collection[int]) -> bool:
        """Measures the ops with these indices; returns whether any of them was not known yet."""
        joints = [self.capture.joint_ops[op] for op in ops]
        return self._measure([self.measurements.of_op[joint.node] for joint in joints if joint is not None])

    def measure_unlike(self) -> None:
        """Measures the ops that are like none of the measured step."""
        self._measure([of_op for node, of_op in self.measurements.of_op.items() if node not in self.like])

    def _measure(self, found: Sequence[Sequence[Measurement]]) -> bool:
        missing = [m for of_op in found for m in of_op if m.known(self.cache) is None]
        devices = [self.device.index or 0] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            for measurement in missing:
                if measurement.known(self.cache) is None:
                    measurement.measure(self.cache)
        if missing:
            self.cache.save()
        return bool(missing)

    def _costs(self, joint: JointOp) -> list[Costs]:
        before = self.like.get(joint.node)
        halves = self.measurements.halves.get(joint.node)
        if before is None or (halves is not None and all(key in self.cache for key in halves)):
            return self.measurements.costs(joint, self.cache)
        measured = self.known.costs(before, self.cache)
        scaled = [_scaled(*one) for one in zip(measured, _calls(joint), _calls(before), strict=False)]
        if halves is not None:
            return scaled
        own = (measurement.known(self.cache) for measurement in self.measurements.of_op[joint.node])
        return [costs or estimate for costs, estimate in zip(own, scaled, strict=True)]


def scaled_costs(
    capture: Capture, known: Capture, priced: StepGraph, device: torch.device, cache: CostCache
) -> ScaledCosts | None:
    """The costs of a step from those of another step; None if those are not known any more.

    Args:
        capture: the step.
        known: a step that was measured.
        priced: its graph with costs.
        device: where the ops run.
        cache: known costs, those of the measured step among them.
    """
    measured = measurements_of(known, device)
    if measured.missing(cache):
        return None
    like: dict[fx.Node, JointOp] = {}
    for ops, others in ((capture.joint_ops, known.joint_ops), (capture.baseline_ops, known.baseline_ops)):
        same = same_ops(ops, others)
        by_kind: dict[Any, list[JointOp]] = {}
        for other in others:
            if other is not None:
                by_kind.setdefault(_kind(other), []).append(other)
        for place, op in enumerate(ops):
            if op is None or is_convolution(op.node):
                continue  # the workspace of a convolution depends on the kernel that is taken for its sizes
            alike = by_kind.get(_kind(op), [])
            nearest = others[place] if same else min(alike, key=functools.partial(_distance, op), default=None)
            if nearest is not None:
                like[op.node] = nearest
    found = ScaledCosts(
        capture=capture,
        like=like,
        measurements=measurements_of(capture, device),
        known=measured,
        library_bytes=bytes_of(priced.residents, ResidentKind.LIBRARY),
        device=device,
        cache=cache,
    )
    found.measure_unlike()
    return found


def same_ops(ops: Sequence[JointOp | None], others: Sequence[JointOp | None]) -> bool:
    """Whether two steps run the same ops on the same storages, maybe of other sizes."""
    return len(ops) == len(others) and all(map(_alike, ops, others))


def _alike(one: JointOp | None, other: JointOp | None) -> bool:
    if one is None or other is None:
        return one is other
    return _kind(one) == _kind(other) and (one.reads, one.writes) == (other.reads, other.writes)


def _kind(joint: JointOp | None) -> Any:
    """What two ops share whose costs can be scaled: the call, and the ways in which it can run."""
    if joint is None:
        return None
    ways = joint.recompute_as is None, joint.by_slices is None, joint.in_place_argument
    return (joint.node.target, *ways, len(joint.in_place_over))


def _distance(one: JointOp, other: JointOp) -> float:
    return abs(math.log((1 + _nbytes(one.node)) / (1 + _nbytes(other.node))))


def _calls(joint: JointOp) -> list[fx.Node | Call]:
    return [joint.node] if joint.recompute_as is None else [joint.node, joint.recompute_as]


def _scaled(costs: Costs, call: fx.Node | Call, of: fx.Node | Call) -> Costs:
    """Costs of a call as they were measured, for the same call on other sizes."""
    of_time = roofline_seconds(call) / roofline_seconds(of)
    of_bytes = max(1.0, _nbytes(call) / max(1, _nbytes(of)))

    def scaled(variants: Sequence[Variant]) -> tuple[Variant, ...]:
        return tuple(
            structs.replace(
                variant,
                seconds=variant.seconds * of_time,
                workspace_bytes=int(-(-variant.workspace_bytes * of_bytes // 1)),
            )
            for variant in variants
        )

    return Costs(variants=scaled(costs.variants), in_slices=scaled(costs.in_slices), in_place=scaled(costs.in_place))


def _nbytes(call: fx.Node | Call) -> int:
    of_call = [*tensors_of(call), *(t for node in call.all_input_nodes for t in tensors_of(node))]
    return sum(t.numel() * t.element_size() for t in of_call)
