"""Plans a stage of a pipeline, which holds several micro-batches at once.

The step of a stage is the step of one micro-batch. While it runs, the other micro-batches in flight are between their
passes, so each of them takes the bytes that the plan saves there, and the bytes that the stage received for it. How
much memory a micro-batch may therefore take, and how much of it may be saved, is decided for all stages of a device
(`memfit.planner.pipeline.memory_split`).

The planner of single steps respects one number, the peak. So the saved bytes are limited by workspace of the loss op,
as large as the room that must be left at the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from memfit.errors import BudgetError
from memfit.ir.graph import Op, Phase, StepGraph, StorageKind
from memfit.ir.instructions import Compute, Free, SwapIn, computes_in
from memfit.ir.program import Program, baseline_order
from memfit.ir.tiers import TierLinks
from memfit.planner.effort import Effort
from memfit.planner.finalize.variant_selection import program_within
from memfit.planner.offload.search import find_program
from memfit.planner.pipeline.device_memory import StageMemory
from memfit.planner.search.min_memory import LastResort
from memfit.planner.search.segments import segment_order
from memfit.sim.simulator import Timeline, simulate

__all__ = ["PlannedStage", "Traffic", "plan_always", "plan_never", "plan_stage"]

_LEAST_TRIES = 0
"""Halvings in the search for the least budget in an error; with several limits, that budget is an upper estimate
anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Micro-batches in flight and transfers of a stage, in addition to the micro-batch whose step is planned.

    Attributes:
        in_flight: the most micro-batches that are between or in their passes at once.
        received_bytes: bytes that cross the cut before the stage.
        passing_bytes: the part of the received bytes that only passes through and is freed after the forward pass, its
            gradient after the backward pass.
        returning: the received storages for which a gradient is handed back; only needed where ops are deferred.
        deferred: the ops of the backward pass that come last and can wait (`memfit.planner.pipeline.split_backward`).
        handed: the storages that go to the next stage.
        sent_bytes: bytes that the next stage receives.
        answer_bytes: bytes of gradients from the next stage.
        returned_bytes: bytes of gradients for the stage before.
    """

    in_flight: int = 1
    received_bytes: int = 0
    passing_bytes: int = 0
    returning: frozenset[int] = frozenset()
    deferred: frozenset[int] = frozenset()
    handed: frozenset[int] = frozenset()
    sent_bytes: int = 0
    answer_bytes: int = 0
    returned_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A program of one micro-batch, and the memory and time of the stage with it.

    Attributes:
        program: program of the stage's step.
        timeline: simulated timeline of that program alone.
        saved_bytes: bytes held of a micro-batch between its passes, received bytes included.
        peak_bytes: peak of the stage with all micro-batches that are in flight.
        memory: memory of the stage with each micro-batch.
        forward_seconds: forward time of a micro-batch.
        backward_seconds: backward time of a micro-batch, with recomputation.
        weight_seconds: the part of the backward time that can wait.
    """

    program: Program
    timeline: Timeline
    saved_bytes: int
    peak_bytes: int
    memory: StageMemory
    forward_seconds: float
    backward_seconds: float
    weight_seconds: float = 0.0


def plan_stage(
    graph: StepGraph,
    budget_bytes: int,
    traffic: Traffic,
    *,
    saved_limit_bytes: int | None = None,
    seconds: float = 2.0,
    last_resort: bool = True,
    effort: Effort | None = None,
) -> PlannedStage:
    """The fastest plan found for a stage.

    Args:
        graph: the step of one micro-batch.
        budget_bytes: budget of a micro-batch, without the bytes held of others.
        traffic: micro-batches in flight and transfers of the stage.
        saved_limit_bytes: bytes that may be saved of it between its passes, on top of received bytes; None for no
            limit.
        seconds: work of the search in nominal seconds.
        last_resort: whether to look for a plan of any speed if the search finds none.
        effort: counts the work.

    Raises:
        BudgetError: if no plan fits; its least budget is an upper estimate if saved bytes are limited.
    """
    graph = structs.replace(graph, tiers=tuple(_share_of(links, traffic.in_flight) for links in graph.tiers))

    def fits(planned: PlannedStage) -> bool:
        saved_bytes = planned.saved_bytes - planned.memory.taken_bytes
        return planned.timeline.peak_bytes <= budget_bytes and (
            saved_limit_bytes is None or saved_bytes <= saved_limit_bytes
        )

    never = plan_never(graph, budget_bytes, traffic)
    if fits(never):
        return never
    limited = graph if saved_limit_bytes is None else _limited(graph, budget_bytes, saved_limit_bytes)
    try:
        found = find_program(
            *(limited, budget_bytes),
            seconds=seconds,
            last_resort=LastResort(tries=_LEAST_TRIES, stops_early=last_resort),
            effort=effort,
        )
    except BudgetError:
        always = plan_always(graph, budget_bytes, traffic)  # a short search may miss it
        if fits(always):
            return always
        raise
    return _stage(graph, found.program, simulate(graph, found.program), traffic)


def plan_never(graph: StepGraph, budget_bytes: int | None, traffic: Traffic) -> PlannedStage:
    """Plan with nothing recomputed, and every op in the quickest variant for which the budget leaves room."""
    return _of_order(graph, baseline_order(graph), budget_bytes, traffic)


def plan_always(graph: StepGraph, budget_bytes: int | None, traffic: Traffic) -> PlannedStage:
    """Plan that saves as little as possible: forward ops that may run twice are recomputed before the backward pass."""
    return _of_order(graph, segment_order(graph, ()), budget_bytes, traffic)


