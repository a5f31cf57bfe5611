"""A program in numbers and in words: saved and recomputed results of every block of the model, and their cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from memfit.ir.fusion import fused_seconds
from memfit.ir.graph import Phase, StepGraph, StorageKind
from memfit.ir.instructions import Compute, Free, SwapIn, computes_in, freed_in
from memfit.ir.plan_file import Decision, Prediction
from memfit.ir.program import Program, as_they_run
from memfit.ir.tiers import Tier
from memfit.planner.bounds.lower_bound import widest_op_bytes
from memfit.sim.simulator import Timeline, live_storages_at, simulate_baseline
from memfit.units import format_bytes

__all__ = ["binding_place", "decisions", "ends_of_runs", "saved_storages", "prediction"]

_MOST_BLOCKS = 40
_MOST_ENDS = 4


def prediction(graph: StepGraph, timeline: Timeline, *, bound_seconds: float | None = None) -> Prediction:
    """Prediction of the simulator for a program, as a plan states it.

    Args:
        graph: the step.
        timeline: the timeline of a program of the step.
        bound_seconds: the least extra seconds any program has, if known.
    """
    bound = None
    if bound_seconds is not None and graph.seconds:
        bound = (graph.seconds + bound_seconds) / graph.plain_seconds - 1
    return Prediction(
        peak_bytes=timeline.peak_bytes,
        step_seconds=timeline.step_seconds,
        overhead=timeline.overhead,
        plain_peak_bytes=simulate_baseline(graph).peak_bytes,
        bound_overhead=bound,
        least_peak_bytes=widest_op_bytes(graph),
        out_bytes=timeline.out_bytes,
        in_bytes=timeline.in_bytes,
        overlap=timeline.overlap,
        stall_seconds=timeline.stall_seconds,
        host_bytes=timeline.tier_bytes.get(Tier.HOST, 0),
        disk_bytes=timeline.tier_bytes.get(Tier.DISK, 0),
    )


def saved_storages(graph: StepGraph, program: Program) -> frozenset[int]:
    """Forward storages alive when the loss starts."""
    ops = iter(as_they_run(graph, program.order()))
    alive: set[int] = set()
    for instruction in program.instructions:
        if not isinstance(instruction, Compute):
            if isinstance(instruction, SwapIn):
                alive.add(instruction.storage)
            elif isinstance(instruction, Free):
                alive.discard(instruction.storage)
            continue
        op = next(ops)
        if op.phase is Phase.LOSS:
            break
        alive.update(op.writes)
        if instruction.over is not None:
            alive.discard(instruction.over)
    return frozenset(s for s in alive if graph.storages[s].kind is StorageKind.FORWARD)


def decisions(graph: StepGraph, program: Program, timeline: Timeline) -> tuple[Decision, ...]:
    """Summarises a program block by block, in forward order.

    Args:
        graph: the step.
        program: the program that runs.
        timeline: its timeline from the simulator.

    Returns:
        One decision for each run of ops of one block.
    """
    all_saved = saved_storages(graph, program)
    recomputed = Counter(program.recomputed())
    recompute_seconds = _recompute_seconds(graph, program)
    tier_resident = program.tier_resident()
    swapped = program.swapped() | tier_resident
    in_slices = Counter(i.op for i in computes_in(program.instructions) if i.sliced)
    place = binding_place(graph, program, timeline)
    found: list[Decision] = []
    for number, (name, ops) in enumerate(_blocks(graph), start=1):
        stays = all_saved - swapped.keys()
        saved = [s for o in ops for s in graph.ops[o].writes if s in stays and graph.storages[s].nbytes > 0]
        saved_bytes = sum(graph.storages[s].nbytes for s in saved)
        runs = {o: recomputed[o] for o in ops if recomputed[o]}
        seconds = sum(recompute_seconds[o] for o in runs)
        sliced = sum(in_slices[o] for o in runs)
        away = [s for o in ops for s in graph.ops[o].writes if s in swapped]
        later: list[str] = []
        if runs:
            names = _counted(_short(graph.ops[o].target) for o, n in runs.items() for _ in range(n))
            later.append(f"recompute {names}" + (f" ({sliced} in slices)" if sliced else ""))
        if away:
            later.append(_swap_words(graph, ops, swapped) + (", in slices" if tier_resident.keys() & away else ""))
        found.append(
            Decision(
                block=str(number),
                module=name or "model",
                saves=_counted(
                    _short(graph.ops[o].target) for o in ops if any(s in saved for s in graph.ops[o].writes)
                ),
                saved_bytes=saved_bytes,
                later="; ".join(later),
                extra_seconds=seconds,
                reason=f"makes room at {place}" if later else "all it needs fits",
            )
        )
    return tuple(found)


def _swap_words(graph: StepGraph, ops: Sequence[int], swapped: Mapping[int, Tier]) -> str:
    """Text for the swapped results of a block: their ops, their bytes and their tiers."""
    away = [(o, s) for o in ops for s in graph.ops[o].writes if s in swapped]
    nbytes = sum(graph.storages[s].nbytes for _, s in away)
    where = ", ".join(dict.fromkeys(str(swapped[s]) for _, s in away))
    return f"swap {_counted(_short(graph.ops[o].target) for o, _ in away)} ({format_bytes(nbytes)}, {where})"


def _recompute_seconds(graph: StepGraph, program: Program) -> dict[int, float]:
    """For each op, the time of its runs after the first."""
    ran: set[int] = set()
    seconds: dict[int, float] = defaultdict(float)
    for run in program.runs():
        computes = computes_in(run)
        ops = [graph.ops[i.op].later if i.op in ran else graph.ops[i.op] for i in computes]
        if computes and computes[0].sliced:
            took = fused_seconds(ops, set(freed_in(run)), [i.over for i in computes])
        else:
            took = [op.run_seconds(i.chunks, in_place=i.over is not None) for op, i in zip(ops, computes, strict=True)]
        for instruction, more in zip(computes, took, strict=True):
            if instruction.op in ran:
                seconds[instruction.op] += more
            ran.add(instruction.op)
    return seconds


def binding_place(graph: StepGraph, program: Program, timeline: Timeline) -> str:
    """The place of the peak, as text for users."""
    if timeline.peak_position >= len(program.instructions):
        return "optimizer.step()"
    # A storage that is swapped in is in memory together with the storages of the op before.
    computes = computes_in(program.instructions[: timeline.peak_position + 1]) or computes_in(program.instructions)[:1]
    op = graph.ops[computes[-1].op]
    widest = live_storages_at(graph, program, timeline.peak_position)[:1]
    beside = f", beside {graph.storages[widest[0]].name}" if widest else ""
    return f"{op.module or 'model'} {_short(op.target)} ({op.phase}{beside})"


def ends_of_runs(graph: StepGraph) -> str:
    """Forward ops that read whole results that could be passed on in slices, as text; empty if there are none."""
    sliced: set[int] = set()
    ends: Counter[str] = Counter()
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            break
        if op.by_slices is not None and op.by_slices.first:
            sliced.update(s for s in op.writes if s not in op.by_slices.sums)
        elif not sliced.isdisjoint(op.reads):
            ends[f"{_short(op.target)} in {op.module or 'the model'}"] += 1
    found = [name if n == 1 else f"{n} {name}" for name, n in ends.items()]
    more = [f"{len(found) - _MOST_ENDS} more"] if len(found) > _MOST_ENDS else []
    return ", ".join(found[:_MOST_ENDS] + more)


def _blocks(graph: StepGraph) -> list[tuple[str, list[int]]]:
    """Runs of forward ops of one module, at the greatest depth that gives a readable number of blocks."""
    forward = [i for i, op in enumerate(graph.ops) if op.phase is Phase.FORWARD]
    runs: list[tuple[str, list[int]]] = []
    for depth in (4, 3, 2, 1):
        runs = []
        for index in forward:
            name = ".".join(graph.ops[index].module.split(".")[:depth])
            if runs and runs[-1][0] == name:
                runs[-1][1].append(index)
            else:
                runs.append((name, [index]))
        if len(runs) <= _MOST_BLOCKS:
            break
    return runs


def _short(target: str) -> str:
    name = target.removeprefix("aten.").removeprefix("memfit.").split(".")[0].strip("_")
    return name.removeprefix("native_").removesuffix("_legit_functional")


def _counted(names: Iterable[str]) -> str:
    counts = Counter(names)
    return ", ".join(name if n == 1 else f"{n} {name}" for name, n in counts.items())
