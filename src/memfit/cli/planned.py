"""From the options of a command to a plan: capture, budget, plan, proof.

A budget of `40%plain` refers to a peak that is known only once the step is captured and profiled; hence this
road beside `memfit.plan`, made of the same stones.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.cli.options import optimizer_factory

if TYPE_CHECKING:
    from memfit.planning import Progress
    from memfit.plans import Plan
    from memfit.zoo import Example

__all__ = ["plan_example"]


def plan_example(
    example: Example, args: argparse.Namespace, *, prove: bool = True, progress: Progress | None = None
) -> Plan:
    """Plans the step of an example as the options ask for.

    Args:
        example: what to plan.
        args: parsed options of `add_model`, `add_budget` and `add_strategy`.
        prove: run the plan once.
        progress: told how far it is.

    Raises:
        MemfitError: what `memfit.plan` raises.
    """
    from memfit import comparison, making, planning
    from memfit.capture.trace import device_of
    from memfit.sim.simulator import simulate_plain

    model, inputs, kwargs = example.model, tuple(example.args), dict(example.kwargs)
    factory = optimizer_factory(args.optimizer)
    request = planning.Request(
        budget=args.budget,
        loss_fn=example.loss_fn,
        optimizer=None if factory is None else factory(model.parameters()),
        strategy=args.strategy,
        levers=args.levers,
        tiers=args.tiers,
        prove=prove,
        label=example.label,
    )
    if not args.budget.endswith("plain"):
        return making.make_plan(model, inputs, kwargs, request, progress=progress)
    device = device_of(model)
    comparison.budget_bytes(args.budget, 1 << 40, device, 0)  # a mistake is told before the work
    _, graph = planning.capture_and_profile(model, inputs, kwargs, request, progress=progress)
    nbytes = comparison.budget_bytes(args.budget, simulate_plain(graph).peak_bytes, device, graph.static_bytes)
    assert nbytes is not None
    return making.make_plan(model, inputs, kwargs, replace(request, budget=nbytes), progress=progress)
