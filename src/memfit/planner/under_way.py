"""Plans a stage of a pipeline, which holds several micro-batches at once.

The step of a stage is that of one micro-batch. While it runs, the others that are under way are between their passes,
so each of them takes what the plan keeps there, and what the stage received for it. A plan therefore counts what it
keeps as often as there are micro-batches under way, and all else once:

    static + (under way - 1) x (kept + received) + peak of one micro-batch beyond static <= budget

The planner of single steps minds one number, the peak. So what may be kept is capped by workspace of the loss, as large
as the room that must be left there, and the others take from the budget; the cap is varied and the fastest plan taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memfit.errors import BudgetError
from memfit.planner.hybrid import find_program
from memfit.planner.schedule import StageMemory
from memfit.planner.ways import program_within
from memfit.step.graph import Op, Phase, StepGraph, StorageKind
from memfit.step.links import TierLinks
from memfit.step.program import Action, Program, plain_order
from memfit.step.simulate import Timeline, simulate
from memfit.strategies.segments import segment_order
from memfit.units import format_bytes

__all__ = ["PlannedStage", "Traffic", "plan_always", "plan_never", "plan_stage"]

_CAPS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Of the most that could be kept of each micro-batch, tried in this order until the plans get slower."""

_LEAST_TRIES = 0
"""What an error says that one of several caps needs at least is an upper estimate anyway."""