def _share_of(links: TierLinks, in_flight: int) -> TierLinks:
    """Links of a tier, with the share of its capacity for each micro-batch in flight."""
    return links if links.limit_bytes is None else structs.replace(links, limit_bytes=links.limit_bytes // in_flight)


def _of_order(graph: StepGraph, order: list[int], budget_bytes: int | None, traffic: Traffic) -> PlannedStage:
    lean = program_within(graph, order)
    made = _stage(graph, lean, simulate(graph, lean), traffic)
    if budget_bytes is not None and made.timeline.peak_bytes > budget_bytes:
        return made
    quick = program_within(graph, order, 2**62 if budget_bytes is None else budget_bytes)
    return _stage(graph, quick, simulate(graph, quick), traffic)


def _stage(graph: StepGraph, program: Program, timeline: Timeline, traffic: Traffic) -> PlannedStage:
    deferred = traffic.deferred
    taken_bytes = traffic.received_bytes - traffic.passing_bytes
    loss_at = next(
        place
        for place, i in enumerate(program.instructions)
        if isinstance(i, Compute) and graph.ops[i.op].phase is Phase.LOSS
    )
    results, random_bytes = _saved(graph, program, loss_at)
    saved = sum(graph.storages[s].nbytes for s in results) + random_bytes + taken_bytes
    forward_seconds = timeline.started_at[loss_at]
    static = graph.static_bytes - traffic.received_bytes
    waits_until = _waits_until(graph, program, deferred)
    gone = static + _gone_bytes(graph, program, waits_until, traffic)
    memory = StageMemory(
        static_bytes=static,
        saved_bytes=saved,
        forward_bytes=max(timeline.bytes_at[: loss_at + 1]) - static,
        backward_bytes=max(timeline.bytes_at[loss_at:waits_until]) - static,
        after_bytes=graph.after_step_bytes,
        handed_bytes=min(traffic.sent_bytes, sum(graph.storages[s].nbytes for s in results & traffic.handed)),
        received_bytes=traffic.received_bytes,
        taken_bytes=taken_bytes,
        sent_bytes=traffic.sent_bytes,
        answer_bytes=traffic.answer_bytes,
        returned_bytes=traffic.returned_bytes,
        deferred_bytes=timeline.bytes_at[waits_until - 1] - gone if deferred else 0,
        weight_bytes=max(timeline.bytes_at[waits_until:], default=0) - gone if deferred else 0,
    )
    return PlannedStage(
        program=program,
        timeline=timeline,
        saved_bytes=saved,
        peak_bytes=timeline.peak_bytes + (traffic.in_flight - 1) * saved,
        memory=memory,
        forward_seconds=forward_seconds,
        backward_seconds=timeline.step_seconds - forward_seconds - graph.after_step_seconds,
        weight_seconds=timeline.step_seconds - graph.after_step_seconds - timeline.started_at[waits_until]
        if deferred
        else 0.0,
    )


def _gone_bytes(graph: StepGraph, program: Program, waits_until: int, traffic: Traffic) -> int:
    """Bytes of received tensors and returned gradients that the second part does not read, so they need not wait."""
    later = [graph.ops[i.op] for i in computes_in(program.instructions[waits_until:])]
    read = {s for op in later for s in (*op.reads, *(() if op.recompute_as is None else op.recompute_as.reads))}
    gradients = {s for s, storage in enumerate(graph.storages) if storage.kind is StorageKind.GRADIENT}
    return traffic.passing_bytes + sum(graph.storages[s].nbytes for s in (traffic.returning | gradients) - read)


def _waits_until(graph: StepGraph, program: Program, deferred: frozenset[int]) -> int:
    """Number of instructions up to the end of the backward part that others wait for, with the frees after it."""
    instructions = program.instructions
    if not deferred:
        return len(instructions)
    last = max(
        place
        for place, i in enumerate(instructions)
        if isinstance(i, Compute) and graph.ops[i.op].phase is Phase.BACKWARD and i.op not in deferred
    )
    while isinstance(instructions[last + 1], Free):
        last += 1
    return last + 1


def _saved(graph: StepGraph, program: Program, loss_at: int) -> tuple[set[int], int]:
    """Data of a micro-batch in memory between its passes: saved results, and bytes of generator states."""
    alive: set[int] = set()
    random_bytes: dict[int, int] = {}
    again = set(program.recomputed())
    elsewhere = program.tier_resident()
    for place, instruction in enumerate(program.instructions):
        if place > loss_at and not isinstance(instruction, Free):
            break
        if isinstance(instruction, Free):
            alive.discard(instruction.storage)
        elif isinstance(instruction, SwapIn):
            alive.add(instruction.storage)
        elif isinstance(instruction, Compute) and place != loss_at:
            op = graph.ops[instruction.op]
            if instruction.over is not None:
                alive.discard(instruction.over)
            alive.update(s for s in op.writes if s not in elsewhere)
            if op.random_state_bytes and instruction.op in again:
                random_bytes[instruction.op] = op.random_state_bytes
    return {s for s in alive if graph.storages[s].kind is StorageKind.FORWARD}, sum(random_bytes.values())


def _limited(graph: StepGraph, budget_bytes: int, saved_limit_bytes: int) -> StepGraph:
    """The step in which a plan within the budget saves no more than a limit when it reaches the loss."""
    loss = graph.ops[graph.loss_index]
    made_bytes = sum(graph.storages[s].nbytes for s in loss.writes if not graph.is_free(s))
    workspace_bytes = max(loss.workspace_bytes, budget_bytes - graph.static_bytes - saved_limit_bytes - made_bytes)

    def limited(op: Op) -> Op:
        return structs.replace(op, workspace_bytes=workspace_bytes) if op.phase is Phase.LOSS else op

    return structs.replace(graph, ops=tuple(map(limited, graph.ops)))
