"""Makes a plan from the options of a command: capture, budget, plan, proof.

A budget such as `40%plain` refers to the baseline step's peak, which is known only after the step is captured and
profiled. `memfit.plan` does not accept such a budget, so this module calls the functions behind it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.cli.options import optimizer_factory

if TYPE_CHECKING:
    from memfit.compiler.plan import CompiledPlan
    from memfit.compiler.request import Progress
    from memfit.zoo import Example

__all__ = ["plan_example"]


def plan_example(
    example: Example, args: argparse.Namespace, *, prove: bool = True, progress: Progress | None = None
) -> CompiledPlan:
    """Plans the training step of an example within the budget of the command line.

    Args:
        example: model, inputs and loss of the step.
        args: parsed options of `add_model`, `add_budget`, `add_strategy`, `add_tiers` and `add_levers`.
        prove: whether to run the plan, compare its results with the baseline step's, and correct it, as `memfit.plan`.
        progress: called with the progress.

    Returns:
        The plan.

    Raises:
        MemfitError: errors of `memfit.plan`.
    """
    from memfit.capture.training_step import device_of
    from memfit.compiler import driver, stages
    from memfit.compiler.request import Request
    from memfit.sim.simulator import simulate_baseline
    from memfit.tools import compare

    model, inputs, kwargs = example.model, tuple(example.args), dict(example.kwargs)
    factory = optimizer_factory(args.optimizer)
    request = Request(
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
        return driver.make_plan(model, inputs, kwargs, request, progress=progress)
    device = device_of(model)
    compare.budget_bytes(args.budget, 1 << 40, device, 0)  # reports a mistake before the capture
    _, graph = stages.capture_and_profile(model, inputs, kwargs, request, progress=progress)
    nbytes = compare.budget_bytes(args.budget, simulate_baseline(graph).peak_bytes, device, graph.static_bytes)
    assert nbytes is not None
    return driver.make_plan(model, inputs, kwargs, replace(request, budget=nbytes), progress=progress)