_GOOD_ENOUGH = 0.02
"""A plan that runs so little again needs no other cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What passes through a stage beside the micro-batch whose step is planned.

    Attributes:
        under_way: the most micro-batches that are between or in their passes at once.
        received_bytes: what crosses the cut before the stage.
        deferred: the ops of the backward pass that come last and can wait (`memfit.planner.deferral`).
    """

    under_way: int = 1
    received_bytes: int = 0
    deferred: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A program of one micro-batch, and what the stage takes with it.

    Attributes:
        program: of the stage's step.
        timeline: of that program alone.
        kept_bytes: what is held of a micro-batch between its passes, what the stage received included.
        peak_bytes: of the stage with all that are under way.
        memory: what it takes with each micro-batch.
        forward_seconds: of a micro-batch.
        backward_seconds: of a micro-batch, with what runs again.
        weight_seconds: the part of it that can wait.
    """

    program: Program
    timeline: Timeline
    kept_bytes: int
    peak_bytes: int
    memory: StageMemory
    forward_seconds: float
    backward_seconds: float
    weight_seconds: float = 0.0


def plan_stage(graph: StepGraph, budget_bytes: int, traffic: Traffic, *, seconds: float = 2.0) -> PlannedStage:
    """The fastest plan found with which a stage keeps its budget.

    Args:
        graph: the step of one micro-batch.
        budget_bytes: of the stage.
        traffic: what passes through the stage.
        seconds: roughly how long each search takes.

    Raises:
        BudgetError: if none fits; its least budget is an upper estimate if there are several under way.
    """
    under_way = traffic.under_way
    graph = replace(graph, tiers=tuple(_share_of(links, under_way) for links in graph.tiers))
    never = plan_never(graph, budget_bytes, traffic)
    if never.peak_bytes <= budget_bytes:
        return never
    if under_way == 1:
        found = find_program(graph, budget_bytes, seconds=seconds, least_tries=_LEAST_TRIES)
        return _stage(graph, found.program, found.timeline, traffic)
    room = budget_bytes - graph.static_bytes - (under_way - 1) * traffic.received_bytes
    best: PlannedStage | None = None
    failure: BudgetError | None = None
    caps = list(_CAPS)
    while caps:
        share = caps.pop(0)
        cap_bytes = int(share * max(0, room) / under_way)
        capped = _capped(graph, budget_bytes, cap_bytes, traffic)
        try:
            found = find_program(capped, budget_bytes, seconds=seconds, least_tries=_LEAST_TRIES)
        except BudgetError as error:
            failure = error if failure is None or error.least_bytes < failure.least_bytes else failure
            if share == min(_CAPS) and best is None:
                break  # nothing fits where next to nothing is kept
            if share == max(_CAPS):
                caps.insert(0, caps.pop())
            continue
        made = _stage(graph, found.program, simulate(graph, found.program), traffic)
        if made.peak_bytes > budget_bytes:
            failure = failure or _too_much(made.peak_bytes, budget_bytes)
            continue
        if best is not None and made.timeline.step_seconds >= best.timeline.step_seconds:
            break
        best = made
        if made.timeline.recompute_seconds < _GOOD_ENOUGH * graph.seconds:
            break
    if best is None:
        assert failure is not None
        raise BudgetError(
            f"a stage with {under_way} micro-batches under way does not fit {format_bytes(budget_bytes)}: {failure}",
            budget_bytes=budget_bytes,
            least_bytes=max(failure.least_bytes, budget_bytes + 1),
            binding=failure.binding,
        )
    return best


def plan_never(graph: StepGraph, budget_bytes: int | None, traffic: Traffic) -> PlannedStage:
    """Nothing runs again; every op in the quickest way for which the budget leaves room."""
    return _of_order(graph, plain_order(graph), budget_bytes, traffic)


def plan_always(graph: StepGraph, budget_bytes: int | None, traffic: Traffic) -> PlannedStage:
    """Nothing is kept but what was received: the whole forward pass runs again before the backward pass."""
    return _of_order(graph, segment_order(graph, ()), budget_bytes, traffic)


def _too_much(peak_bytes: int, budget_bytes: int) -> BudgetError:
    return BudgetError(f"its plan takes {format_bytes(peak_bytes)}", budget_bytes=budget_bytes, least_bytes=peak_bytes)


def _share_of(links: TierLinks, under_way: int) -> TierLinks:
    """What a tier has room for of each micro-batch."""
    return links if links.limit_bytes is None else replace(links, limit_bytes=links.limit_bytes // under_way)


def _of_order(graph: StepGraph, order: list[int], budget_bytes: int | None, traffic: Traffic) -> PlannedStage:
    lean = program_within(graph, order)
    made = _stage(graph, lean, simulate(graph, lean), traffic)
    if budget_bytes is not None and made.peak_bytes > budget_bytes:
        return made
    others = made.peak_bytes - made.timeline.peak_bytes
    limit = budget_bytes - others if budget_bytes is not None else 2**62
    quick = program_within(graph, order, limit)
    return _stage(graph, quick, simulate(graph, quick), traffic)


def _stage(graph: StepGraph, program: Program, timeline: Timeline, traffic: Traffic) -> PlannedStage:
    received_bytes, deferred = traffic.received_bytes, traffic.deferred
    loss_at = next(
        place
        for place, i in enumerate(program.instructions)
        if i.action is Action.COMPUTE and graph.ops[i.index].phase is Phase.LOSS
    )
    kept = _kept_bytes(graph, program, loss_at) + received_bytes
    forward_seconds = timeline.started_at[loss_at]
    static = graph.static_bytes - received_bytes
    waits_until = _waits_until(graph, program, deferred)
    gone = static + graph.gradient_bytes  # what is handed back is not held while the rest waits
    memory = StageMemory(
        static_bytes=static,
        kept_bytes=kept,
        forward_bytes=max(timeline.bytes_at[: loss_at + 1]) - static,
        backward_bytes=max(timeline.bytes_at[loss_at:waits_until]) - static,
        after_bytes=graph.after_step_bytes,
        deferred_bytes=timeline.bytes_at[waits_until - 1] - gone if deferred else 0,
        weight_bytes=max(timeline.bytes_at[waits_until:], default=0) - gone if deferred else 0,
    )
    return PlannedStage(
        program=program,
        timeline=timeline,
        kept_bytes=kept,
        peak_bytes=timeline.peak_bytes + (traffic.under_way - 1) * kept,
        memory=memory,
        forward_seconds=forward_seconds,
        backward_seconds=timeline.step_seconds - forward_seconds - graph.after_step_seconds,
        weight_seconds=timeline.step_seconds - graph.after_step_seconds - timeline.started_at[waits_until]
        if deferred
        else 0.0,
    )


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


def _kept_bytes(graph: StepGraph, program: Program, loss_at: int) -> int:
    """What of a micro-batch is in memory between its passes: results that are kept, and states of generators."""
    alive: set[int] = set()
    random_bytes: dict[int, int] = {}
    again = set(program.recomputed())
    elsewhere = program.streamed()
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
    kept = sum(graph.storages[s].nbytes for s in alive if graph.storages[s].kind is StorageKind.FORWARD)
    return kept + sum(random_bytes.values())


def _capped(graph: StepGraph, budget_bytes: int, cap_bytes: int, traffic: Traffic) -> StepGraph:
    """The step beside others that keep so much each, in which a plan of the budget keeps no more than that itself."""
    static_bytes = graph.static_bytes + (traffic.under_way - 1) * (cap_bytes + traffic.received_bytes)
    loss = graph.ops[graph.loss_index]
    beside = sum(graph.storages[s].nbytes for s in {*loss.reads, *loss.writes} if not graph.is_free(s))
    workspace_bytes = max(loss.workspace_bytes, budget_bytes - static_bytes - cap_bytes - beside)

    def capped(op: Op) -> Op:
        return replace(op, workspace_bytes=workspace_bytes) if op.phase is Phase.LOSS else op

    return replace(graph, static_bytes=static_bytes, ops=tuple(map(capped, graph.ops)))
