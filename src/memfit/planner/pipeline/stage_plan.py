"""Plans a stage of a pipeline, which holds several micro-batches at once.

The step of a stage is that of one micro-batch. While it runs, the others that are in flight are between their passes,
so each of them takes what the plan keeps there, and what the stage received for it. How much a micro-batch may take
with that in mind, and how much of it may be saved, is decided for all stages of a device
(`memfit.planner.pipeline.memory_split`).

The planner of single steps minds one number, the peak. So what may be saved is capped by workspace of the loss, as
large as the room that must be left there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memfit.errors import BudgetError
from memfit.ir.graph import Op, Phase, StepGraph, StorageKind
from memfit.ir.program import Action, Program, plain_order
from memfit.ir.tiers import TierLinks
from memfit.planner.finalize.variant_selection import program_within
from memfit.planner.offload.search import find_program
from memfit.planner.pipeline.device_memory import StageMemory
from memfit.planner.search.segments import segment_order
from memfit.sim.simulator import Timeline, simulate

__all__ = ["PlannedStage", "Traffic", "plan_always", "plan_never", "plan_stage"]

_LEAST_TRIES = 0
"""Halvings in the search for the least budget in an error; with several limits, it is an upper estimate anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Micro-batches in flight and transfers of a stage, beside the micro-batch whose step is planned.

    Attributes:
        in_flight: the most micro-batches that are between or in their passes at once.
        received_bytes: what crosses the cut before the stage.
        passing_bytes: of that, what only passes through and is gone after the forward pass, its gradient after the
            backward pass.
        returning: the storages of what was received and a gradient is handed back for; only asked where ops are
            deferred.
        deferred: the ops of the backward pass that come last and can wait (`memfit.planner.pipeline.split_backward`).
        handed: the storages that go to the next stage.
        sent_bytes: what the next stage receives.
        answer_bytes: of gradients from the next stage.
        returned_bytes: of gradients for the stage before.
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
    """A program of one micro-batch, and what the stage takes with it.

    Attributes:
        program: of the stage's step.
        timeline: of that program alone.
        saved_bytes: what is held of a micro-batch between its passes, what the stage received included.
        peak_bytes: of the stage with all micro-batches that are in flight.
        memory: what it takes with each micro-batch.
        forward_seconds: of a micro-batch.
        backward_seconds: of a micro-batch, with recomputation.
        weight_seconds: the part of it that can wait.
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
) -> PlannedStage:
    """The fastest plan found for a stage.

    Args:
        graph: the step of one micro-batch.
        budget_bytes: of a micro-batch, without what is held of others.
        traffic: what passes through the stage.
        saved_limit_bytes: what may be saved of it between its passes, beside what was received; None for any number.
        seconds: roughly how long the search takes.
        last_resort: whether it is looked for a plan of any speed where none is found in that time.

    Raises:
        BudgetError: if none fits; its least budget is an upper estimate if what is saved is limited.
    """
    graph = replace(graph, tiers=tuple(_share_of(links, traffic.in_flight) for links in graph.tiers))

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
            *(limited, budget_bytes), seconds=seconds, least_tries=_LEAST_TRIES, last_resort=last_resort
        )
    except BudgetError:
        always = plan_always(graph, budget_bytes, traffic)  # a short search may miss it
        if fits(always):
            return always
        raise
    return _stage(graph, found.program, simulate(graph, found.program), traffic)


def plan_never(graph: StepGraph, budget_bytes: int | None, traffic: Traffic) -> PlannedStage:
    """Nothing is recomputed; every op in the quickest way for which the budget leaves room."""
    return _of_order(graph, plain_order(graph), budget_bytes, traffic)


def plan_always(graph: StepGraph, budget_bytes: int | None, traffic: Traffic) -> PlannedStage:
    """As little is saved as can be: forward ops that may run twice are recomputed before the backward pass."""
    return _of_order(graph, segment_order(graph, ()), budget_bytes, traffic)


def _share_of(links: TierLinks, in_flight: int) -> TierLinks:
    """Links of a tier, with the share of its capacity for each micro-batch in flight."""
    return links if links.limit_bytes is None else replace(links, limit_bytes=links.limit_bytes // in_flight)


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
        if i.action is Action.COMPUTE and graph.ops[i.index].phase is Phase.LOSS
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
    """Of what was received and what is handed back, what the second part does not read and so need not wait."""
    later = [graph.ops[i.index] for i in program.instructions[waits_until:] if i.action is Action.COMPUTE]
    read = {s for op in later for s in (*op.reads, *(() if op.recompute_as is None else op.recompute_as.reads))}
    gradients = {s for s, storage in enumerate(graph.storages) if storage.kind is StorageKind.GRADIENT}
    return traffic.passing_bytes + sum(graph.storages[s].nbytes for s in (traffic.returning | gradients) - read)


def _waits_until(graph: StepGraph, program: Program, deferred: frozenset[int]) -> int:
    """With how many instructions the part of the backward pass ends that is waited for; frees behind it included."""
    instructions = program.instructions
    if not deferred:
        return len(instructions)
    last = max(
        place
        for place, i in enumerate(instructions)
        if i.action is Action.COMPUTE and graph.ops[i.index].phase is Phase.BACKWARD and i.index not in deferred
    )
    while instructions[last + 1].action is Action.FREE:
        last += 1
    return last + 1


def _saved(graph: StepGraph, program: Program, loss_at: int) -> tuple[set[int], int]:
    """Data of a micro-batch in memory between its passes: saved results, and bytes of generators' states."""
    alive: set[int] = set()
    random_bytes: dict[int, int] = {}
    again = set(program.recomputed())
    elsewhere = program.tier_resident()
    for place, instruction in enumerate(program.instructions):
        if place > loss_at and instruction.action is not Action.FREE:
            break
        if instruction.action is Action.FREE:
            alive.discard(instruction.index)
        elif instruction.action is Action.SWAP_IN:
            alive.add(instruction.index)
        elif instruction.action is Action.COMPUTE and place != loss_at:
            op = graph.ops[instruction.index]
            if instruction.over is not None:
                alive.discard(instruction.over)
            alive.update(s for s in op.writes if s not in elsewhere)
            if op.random_state_bytes and instruction.index in again:
                random_bytes[instruction.index] = op.random_state_bytes
    return {s for s in alive if graph.storages[s].kind is StorageKind.FORWARD}, sum(random_bytes.values())


def _limited(graph: StepGraph, budget_bytes: int, saved_limit_bytes: int) -> StepGraph:
    """The step in which a plan within the budget keeps no more than a limit when it comes to the loss."""
    loss = graph.ops[graph.loss_index]
    made_bytes = sum(graph.storages[s].nbytes for s in loss.writes if not graph.is_free(s))
    workspace_bytes = max(loss.workspace_bytes, budget_bytes - graph.static_bytes - saved_limit_bytes - made_bytes)

    def limited(op: Op) -> Op:
        return replace(op, workspace_bytes=workspace_bytes) if op.phase is Phase.LOSS else op

    return replace(graph, ops=tuple(map(limited, graph.ops)))
