"""The public calls. Every function here is a thin wrapper of `memfit.compiler.driver` and `memfit.fitted`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from memfit.capture.distributed.ddp import unwrapped
from memfit.capture.loss.targets import loss_of_output
from memfit.capture.optimizer.unwrapped import OptimizerLike
from memfit.capture.options import CaptureOptions
from memfit.capture.training_step import given_args
from memfit.compiler.driver import make_plan
from memfit.compiler.request import Progress, Request
from memfit.errors import MemfitError
from memfit.fitted.installation import fits_plainly, fitted_call, install_unplanned, release
from memfit.fitted.plan import Plan, replanned
from memfit.profiling.memory import Measurement, measure
from memfit.tools.batch_advice import micro_batch_advice
from memfit.tools.compare import BatchSize, Comparison, compare, max_batch
from memfit.tools.effective_batch import EffectiveBatch, effective_batch
from memfit.tools.estimate import Estimate, estimate
from memfit.tools.max_size import max_size
from memfit.torch_compat.compiler import forget_compiled_code

__all__ = [
    "BatchSize",
    "Comparison",
    "EffectiveBatch",
    "Estimate",
    "Measurement",
    "Plan",
    "compare",
    "effective_batch",
    "estimate",
    "fit",
    "max_batch",
    "max_size",
    "measure",
    "plan",
    "plan_of",
    "release",
]


M = TypeVar("M", bound=nn.Module)


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    budget: int | str,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    target: Any = None,
    optimizer: OptimizerLike | None = None,
    strategy: str = "auto",
    levers: str | tuple[str, ...] = "bitwise",
    tiers: str | None = None,
    prove: bool = True,
    exact: str = "bitwise",
    search_seconds: float = 8.0,
    checkpointing: str = "refuse",
    progress: Progress | None = None,
) -> Plan:
    """Plans a training step of `model(*args, **kwargs)` within a budget; the model stays unchanged.

    Args:
        model: any module Dynamo can capture, in training mode.
        args: positional inputs, as the training loop passes them.
        kwargs: keyword inputs.
        budget: peak of the whole step: bytes, `"8GiB"`, `"60%"` of the device, or `"auto"`.
        loss_fn: takes the output, or the output and a target, and returns a scalar; without it `output.loss` is used
            where it exists, else gradients are assumed to arrive for every floating output.
        target: the target of the inputs, for a `loss_fn` that takes one; without it, such a loss counts as one outside
            of the model.
        optimizer: the optimizer, also inside a wrapper, or the bytes of its state, such as `"1.5GiB"`; the state
            counts from the second step on.
        strategy: `"auto"`, or the name of a known strategy (`memfit.strategies.names()`).
        levers: `"bitwise"` or a tuple of lever names.
        tiers: tiers that may hold swapped bytes.
        search_seconds: work of the search of `"auto"`, in seconds of one free core; up to four times that while far
            from the lower bound. It is counted and not timed, so a busy machine finds the same plan. The variable
            `MEMFIT_SEARCH_SECONDS` limits it.
        prove: run the plan once to compare its results with the baseline step's and the measured peak with the
            predicted one, and correct the plan. Costs two planned steps and at most two plain ones.
        exact: `"bitwise"`: a plan whose results differ from the baseline step's is an error; `"rounding"`: such a plan
            is accepted if the results differ by rounding, and `plan.proof` tells by how much.
        checkpointing: for a model with its own checkpoints, `"refuse"` the model, or `"replace"`: plan and run it as
            if it had none.
        progress: called with the stage, the work done and the total work.

    Returns:
        The plan; `.apply(model)` runs it.

    Raises:
        BudgetError: no plan fits; a budget of `.least_bytes` works.
        CaptureError: the model cannot be captured.
        ExactnessError: the results of the planned step differ in bits from those of the baseline step.
        SpecError: an argument is invalid.
    """
    request = Request(
        budget=budget,
        loss_fn=loss_of_output(loss_fn, target),
        optimizer=optimizer,
        strategy=strategy,
        levers=levers,
        tiers=tiers,
        prove=prove,
        exact=exact,
        search_seconds=search_seconds,
        capture=CaptureOptions(checkpointing=checkpointing),
    )
    return Plan.of(make_plan(model, given_args(args), dict(kwargs or {}), request, progress=progress))


def fit(
    model: M,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    budget: int | str,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    target: Any = None,
    optimizer: OptimizerLike | None = None,
    strategy: str = "auto",
    levers: str | tuple[str, ...] = "bitwise",
    tiers: str | None = None,
    prove: bool = True,
    exact: str = "bitwise",
    search_seconds: float = 8.0,
    checkpointing: str = "refuse",
    plain: bool = True,
    progress: Progress | None = None,
) -> M:
    """Makes `model` train within a budget. Arguments and errors are those of `plan`, except for these.

    Args:
        model: as for `plan`.
        args: as for `plan`; without `args` and `kwargs`, the module is planned at its first training call, as it is
            called there: in whatever autocast region, wrapper and hooks. A module that takes no input has `args=()`.
        kwargs: as for `plan`.
        budget: as for `plan`.
        loss_fn: as for `plan`.
        target: as for `plan`.
        optimizer: as for `plan`. Without inputs, the optimizers that train the model at its first training call are
            found; 0 says that there is none.
        strategy: as for `plan`.
        levers: as for `plan`.
        tiers: as for `plan`.
        prove: as for `plan`.
        exact: as for `plan`.
        search_seconds: as for `plan`.
        checkpointing: as for `plan`.
        plain: whether the module runs as it is where the predicted peak of its baseline step is within the budget, by
            2 % on a CPU and 10 % on a GPU; then nothing is profiled, proved or compiled. The variable `MEMFIT_PLAN`
            set to `always` says no for all modules.
        progress: as for `plan`.

    Returns:
        The same object. `memfit.plan_of(model)` is its plan, `memfit.release(model)` undoes it.
    """
    request = Request(
        budget=budget,
        loss_fn=loss_of_output(loss_fn, target),
        optimizer=optimizer,
        strategy=strategy,
        levers=levers,
        tiers=tiers,
        prove=prove,
        exact=exact,
        search_seconds=search_seconds,
        plain=plain and os.environ.get("MEMFIT_PLAN") != "always",
        capture=CaptureOptions(checkpointing=checkpointing),
    )
    forget_compiled_code()  # compiled code of the caller may contain the module
    if args is None and kwargs is None:
        return install_unplanned(model, request, replanned, advise=micro_batch_advice)
    given, named = given_args(() if args is None else args), dict(kwargs or {})
    if request.plain and fits_plainly(model, given, named, request, replanned):
        return model
    made = make_plan(model, given, named, request, progress=progress, keep_call=True)
    return Plan.of(made).apply(model)


def plan_of(model: nn.Module) -> Plan:
    """The newest plan of a fitted module; `is_plain` tells whether it runs without one.

    Raises:
        MemfitError: if the module is not fitted, or not planned yet.
    """
    fitted = fitted_call(model)
    plan = next(reversed(fitted.plans.values())) if fitted.plans else fitted.unsigned
    if isinstance(plan, Plan):
        return plan
    if fitted.fitting.known:
        return Plan.of(next(reversed(fitted.fitting.known.values())).as_plan())
    raise MemfitError(f"{type(unwrapped(model)).__name__} is not planned yet: that happens at its first training call")
