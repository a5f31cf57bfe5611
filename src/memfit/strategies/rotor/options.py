"""The ways to run a few blocks: what to keep of them, and in which order to make the rest again.

**What to keep** is the lower hull of (bytes kept, seconds to make the rest again). A point of the hull minimises
`seconds + price * bytes`, which is a minimum cut: its linear relaxation is integral, so the simplex method finds it.

**In which order**: the backward ops run in their order; what one of them needs and was dropped is made right before
it and then held until its last use. Where memory peaks, what idles there is dropped again after its last use before
the peak and made once more after it: cheapest first, one peak after the other. Each step of that descent is an
option too.

Idea: the options of Rockmate (Zhao et al., ICML 2023), which solves an integer program for each pair of budgets.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from memfit.planner.solver import Milp, Status, solve
from memfit.strategies.rotor.shape import Shape, cone, profile

__all__ = ["Backward", "Option", "options_of"]

_MIB = float(1 << 20)


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
    """A way to run a run of blocks forward, and from there backward.

    Attributes:
        kept: storages of the run to hold until its backward pass, beside the boundary after it.
        nbytes: their bytes and those of the boundary after the run.
        again: forward ops that make them from the boundary before the run.
        backwards: from the fastest to the narrowest.
    """

    kept: frozenset[int]
    nbytes: int
    again: tuple[int, ...]
    backwards: tuple[Backward, ...]


@lru_cache(maxsize=4096)
def options_of(shape: Shape, narrow: int) -> tuple[Option, ...]:
    """Every way worth considering.

    Args:
        shape: the run of blocks.
        narrow: peak below which a narrower backward pass is not worth looking for.

    Returns:
        Options from the one that keeps most to the one that keeps nothing.
    """
    return tuple(
        Option(
            kept=kept,
            nbytes=sum(shape.sizes[s] for s in kept.union(shape.out)),
            again=tuple(cone(shape, kept.union(shape.out), shape.given)),
            backwards=_backwards(shape, kept, narrow),
        )
        for kept in _hull(shape)
    )


def _hull(shape: Shape) -> list[frozenset[int]]:
    """What to keep, at every price of a byte; most first, nothing last."""
    optional = sorted({s for op in shape.ops for s in op.reads if shape.makers[s] >= 0} - {*shape.given, *shape.out})
    everything = frozenset(s for op in shape.ops[shape.forward :] for s in op.reads if s in optional)

    def cost(kept: Collection[int]) -> tuple[int, float]:
        again = cone(shape, _wanted(shape), {*shape.given, *shape.out, *kept})
        return sum(shape.sizes[s] for s in kept), sum(shape.ops[i].seconds for i in again)

    def between(left: frozenset[int], right: frozenset[int]) -> list[frozenset[int]]:
        (more, fast), (less, slow) = cost(left), cost(right)
        if more <= less or slow <= fast:
            return []
        price = (slow - fast) / (more - less)
        middle = _priced(shape, optional, price)
        nbytes, seconds = cost(middle)
        if seconds + price * nbytes >= (fast + price * more) * (1 - 1e-9) or middle in (left, right):
            return []
        return [*between(left, middle), middle, *between(middle, right)]

    seconds = sum(op.seconds for op in shape.ops[: shape.forward])
    total = sum(shape.sizes[s] for s in optional)
    most = _priced(shape, optional, 1e-4 * seconds / total) if everything and total else everything
    nothing: frozenset[int] = frozenset()
    if not most:
        return [nothing]
    return [most, *between(most, nothing), nothing]


def _wanted(shape: Shape) -> list[int]:
    return list({s: None for op in shape.ops[shape.forward :] for s in op.reads if shape.makers[s] >= 0})


def _priced(shape: Shape, optional: list[int], price: float) -> frozenset[int]:
    """What to keep when a kept byte costs `price` seconds."""
    problem = Milp()
    unit = max((op.seconds for op in shape.ops[: shape.forward]), default=0.0) or 1.0
    keep = {s: problem.variable(cost=price * shape.sizes[s] / unit, integer=False) for s in optional}
    again = [problem.variable(cost=op.seconds / unit, integer=False) for op in shape.ops[: shape.forward]]
    present = {*shape.given, *shape.out}
    for s in _wanted(shape):
        if s not in present:
            problem.row({keep[s]: 1.0, again[shape.makers[s]]: 1.0}, lower=1.0)
    for index, op in enumerate(shape.ops[: shape.forward]):
        for s in op.reads:
            if s not in present and shape.makers[s] >= 0:
                problem.row({keep[s]: 1.0, again[shape.makers[s]]: 1.0, again[index]: -1.0}, lower=0.0)
    solution = solve(problem, seconds=5.0, relax=True)
    assert solution.status is Status.OPTIMAL
    return frozenset(s for s, variable in keep.items() if solution.values[variable] > 0.5)


def _backwards(shape: Shape, kept: frozenset[int], narrow: int) -> tuple[Backward, ...]:
    """Backward passes, each slower and narrower than the one before."""
    drops: frozenset[tuple[int, int]] = frozenset()
    best = _run(shape, kept, drops)
    found = [best[0]]
    while best[0].peak > narrow:
        step = _descend(shape, kept, drops, best)
        if step is None:
            break
        drops, best = step
        if best[0].peak < found[-1].peak:
            found.append(best[0])
    front: list[Backward] = []
    for run in reversed(found):  # a later one may also be faster
        if not front or run.seconds < front[-1].seconds:
            front.append(run)
    return tuple(reversed(front))


_Run = tuple[Backward, list[int], list[int], int]
"""A backward pass, the memory at its ops, the stages they belong to, and how often the peak is reached."""


def _run(shape: Shape, kept: frozenset[int], drops: frozenset[tuple[int, int]]) -> _Run:
    """Runs the backward ops; `drops` are storages to forget after the stage of a backward op (-1: at the start)."""
    alive = {*shape.given, *shape.out, *kept} - {s for s, stage in drops if stage == -1}
    sequence: list[int] = []
    stages: list[int] = []
    for stage in range(len(shape.ops) - shape.forward):
        index = shape.forward + stage
        again = cone(shape, shape.ops[index].reads, alive)
        sequence.extend((*again, index))
        stages.extend([stage] * (len(again) + 1))
        for i in again:
            alive.update(shape.ops[i].writes)
        alive.difference_update(s for s, when in drops if when == stage)
    bytes_at, _ = profile(shape, sequence, shape.leaving)
    peak = max(bytes_at, default=0)
    seconds = sum(shape.ops[i].seconds for i in sequence if i < shape.forward)
    return Backward(tuple(sequence), peak, seconds), bytes_at, stages, bytes_at.count(peak)


def _descend(
    shape: Shape, kept: frozenset[int], drops: frozenset[tuple[int, int]], best: _Run
) -> tuple[frozenset[tuple[int, int]], _Run] | None:
    """The cheapest drop that lowers the peak, or makes it rarer."""
    run, bytes_at, stages, count = best
    position = bytes_at.index(run.peak)
    op = shape.ops[run.sequence[position]]
    _, live = profile(shape, run.sequence[position + 1 :], shape.leaving)
    idle = [s for s in live - {*op.reads, *op.writes, *shape.given} if shape.makers[s] >= 0 and shape.sizes[s]]
    choices = []
    for s in idle:
        for stage in (stages[position] - 1, stages[position]):
            if (s, stage) in drops:
                continue
            changed = drops | {(s, stage)}
            other = _run(shape, kept, changed)
            if (other[0].peak, other[3]) < (run.peak, count):
                gain = run.peak - other[0].peak
                choices.append(((other[0].seconds - run.seconds) / (gain + 1), -gain, s, changed, other))
    if not choices:
        return None
    *_, changed, other = min(choices, key=lambda choice: choice[:3])
    return changed, other
