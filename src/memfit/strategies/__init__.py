"""Known strategies by name, each in its own file, all with one signature.

A strategy takes a step graph and a budget and returns an order of ops, which `program` turns into a program, each op
whole or in chunks as memory allows. A strategy that swaps also returns the tier of each swapped storage. So every
strategy, however old, is judged by the same simulator and runs on the same runtime. A name may have a parameter after a
colon: `sequential:4`, `openai-collection:layer1.0,layer2.0`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial

from memfit.errors import SpecError
from memfit.ir.graph import StepGraph
from memfit.ir.program import Program, whole_program
from memfit.ir.tiers import Tier
from memfit.planner.finalize.variant_selection import leanest, program_within
from memfit.planner.offload.model import swapping_step
from memfit.planner.offload.transfer_schedule import with_transfers
from memfit.planner.search import rotor
from memfit.planner.search.portfolio import auto_order
from memfit.sim.simulator import simulate
from memfit.strategies import (
    every_block,
    hybrid,
    knapsack,
    micro_batch,
    milp,
    mu_two,
    none,
    openai,
    sequential,
    sqrt,
    swap,
    tile,
)

__all__ = ["Strategy", "check_name", "find", "grid", "names", "order_and_swaps", "program", "swaps"]

Strategy = Callable[[StepGraph, int | None], list[int]]


_PLAIN: dict[str, Strategy] = {
    "auto": auto_order,
    "none": none.order,
    "sqrt": sqrt.order,
    "every-block": every_block.order,
    "openai-speed": openai.speed_order,
    "openai-memory": openai.memory_order,
    "knapsack": knapsack.order,
    "mu-two": mu_two.order,
    "rotor": rotor.order,
    "milp": milp.order,
}
_SWAPPING: dict[str, Callable[[StepGraph, int | None], tuple[list[int], Mapping[int, Tier]]]] = {
    "swap": swap.swaps,
    "hybrid": hybrid.swaps,
}
_WITH_PARAMETER = {
    "sequential": "a number of segments",
    "openai-collection": "names of modules to save",
    "tile": "a grid such as 4x4",
    "micro-batch": "a number of micro-batches, two or more",
}


def names() -> tuple[str, ...]:
    """All names; those that take a parameter end in a colon."""
    return (*_PLAIN, *_SWAPPING, *(f"{name}:" for name in _WITH_PARAMETER))


def swaps(name: str) -> bool:
    """Whether a strategy swaps where there are tiers."""
    return name == "auto" or name in _SWAPPING


def grid(name: str) -> tuple[int, ...]:
    """The fixed grid of a strategy: rows, columns, parts of the batch; empty for strategies without a fixed grid.

    Raises:
        SpecError: if the parameter of such a strategy gives none.
    """
    base, _, parameter = name.partition(":")
    found: tuple[int, ...] = ()
    if base == "tile":
        found = tile.grid_of(parameter) or ()
    elif base == "micro-batch" and (parts := micro_batch.slices_of(parameter)):
        found = (1, 1, parts)
    if not found and base in ("tile", "micro-batch"):
        raise SpecError(f"strategy {base!r} needs {_WITH_PARAMETER[base]} after a colon (strategy: {name!r})")
    return found


def check_name(name: str) -> None:
    """Refuses a name that is not a strategy.

    Raises:
        SpecError: if there is no such strategy, with similar names.
    """
    if name not in _SWAPPING and not grid(name):
        find(name)


def program(name: str, graph: StepGraph, budget_bytes: int | None) -> Program:
    """The program that a strategy makes for a step; `none` runs every op once, whole and in new memory.

    Raises:
        SpecError: if there is no such strategy, or it swaps and the step has no tiers.
        BudgetError: if the strategy respects budgets and no program fits.
    """
    if name == "none":
        return whole_program(graph)
    if grid(name):
        make = micro_batch.program if name.startswith("micro-batch") else tile.program
        return make(leanest(graph))
    order, placed = order_and_swaps(name, leanest(graph), budget_bytes)
    if not placed:
        return program_within(graph, order, budget_bytes)
    swapping = swapping_step(graph, placed)
    found = program_within(swapping, order, budget_bytes)
    limit = max(budget_bytes or 0, simulate(swapping, found).peak_bytes)
    return with_transfers(graph, swapping, found, placed, limit)


def order_and_swaps(name: str, graph: StepGraph, budget_bytes: int | None) -> tuple[list[int], Mapping[int, Tier]]:
    """The order of a strategy, and the tiers of swapped storages; second runs of their ops stand for transfers back.

    Raises:
        SpecError: if there is no such strategy, or it swaps and the step has no tiers.
        BudgetError: if the strategy respects budgets and no order fits.
    """
    if name not in _SWAPPING:
        return find(name)(graph, budget_bytes), {}
    if not graph.tiers:
        raise SpecError(f"strategy {name!r} needs a tier to swap to; pass tiers='disk', or 'host' on CUDA")
    return _SWAPPING[name](graph, budget_bytes)


def find(name: str) -> Strategy:
    """The strategy with a name, if an order alone describes its result.

    Raises:
        SpecError: if there is no such strategy, with similar names.
    """
    base, colon, parameter = name.partition(":")
    if base in _PLAIN or base in _SWAPPING:
        if colon:
            raise SpecError(f"strategy {base!r} takes no parameter (strategy: {name!r})")
        if base in _SWAPPING:
            raise SpecError(f"strategy {base!r} swaps, so an order alone does not say what it does")
        return _PLAIN[base]
    if base in _WITH_PARAMETER:
        if grid(name):
            raise SpecError(f"strategy {name!r} says how ops are fused, so an order alone does not say what it does")
        if not parameter:
            raise SpecError(f"strategy {base!r} needs {_WITH_PARAMETER[base]} after a colon (strategy: {name!r})")
        if base == "openai-collection":
            return partial(openai.collection_order, modules=tuple(parameter.split(",")))
        if not parameter.isdecimal() or int(parameter) < 1:
            raise SpecError(f"strategy 'sequential' needs a positive number of segments (strategy: {name!r})")
        return partial(sequential.order, segments=int(parameter))
    known = [*_PLAIN, *_SWAPPING, *_WITH_PARAMETER]
    close = difflib.get_close_matches(base, known) or known
    raise SpecError(f"unknown strategy {name!r}; did you mean {', '.join(close)}?")
