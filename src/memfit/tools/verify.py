"""Proof that a planned step equals the baseline step: the same bits, within the budget, run as planned.

Two copies of the model run the same steps, one plain, one planned, from the same state: weights, buffers, inputs,
random generator. After each step the loss, every gradient, every buffer, every updated parameter and the random state
are compared bit by bit; a plan that tiles may differ by rounding (`memfit.compiler.tolerance`). The first step warms up
both copies and creates the optimizer's state.

Known limits: memory is needed for the model and two more copies of parameters and optimizer state, and, for a plan that
tiles, for a third copy in float64, with all its activations.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memfit.bits import max_difference, same_bits
from memfit.capture.eager.backward_autocast import backward_region
from memfit.capture.loss.reading import LossFunction, backward_of, scalar_loss
from memfit.capture.optimizer.unwrapped import OptimizerLike, steppable, unwrapped_optimizer
from memfit.capture.training_step import device_of
from memfit.compiler.difference import Difference, first_difference
from memfit.compiler.driver import make_plan
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.request import Progress, Request
from memfit.compiler.tolerance import in_float64, in_widest, is_within_rounding, own_rounding
from memfit.fitted.installation import fitted_call
from memfit.fitted.plan import Plan
from memfit.fitted.plan_from_file import request_for, verified
from memfit.profiling.memory import Measurement, measure, steady
from memfit.tools.executed_ops import ExecutedOps, executed_recomputations
from memfit.tools.training_loop import resident_bytes
from memfit.torch_compat.core import pytree, user_modes_set_aside

__all__ = ["Check", "Verification", "verify"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Comparison of one tensor of the baseline step and the planned step.

    Attributes:
        kind: `loss`, `output`, `gradient`, `buffer`, `parameter` or `random state`.
        name: name of the tensor.
        step: number of the step after which it was compared.
        equal: whether all bits are equal.
        max_difference: largest absolute difference; 0.0 if equal.
        within_rounding: whether the plan tiles and the difference is only rounding (`memfit.compiler.tolerance`).
    """

    kind: str
    name: str
    step: int
    equal: bool
    max_difference: float
    within_rounding: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of `verify`: the comparison of a planned step with the baseline step.

    Attributes:
        plan: the plan that ran.
        steps: number of compared steps.
        checks: one check for each tensor and step.
        plain_peak_bytes: measured peak of the baseline step.
        peak_bytes: measured peak of the planned step, the highest of all its runs.
        recomputes_planned: number of ops that the plan recomputes.
        recomputes_executed: number of ops that were recomputed.
        swapped_planned_bytes: bytes that the plan swaps out and in.
        swapped_executed_bytes: bytes that were swapped out and in.
        difference: the first op in which the planned step differs from the baseline step, if bits differ and the op was
            found.
    """

    plan: CompiledPlan
    steps: int
    checks: tuple[Check, ...]
    plain_peak_bytes: int
    peak_bytes: int
    recomputes_planned: int
    recomputes_executed: int
    swapped_planned_bytes: tuple[int, int] = (0, 0)
    swapped_executed_bytes: tuple[int, int] = (0, 0)
    difference: Difference | None = None

    @property
    def differing(self) -> tuple[Check, ...]:
        """The checks that found different bits, or, for a plan that tiles, a difference larger than rounding."""
        return tuple(check for check in self.checks if not check.equal and not check.within_rounding)

    @property
    def rounded(self) -> tuple[Check, ...]:
        """The checks of a plan that tiles that found a difference within rounding."""
        return tuple(check for check in self.checks if not check.equal and check.within_rounding)

    @property
    def fits(self) -> bool:
        """Whether the measured peak is within the budget."""
        return self.peak_bytes <= self.plan.budget_bytes

    @property
    def passed(self) -> bool:
        """Whether nothing differs, the peak is within the budget and the plan was executed exactly."""
        executed = (self.recomputes_executed, self.swapped_executed_bytes)
        planned = (self.recomputes_planned, self.swapped_planned_bytes)
        return not self.differing and self.fits and executed == planned


@user_modes_set_aside()
def verify(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    request: Request | CompiledPlan,
    *,
    steps: int = 1,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerLike | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Runs plain and planned steps from identical state; compares them bit by bit, or up to rounding for a tiled plan.

    Args:
        model: in training mode; copies of it run, and it stays unchanged.
        args: positional inputs.
        kwargs: keyword inputs.
        request: a request for a plan, or a plan.
        steps: number of steps to compare after the first one.
        loss_fn: as for `memfit.plan`; needed only for a plan from a file.
        optimizer: as for `memfit.plan`; needed only for a plan from a file.
        progress: called with the progress.

    Returns:
        Every comparison, the measured peaks, and the executed recomputations and swaps.

    Raises:
        MemfitError: errors of planning or of applying the plan.
    """
    inputs = dict(kwargs or {})
    device = device_of(model)
    if isinstance(request, Request):
        loss_fn, optimizer = request.loss_fn, request.whole_optimizer
        planned = _Runner(model, optimizer, args, inputs, loss_fn)
        mine = replace(request, optimizer=planned.optimizer)
        plan = make_plan(planned.model, args, inputs, mine, progress=progress, keep_call=True)
    else:
        plan = _known(request, model, args, inputs, loss_fn, optimizer)
        assert plan.planned is not None
        loss_fn, optimizer = plan.planned.request.loss_fn, plan.planned.request.whole_optimizer
        planned = _Runner(model, optimizer, args, inputs, loss_fn)
    plain = _Runner(model, optimizer, args, inputs, loss_fn)
    Plan.of(plan).apply(planned.model)
    reference = _reference(model, optimizer, args, inputs, plan)
    checks: list[Check] = []
    baseline_peak = peak = 0
    total = steps + 2
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        for number in range(steps + 1):
            if progress is not None:
                progress("verify", number, total)
            random_state = _random_state(device)
            baseline_peak = plain.step(device).peak_bytes
            expected = plain.results(device)
            if reference is not None:
                _set_random_state(device, random_state)
                try:
                    reference.step(device)
                except RuntimeError as error:  # such as a loss with tensors of its own
                    log.info("no step in float64 to compare with: %s", error)
                    reference = None
            _set_random_state(device, random_state)
            measured = planned.step(device)
            if number and not measured.compiled:  # memory for compilation is not part of the step
                peak = max(peak, measured.peak_bytes)
            found = planned.results(device)
            compared = _compare(number, expected, found)
            if plan.is_tiled:
                exact = {} if reference is None else reference.results(device)
                compared = _up_to_rounding(compared, expected, found, exact)
            checks += compared
        if not peak:
            peak = steady(functools.partial(planned.step, device)).peak_bytes
        ran = next(reversed(fitted_call(planned.model).plans.values()))
        if progress is not None:
            progress("verify", total - 1, total)
        assert ran.planned is not None
        call = next(reversed(fitted_call(planned.model).calls.values()))
        before = call.moved_bytes
        executed = executed_recomputations(planned.count(), ran.planned.graph, ran.program)
        out_bytes, in_bytes = (now - then for now, then in zip(call.moved_bytes, before, strict=True))
        if progress is not None:
            progress("verify", total, total)
        difference = None
        if any(not check.equal and not check.within_rounding for check in checks):
            difference = _explained(model, plain, planned, device)
    return Verification(
        plan=_for_original(ran, optimizer),
        steps=steps + 1,
        checks=tuple(checks),
        plain_peak_bytes=baseline_peak,
        peak_bytes=peak,
        recomputes_planned=len(ran.program.recomputed()),
        recomputes_executed=executed,
        swapped_planned_bytes=(ran.predicted.out_bytes, ran.predicted.in_bytes),
        swapped_executed_bytes=(out_bytes, in_bytes),
        difference=difference,
    )


