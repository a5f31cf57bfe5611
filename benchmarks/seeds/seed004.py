"""Seed 004's figures: bytes held when the forward pass ends, cut as far as the seed's, and the true peak beside them.

The seed reads memory between two source lines, after the forward pass; that hides the peak inside the backward
pass, so it is printed too. Among the orders that hold no more than the seed's at that place and take at most 1.40 times
the baseline step, the one with the lowest peak is taken. A second plan gives the sample CNN 40 % of its true peak.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.report import Report, Table
from benchmarks.subject import Case, Subject
from memfit.capture.allocation_tracker import LiveBytes
from memfit.capture.state.snapshot import preserved
from memfit.errors import BudgetError
from memfit.fitted.plan import Plan
from memfit.ir.graph import StepGraph
from memfit.planner.bounds.relaxation import select_saved
from memfit.planner.finalize.variant_selection import leanest, program_within
from memfit.planner.search.lazy_recompute import lazy_order
from memfit.planner.search.spill_and_fill import spill
from memfit.sim.simulator import Timeline, simulate

__all__ = ["COLUMNS", "SEEDS", "Seed", "least_peak_order", "run"]

COLUMNS = (
    "model",
    "who",
    "held after forward, baseline MiB",
    "held after forward, planned MiB",
    "held after forward, measured MiB",
    "step, planned / plain",
    "step, planned / plain, wall clock",
    "true peak, baseline MiB",
    "true peak, planned MiB",
    "true peak, measured MiB",
)

_ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """One model of the seed and what the seed reports of it.

    Attributes:
        case: the model.
        baseline_mib: held after the forward pass without recomputation.
        held_mib: held after it with recomputation.
        slowdown: step time with recomputation over without.
        share: of the true peak, for a second plan; 0 for none.
    """

    case: Case
    baseline_mib: float
    held_mib: float
    slowdown: float
    share: float = 0.0


SEEDS: dict[str, Seed] = {
    "keras-cnn": Seed(
        case=Case(spec="zoo:keras-cnn", batch=16, shape=(1, 256, 256)),
        baseline_mib=2909.8,
        held_mib=10.2,
        slowdown=3.55,
        share=0.4,
    ),
    "vgg16": Seed(
        case=Case(spec="torchvision:vgg16", batch=64, shape=(3, 224, 224)),
        baseline_mib=3707.6,
        held_mib=82.2,
        slowdown=6.7,
    ),
}


def run(report: Report, table: Table, device: torch.device, name: str, seed: Seed, *, real: bool, cached: bool) -> None:
    """Adds the seed's row, memfit's with the same bytes held, and memfit's at a share of the true peak."""
    peak = "not recorded"
    report.add(
        table,
        name,
        "seed 004",
        f"{seed.baseline_mib:.1f}",
        "",
        f"{seed.held_mib:.1f}",
        "",
        f"{seed.slowdown:.2f}",
        *[peak] * 3,
    )
    subject = Subject.of(seed.case, device, cached=cached)
    order = least_peak_order(subject.graph, int(seed.held_mib * 2**20))
    if order is None:
        report.add(
            table, name, "memfit, held as the seed", _mib(_held(subject, subject.plain)), "none found", *[""] * 6
        )
    else:
        _add(report, table, name, "memfit, held as the seed", subject, order, real)
    if seed.share:
        who, plain = f"memfit at {seed.share:.0%} of the peak", subject.plain
        try:
            plan = subject.plan(int(seed.share * plain.peak_bytes))
        except BudgetError as error:
            least = f"least {_mib(error.least_bytes)}"
            report.add(table, name, who, _mib(_held(subject, plain)), *[""] * 4, _mib(plain.peak_bytes), least, "")
        else:
            _add(report, table, name, who, subject, plan.program.order(), real)


def least_peak_order(graph: StepGraph, held_bytes: int, *, slowdown: float = 1.40) -> list[int] | None:
    """An order of low peak among those that hold little after the forward pass and are not slow.

    Args:
        graph: the step.
        held_bytes: most that may be held beside static bytes when the loss starts.
        slowdown: most the step may take, in baseline steps.

    Returns:
        Op indices, the fastest if all are slow; None if no order holds so little.
    """
    room = held_bytes - sum(graph.storages[s].nbytes for s in set(graph.outputs) if not graph.is_free(s))
    order: list[int] | None = None
    for _ in range(_ROUNDS):
        selection = select_saved(graph, room)
        if selection is None:
            return None
        order = lazy_order(graph, selection.saved)
        excess = _timeline(graph, order).forward_end_bytes - graph.static_bytes - held_bytes
        if excess <= 0:
            break
        room -= excess  # the states of random generators are held too
    if order is None or excess > 0:
        return None
    low, high = graph.static_bytes, _timeline(graph, order).peak_bytes
    while high - low > 0.01 * high:
        middle = (low + high) // 2
        lower = spill(leanest(graph), order, middle)
        if lower is None or _timeline(graph, lower).step_seconds > slowdown * graph.plain_seconds:
            low = middle
        else:
            order, high = lower, _timeline(graph, lower).peak_bytes
    return order


def _add(report: Report, table: Table, name: str, who: str, subject: Subject, order: list[int], real: bool) -> None:
    graph, plain = subject.graph, subject.plain
    timeline = _timeline(graph, order)
    held = wall = peak = ""
    if real:
        plan = subject.plan_of(program_within(graph, order))
        peak = _mib(subject.run(plan).peak_bytes)
        held = _mib(_held_bytes(subject, plan))
        before, after = subject.seconds([None, plan])
        wall = f"{after / before:.2f}"
    report.add(
        table,
        name,
        who,
        _mib(_held(subject, plain)),
        _mib(_held(subject, timeline)),
        held,
        f"{timeline.step_seconds / graph.plain_seconds:.2f}",
        wall,
        _mib(plain.peak_bytes),
        _mib(timeline.peak_bytes),
        peak,
    )


def _held_bytes(subject: Subject, plan: Plan) -> int:
    """What a planned forward pass really leaves in memory."""
    example = subject.example
    call = subject.call(plan)
    with preserved(example.model), LiveBytes(subject.device.type) as counter:
        output = call(*example.args, **example.kwargs)
        held = int(counter.live)
        del output
    return held


def _timeline(graph: StepGraph, order: list[int]) -> Timeline:
    return simulate(graph, program_within(graph, order))


def _held(subject: Subject, timeline: Timeline) -> int:
    return timeline.forward_end_bytes - subject.graph.static_bytes


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"
