"""A plan from a file, taken for a step: the step is captured again, and must be the planned one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from memfit.capture.loss.reading import LossFunction
from memfit.capture.optimizer.unwrapped import OptimizerLike
from memfit.capture.options import CaptureOptions
from memfit.capture.state.input_signature import signature
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.request import Planned, Request
from memfit.compiler.stages import capture_and_profile, fingerprint
from memfit.errors import PlanMismatchError
from memfit.ir.plan_file import fingerprint_difference
from memfit.ir.serialization import graph_digest
from memfit.sim.verifier import check

__all__ = ["check_module", "request_for", "verified"]

P = TypeVar("P", bound=CompiledPlan)


def check_module(plan: CompiledPlan, model: nn.Module) -> None:
    """Checks that a plan was made for a module like this one; the inputs are not known yet.

    Raises:
        PlanMismatchError: if it was not.
    """
    here = fingerprint(model, (), {})
    difference = fingerprint_difference(
        {k: v for k, v in plan.fingerprint.items() if k != "inputs"}, {k: v for k, v in here.items() if k != "inputs"}
    )
    if difference:
        raise PlanMismatchError(_of_something_else(line[:300] for line in difference))


def request_for(
    plan: CompiledPlan,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerLike | None = None,
    beside_bytes: int = 0,
) -> Request:
    """The request that a plan from a file answers: its tiers too, whose chunks the transfers of this machine use.

    Args:
        plan: the plan.
        loss_fn: loss of the loop.
        optimizer: optimizer of the loop.
        beside_bytes: see `Request`.
    """
    return Request(
        budget=plan.budget_bytes,
        loss_fn=loss_fn,
        optimizer=optimizer,
        strategy=plan.strategy,
        levers="all" if plan.is_tiled else "bitwise",
        tiers=",".join(map(str, plan.program.tiers())) or None,
        label=plan.label,
        beside_bytes=beside_bytes,
        capture=CaptureOptions(checkpointing=plan.checkpointing),
    )


def verified(plan: P, model: nn.Module, args: Any, kwargs: Any, request: Request) -> P:
    """A plan from a file, with the capture that it needs to run.

    Raises:
        PlanMismatchError: if the step is not the planned one.
        ProgramError: if the program is not valid for the step.
    """
    difference = fingerprint_difference(plan.fingerprint, fingerprint(model, args, kwargs))
    capture, graph = capture_and_profile(model, args, kwargs, request, grid=plan.grid)
    if difference or graph_digest(graph) != plan.graph_digest:
        raise PlanMismatchError(
            _of_something_else([line[:300] for line in difference] or ["the captured graph differs"])
        )
    check(graph, plan.program)
    return replace(
        plan, planned=Planned(capture=capture, graph=graph, request=request, signature=signature(model, args, kwargs))
    )


def _of_something_else(differences: Iterable[str]) -> str:
    return (
        f"the plan is for something else: {'; '.join(differences)}; make a plan of what is here with memfit.plan or fit"
    )
