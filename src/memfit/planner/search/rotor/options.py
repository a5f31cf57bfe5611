"""The options to run a few blocks: which storages to save, and in which order to recompute the others.

**Saved storages**: the sets form the lower hull of (bytes saved, seconds to recompute the rest). A point of the hull
minimises `seconds + price * bytes`, which is a minimum cut: its linear relaxation is integral, so the simplex method
finds it.

**Order**: the backward ops run in their order; a dropped storage that one of them needs is recomputed right before this
op and then held until its last use. Where memory peaks, idle storages are dropped after their last use before the peak
and recomputed once more after the peak, the cheapest first, peak by peak. Each such descent is an option too.

Idea: the options of Rockmate (Zhao et al., ICML 2023), which solves an integer program for each pair of budgets.

Known limits: a storage recomputed for one backward op cannot be dropped and recomputed again for the same op.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from memfit.planner.search.rotor.shape import Shape, cone, profile
from memfit.planner.solver import Milp, Status, solve

__all__ = ["Backward", "Option", "options_of"]

_SLACK = 1.5
"""Largest ratio of the peak after a descent to the peak before it."""

_HULL = 2e-3
"""Least relative distance of a third point below the line between two points of the hull, so that it counts."""

_BATCH = 32
"""Ratio of the peak to the bytes that a descent drops at once, roughly."""

_STEP = 0.98
"""A descent is worth an option of its own if it lowers the peak at least to this share."""


@dataclass(frozen=True, slots=True)
class Backward:
    """A backward pass through a run of blocks.

    Attributes:
        sequence: its ops, forward ones repeated.
        peak: bytes while it runs, without the boundary before the run.
        seconds: time of the repeated forward ops.
    """

    sequence: tuple[int, ...]
    peak: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Option:
    """How to run several blocks forward, and from there backward.

    Attributes:
        saved: storages of the run to hold until its backward pass, in addition to the boundary after it.
        backwards: backward passes, from the fastest to the narrowest.
    """

    saved: frozenset[int]
    backwards: tuple[Backward, ...]


@lru_cache(maxsize=4096)
def options_of(shape: Shape, narrow: int, patience: int) -> tuple[Option, ...]:
    """Every option worth considering.

    Args:
        shape: the run of blocks.
        narrow: peak below which no narrower backward pass is searched for.
        patience: descents in a row that may fail to lower the peak.

    Returns:
        Options from the one that saves most to the one that saves nothing.
    """
    options: list[Option] = []
    for saved in reversed(_hull(shape)):
        rivals = [backward for option in options for backward in option.backwards]
        options.append(Option(saved, tuple(_backwards(shape, saved, rivals, narrow=narrow, patience=patience))))
    return tuple(reversed(options))


def _hull(shape: Shape) -> list[frozenset[int]]:
    """Sets of storages to save, for every price of a byte; the largest set first, the empty set last."""
    present = {*shape.given, *shape.out}
    wanted = {s for op in shape.ops[shape.forward :] for s in op.reads if shape.makers[s] >= 0}
    nothing: frozenset[int] = frozenset()
    total = sum(shape.sizes[s] for s in wanted - present)
    if not total:
        return [nothing]

    def cost(saved: frozenset[int]) -> tuple[int, float]:
        again = cone(shape, wanted, present | saved)
        return sum(shape.sizes[s] for s in saved), sum(shape.ops[i].seconds for i in again)

    def between(left: frozenset[int], right: frozenset[int]) -> list[frozenset[int]]:
        (more, fast), (less, slow) = cost(left), cost(right)
        if more <= less or slow <= fast:
            return []
        price = (slow - fast) / (more - less)
        middle = _priced(shape, wanted, price)
        nbytes, seconds = cost(middle)
        if middle in (left, right) or seconds + price * nbytes >= (fast + price * more) * (1 - _HULL):
            return []
        return [*between(left, middle), middle, *between(middle, right)]

    seconds = sum(op.seconds for op in shape.ops[: shape.forward])
    most = _priced(shape, wanted, 1e-4 * (seconds or 1.0) / total)
    return [most, *between(most, nothing), nothing] if most else [nothing]


def _priced(shape: Shape, wanted: set[int], price: float) -> frozenset[int]:
    """Storages to save when a saved byte costs `price` seconds."""
    problem = Milp()
    forward = shape.ops[: shape.forward]
    unit = max((op.seconds for op in forward), default=0.0) or 1.0
    again = [problem.variable(cost=op.seconds / unit, integer=False) for op in forward]
    keep: dict[int, int] = {}
    present = {*shape.given, *shape.out}
    rows = [(s, -1) for s in wanted] + [(s, again[i]) for i, op in enumerate(forward) for s in op.reads]
    for s, reader in rows:
        if s in present or shape.makers[s] < 0:
            continue
        if s not in keep:
            keep[s] = problem.variable(cost=price * shape.sizes[s] / unit, integer=False)
        terms = {keep[s]: 1.0, again[shape.makers[s]]: 1.0}
        problem.row(terms | ({reader: -1.0} if reader >= 0 else {}), lower=0.0 if reader >= 0 else 1.0)
    solution = solve(problem, seconds=5.0)
    assert solution.status is Status.OPTIMAL
    return frozenset(s for s, variable in keep.items() if solution.values[variable] > 0.5)


@dataclass(frozen=True, slots=True)
class _Run:
    """A backward pass in detail: by op its memory and the backward op it serves; by backward op the live storages."""

    backward: Backward
    bytes_at: list[int]
    stages: list[int]
    alive: list[frozenset[int]]


_Drops = frozenset[tuple[int, int]]
"""Pairs of a storage and the stage (of a backward op) after which it is dropped; -1 is before the first stage."""


def _backwards(
    shape: Shape, saved: frozenset[int], rivals: list[Backward], *, narrow: int, patience: int
) -> list[Backward]:
    """Backward passes, each slower and narrower than the one before; ends where one of `rivals` is as good."""
    lasting = _lasting(shape)
    drops: _Drops = frozenset()
    run = _run(shape, saved, drops, lasting)
    found = [run.backward]
    left = patience
    while found[-1].peak > narrow and left:
        step = _descend(shape, saved, drops, lasting, run)
        if step is None:
            break
        drops, run = step
        left -= 1
        if any(r.peak <= run.backward.peak and r.seconds <= run.backward.seconds for r in rivals):
            break
        if run.backward.peak <= _STEP * found[-1].peak:
            found.append(run.backward)
            left = patience
    return found


def _lasting(shape: Shape) -> frozenset[int]:
    """Storages worth holding once they are recomputed: a backward op reads them, or several forward ops do."""
    uses = [0] * len(shape.sizes)
    for index, op in enumerate(shape.ops):
        for s in op.reads:
            uses[s] += 1 if index < shape.forward else 2
    return frozenset(s for s, count in enumerate(uses) if count > 1)


def _run(shape: Shape, saved: frozenset[int], drops: _Drops, lasting: frozenset[int]) -> _Run:
    """Runs the backward ops, each after the recomputation of storages that it needs and that are not held."""
    dropped: dict[int, list[int]] = {}
    for s, stage in drops:
        dropped.setdefault(stage, []).append(s)
    held = {*shape.given, *shape.out, *saved}.difference(dropped.get(-1, ()))
    sequence: list[int] = []
    stages: list[int] = []
    alive: list[frozenset[int]] = []
    for stage in range(len(shape.ops) - shape.forward):
        index = shape.forward + stage
        alive.append(frozenset(held))
        again = cone(shape, shape.ops[index].reads, held)
        sequence.extend((*again, index))
        stages.extend([stage] * (len(again) + 1))
        held.update(s for i in again for s in shape.ops[i].writes if s in lasting)
        held.difference_update(dropped.get(stage, ()))
    bytes_at, _ = profile(shape, sequence, shape.leaving)
    seconds = sum(shape.ops[i].seconds for i in sequence if i < shape.forward)
    return _Run(Backward(tuple(sequence), max(bytes_at, default=0), seconds), bytes_at, stages, alive)


def _descend(
    shape: Shape, saved: frozenset[int], drops: _Drops, lasting: frozenset[int], run: _Run
) -> tuple[_Drops, _Run] | None:
    """Drops idle storages at the peak, the cheapest to recompute for which the peak stays within `_SLACK`."""
    sequence, peak = run.backward.sequence, run.backward.peak
    position = run.bytes_at.index(peak)
    busy = {*shape.ops[sequence[position]].reads, *shape.ops[sequence[position]].writes, *shape.given}
    _, live = profile(shape, sequence[position + 1 :], shape.leaving)
    idle: dict[int, list[int]] = {s: [] for s in live - busy if shape.makers[s] >= 0 and shape.sizes[s] * 64 >= peak}
    for p, i in enumerate(sequence):
        for s in (*shape.ops[i].reads, *shape.ops[i].writes):
            if s in idle:
                idle[s].append(p)
    choices: list[tuple[float, tuple[int, int]]] = []
    for s, uses in idle.items():
        before = max((run.stages[p] for p in uses if p < position), default=-1)
        after = min(run.stages[p] for p in uses if p > position)
        if before < after and (s, before) not in drops:
            again = cone(shape, [s], run.alive[after] - {s})
            choices.append((sum(shape.ops[i].seconds for i in again) / shape.sizes[s], (s, before)))
    choices.sort()
    batch = 1 + sum(accumulated * _BATCH < peak for accumulated in accumulate(shape.sizes[s] for _, (s, _) in choices))
    for some in (choices[:batch], *([choice] for choice in choices)):
        changed = drops.union(drop for _, drop in some)
        other = _run(shape, saved, changed, lasting)
        if other.backward.peak <= _SLACK * peak:
            return changed, other
    return None
