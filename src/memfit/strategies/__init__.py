"""Known strategies by name, each in its own file, all with one signature.

A strategy takes a step graph and a budget and returns an order of ops, which `program` turns into a program,
each op whole or in parts as there is room. So every strategy, however old, is judged by the same simulator and
runs on the same runtime. A name may carry a parameter after a colon: `sequential:4`,
`openai-collection:layer1.0,layer2.0`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial

from memfit.errors import SpecError
from memfit.planner.ways import leanest, program_within
from memfit.step.graph import StepGraph
from memfit.step.program import Program, plain_program
from memfit.strategies import every_block, knapsack, milp, mu_two, none, openai, rotor, sequential, sqrt

__all__ = ["Strategy", "find", "names", "program"]

Strategy = Callable[[StepGraph, int | None], list[int]]


def _auto(graph: StepGraph, budget_bytes: int | None) -> list[int]:
    from memfit.planner.auto import auto_order  # the planner starts from strategies itself

    return auto_order(graph, budget_bytes)


_PLAIN: dict[str, Strategy] = {
    "auto": _auto,
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
_WITH_PARAMETER = {"sequential": "a number of segments", "openai-collection": "names of modules to keep"}


def names() -> tuple[str, ...]:
    """All names; those that take a parameter end in a colon."""
    return (*_PLAIN, *(f"{name}:" for name in _WITH_PARAMETER))


def program(name: str, graph: StepGraph, budget_bytes: int | None) -> Program:
    """The program a strategy makes of a step; `none` gives the step as it is without memfit.

    Raises:
        SpecError: if there is no such strategy.
        BudgetError: if the strategy minds budgets and nothing fits.
    """
    order = find(name)
    if name == "none":
        return plain_program(graph)
    return program_within(graph, order(leanest(graph), budget_bytes), budget_bytes)


def find(name: str) -> Strategy:
    """The strategy of a name.

    Raises:
        SpecError: if there is none, with the names that are close.
    """
    base, colon, parameter = name.partition(":")
    if base in _PLAIN:
        if colon:
            raise SpecError(f"strategy {base!r} takes no parameter (strategy: {name!r})")
        return _PLAIN[base]
    if base in _WITH_PARAMETER:
        if not parameter:
            raise SpecError(f"strategy {base!r} needs {_WITH_PARAMETER[base]} after a colon (strategy: {name!r})")
        if base == "openai-collection":
            return partial(openai.collection_order, modules=tuple(parameter.split(",")))
        if not parameter.isdecimal() or int(parameter) < 1:
            raise SpecError(f"strategy 'sequential' needs a positive number of segments (strategy: {name!r})")
        return partial(sequential.order, segments=int(parameter))
    close = difflib.get_close_matches(base, [*_PLAIN, *_WITH_PARAMETER]) or [*_PLAIN, *_WITH_PARAMETER]
    raise SpecError(f"unknown strategy {name!r}; did you mean {', '.join(close)}?")