def _explained(model: nn.Module, plain: _Runner, planned: _Runner, device: torch.device) -> Difference | None:
    """The first difference of a first step of both copies from the model's state."""
    random_state = _random_state(device)

    def step_of(runner: _Runner) -> list[torch.Tensor]:
        with torch.no_grad():
            for theirs, ours in zip(_state(runner.model), _state(model), strict=True):
                theirs.copy_(ours)
        _set_random_state(device, random_state)
        runner.prepare()
        runner.backward()
        return list(runner.results(device).values())

    return first_difference(lambda: step_of(plain), lambda: step_of(planned))


def _state(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class _Runner:
    """A copy of the model and its optimizer that runs steps and returns their results."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerLike | None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        loss_fn: LossFunction | None,
    ) -> None:
        self.model, self.optimizer = copy.deepcopy((model, unwrapped_optimizer(optimizer)))
        self.gradients = [p.grad for p in model.parameters()]
        self.original = (tuple(args), kwargs)
        self.loss_fn = loss_fn
        self.prepare()

    def prepare(self) -> None:
        """Restores gradients and inputs, since a step may add to gradients and write over inputs."""
        self.loss: torch.Tensor | None = None
        self.outputs: list[torch.Tensor] = []
        for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        self.args, self.kwargs = _copied(self.original)

    def step(self, device: torch.device) -> Measurement:
        """Runs one step and measures it."""
        self.prepare()
        return measure(self._run, device=device, warmup=0, repeats=0, start_bytes=self._resident(device))

    def _run(self) -> None:
        self.backward()
        if (stepped := steppable(self.optimizer)) is not None:
            stepped.step()

    def backward(self) -> None:
        """Forward pass, loss and backward pass."""
        output = self.model(*self.args, **self.kwargs)
        self.loss = backward_of(output, self.loss_fn)
        if self.loss is None:
            self.outputs = [t.detach() for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]

    def _resident(self, device: torch.device) -> int:
        return resident_bytes(self.model, self.args, self.kwargs, self.optimizer, device)

    def results(self, device: torch.device) -> dict[tuple[str, str], torch.Tensor]:
        """Copies of all results and states after a step."""
        found: dict[tuple[str, str], torch.Tensor] = {}
        if self.loss is not None:
            found["loss", "loss"] = self.loss
        for number, output in enumerate(self.outputs):
            found["output", str(number)] = output
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found["gradient", name] = parameter.grad
            if steppable(self.optimizer) is not None:
                found["parameter", name] = parameter
        for number, tensor in enumerate(pytree.tree_leaves((self.args, self.kwargs))):
            if isinstance(tensor, torch.Tensor) and tensor.grad is not None:
                found["gradient", f"input {number}"] = tensor.grad
        for name, buffer in self.model.named_buffers():
            found["buffer", name] = buffer
        for number, state in enumerate(_random_state(device)):
            found["random state", ("cpu", "cuda")[number]] = state
        return {key: tensor.detach().clone() for key, tensor in found.items()}

    def count(self) -> Counter[str]:
        """Runs one more step and counts the ops of its forward and backward pass, without the loss."""
        self.prepare()
        executed = ExecutedOps()
        with executed:
            output = self.model(*self.args, **self.kwargs)
        detached = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), output)
        loss = scalar_loss(detached, self.loss_fn)
        pairs = [
            (o, torch.ones_like(o) if loss is None else d)
            for o, d in zip(pytree.tree_leaves(output), pytree.tree_leaves(detached), strict=True)
            if isinstance(o, torch.Tensor) and o.requires_grad
        ]
        if loss is not None:
            with backward_region():
                loss.backward()
            pairs = [(o, d.grad) for o, d in pairs if d.grad is not None]
        with backward_region(), executed:
            torch.autograd.backward([o for o, _ in pairs], [gradient for _, gradient in pairs])
        return executed.counts


def _reference(
    model: nn.Module,
    optimizer: OptimizerLike | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    plan: CompiledPlan,
) -> _Runner | None:
    """The baseline step in float64 for a plan that tiles; None for other plans, or if the model is in float64."""
    assert plan.planned is not None
    if not plan.is_tiled or any(p.dtype is torch.float64 for p in model.parameters()):
        return None
    runner = _Runner(model, optimizer, args, kwargs, plan.planned.request.loss_fn)
    runner.model, wide_args, wide_kwargs = in_float64(runner.model, args, kwargs)
    runner.original = wide_args, wide_kwargs
    runner.gradients = [None if g is None else in_widest(g) for g in runner.gradients]
    return runner


def _up_to_rounding(
    checks: list[Check],
    expected: dict[tuple[str, str], torch.Tensor],
    found: dict[tuple[str, str], torch.Tensor],
    exact: dict[tuple[str, str], torch.Tensor],
) -> list[Check]:
    """The checks; those whose difference is only rounding are marked."""
    gradients, wide = ({k: t for k, t in of.items() if k[0] == "gradient"} for of in (expected, exact))
    own = own_rounding(gradients, wide)
    if own is None:
        exact = {}
    scale = math.hypot(*(float(in_widest(t).norm()) for t in gradients.values()))

    def marked(check: Check) -> Check:
        key = check.kind, check.name
        if check.equal or key not in expected or key not in found or check.kind == "random state":
            return check
        within = is_within_rounding(expected[key], found[key], exact.get(key), scale=scale, own=own or 0.0)
        return replace(check, within_rounding=within)

    return [marked(check) for check in checks]


def _for_original(plan: CompiledPlan, optimizer: OptimizerLike | None) -> CompiledPlan:
    """The plan of a copy, for the model itself; it no longer keeps the copy alive."""
    assert plan.planned is not None
    request = replace(plan.planned.request, optimizer=optimizer)
    return replace(plan, planned=replace(plan.planned, capture=plan.planned.capture.without_call(), request=request))


def _known(
    plan: CompiledPlan,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    loss_fn: LossFunction | None,
    optimizer: OptimizerLike | None,
) -> CompiledPlan:
    """The plan with its capture; the step of a plan from a file is captured again."""
    if plan.planned is not None:
        return plan
    return verified(plan, model, args, kwargs, request_for(plan, loss_fn=loss_fn, optimizer=optimizer))


def _compare(
    step: int, expected: dict[tuple[str, str], torch.Tensor], found: dict[tuple[str, str], torch.Tensor]
) -> list[Check]:
    checks = []
    for kind, name in dict.fromkeys((*expected, *found)):
        a, b = expected.get((kind, name)), found.get((kind, name))
        equal = a is not None and b is not None and same_bits(a, b)
        difference = 0.0 if equal else max_difference(a, b)
        checks.append(Check(kind=kind, name=name, step=step, equal=equal, max_difference=difference))
    return checks


def _copied(inputs: _Inputs) -> _Inputs:
    """Copies of the tensors; a tensor that occurs twice stays one tensor, as a plan is for known aliases of inputs."""
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        made = copies.get(id(tensor))
        if made is None:
            made = copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return made

    result: _Inputs = pytree.tree_map_only(torch.Tensor, copied, inputs)
    return result


def _random_state(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_random_state(device: torch.device, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
