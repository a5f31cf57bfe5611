"""Steps that run without a plan, because the baseline step fits the budget: nothing is profiled, proved or compiled.

The peak of the baseline step is counted on fake tensors (`memfit.profiling.baseline_peak`), with parameters, inputs and
the optimizer's state. If it is below the budget by a margin, the module runs as it is. A call whose inputs are nowhere
larger than those of such a call needs no count.

Idea: the first two steps of each kind are watched, and all steps of a module whose memory may depend on values. If one
takes more than the budget, because the loss or other code outside of the module takes more than assumed, the next step
is planned.

Known limits: a loss outside of the module is unknown until it runs; it counts as two copies of the outputs. On a CPU,
torch does not tell the peak of its allocator, so the memory of the process is watched: small steps are not seen there,
nor are steps that take less than the process took before, while it read data, say.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.capture.distributed.fsdp import is_sharded
from memfit.capture.fx_module import OneGraph
from memfit.capture.optimizer.state import optimizer_cost
from memfit.capture.optimizer.unwrapped import unwrapped_optimizer
from memfit.capture.residents import storage_bytes
from memfit.capture.state.input_signature import Signature, is_larger
from memfit.capture.training_step import device_of
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.plan_cache import is_known_to_need_a_plan
from memfit.compiler.request import Request
from memfit.compiler.stages import resolve_budget
from memfit.ir.plan_file import Prediction
from memfit.ir.program import Program
from memfit.profiling.baseline_peak import BaselinePeak, counted_step
from memfit.torch_compat.core import pytree

__all__ = ["PlainStep", "PlainSteps", "step_of"]

_MARGIN = {"cpu": 0.02, "cuda": 0.1}
"""Share of the predicted peak by which the budget must exceed it: on a GPU, workspaces of kernels are not counted."""

_LOSS_COPIES = 2
"""What a loss outside of the module holds, in copies of the outputs: log-probabilities, for example, and a gradient."""

_FAR = 1.5
"""Times the counted step without the workspaces of kernels that a step may take: nothing is asked for them below it."""

_STATE_COPIES = 6
"""Copies of the parameters that optimizers of torch hold and take for a moment, at most: Adam holds up to three."""

_WATCHED_STEPS = 2
_NOTICED_BYTES = 64 << 20
"""Growth of a process, in addition to the predicted step, below which it is put down to other things than tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainStep:
    """A step that runs without a plan.

    Attributes:
        label: name of the module.
        budget_bytes: requested peak of the whole step.
        predicted_bytes: predicted peak of the whole step.
        is_bound: whether that is only an upper bound, because it is far below the budget.
        there_bytes: the part of it that is in memory before the step.
        reads_values: whether the module asked for values of its inputs, so that its memory may depend on them.
    """

    label: str
    budget_bytes: int
    predicted_bytes: int
    is_bound: bool
    there_bytes: int
    reads_values: bool

    def as_plan(self) -> CompiledPlan:
        """The step as a plan without instructions."""
        return CompiledPlan(
            label=self.label,
            budget_bytes=self.budget_bytes,
            strategy="plain",
            predicted=Prediction(
                peak_bytes=self.predicted_bytes,
                is_bound=self.is_bound,
                plain_peak_bytes=self.predicted_bytes,
                step_seconds=0.0,
                overhead=0.0,
            ),
            program=Program(instructions=()),
            decisions=(),
            fingerprint={},
            graph_digest="",
        )


def step_of(plan: CompiledPlan) -> PlainStep:
    """The memory of a planned step, to be watched like that of a step without a plan."""
    assert plan.planned is not None
    return PlainStep(
        label=plan.label,
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.predicted.peak_bytes,
        is_bound=False,
        there_bytes=plan.planned.graph.static_bytes,
        reads_values=False,
    )


@dataclass(slots=True)
class _Watch:
    """Memory before a step that is watched."""

    key: Signature
    step: PlainStep
    most_bytes: int
    process_bytes: int


@dataclass(slots=True)
class PlainSteps:
    """The steps of a module that run without a plan.

    Attributes:
        known: by signature.
        over: signatures whose baseline step does not fit, or cannot be counted.
        watched: by signature, how many of its steps were watched.
        watch: the step that is watched now.
    """

    known: dict[Signature, PlainStep] = field(default_factory=dict)
    over: set[Signature] = field(default_factory=set)
    watched: dict[Signature, int] = field(default_factory=dict)
    watch: _Watch | None = None

    def covers(self, key: Signature) -> bool:
        """Whether a step that runs without a plan has sizes as large as these."""
        return any(is_larger(known, key) for known in self.known)

    def of(self, key: Signature, model: nn.Module, args: Any, kwargs: Any, request: Request) -> PlainStep | None:
        """The step of a call that runs without a plan; None if it needs one.

        Args:
            key: signature of the call.
            model: the module.
            args: positional inputs.
            kwargs: keyword inputs.
            request: the budget, and what else is known of the loop.
        """
        if key in self.over or any(is_larger(key, other) for other in self.over):
            return None
        found = self.known.get(key)
        if found is None:
            larger = next((known for known in self.known if is_larger(known, key)), None)
            found = self.known[larger] if larger is not None else predicted(model, args, kwargs, request)
            if found is None:
                self.over.add(key)
                return None
            self.known[key] = found
        return found

    def begin(self, key: Signature, step: PlainStep, device: torch.device) -> None:
        """Watches the step that begins, if it is one of the first of its signature or depends on values."""
        if self.watched.get(key, 0) >= _WATCHED_STEPS and not step.reads_values:
            self.watch = None
            return
        self.watched[key] = self.watched.get(key, 0) + 1
        most_bytes, process_bytes = _memory(device)
        self.watch = _Watch(key, step, most_bytes, process_bytes)

    def end(self, device: torch.device) -> int:
        """Ends the watch of the step before; returns its peak if it took more than its budget, else 0.

        Its signature is then one of those that are planned.
        """
        watch, self.watch = self.watch, None
        if watch is None:
            return 0
        most_bytes, _ = _memory(device)
        if most_bytes <= watch.most_bytes:
            return 0
        peak_bytes = most_bytes
        if device.type == "cpu":
            grown_bytes = most_bytes - watch.process_bytes
            if grown_bytes <= watch.step.predicted_bytes - watch.step.there_bytes + _NOTICED_BYTES:
                return 0
            peak_bytes = watch.step.there_bytes + grown_bytes
        if peak_bytes <= watch.step.budget_bytes:
            return 0
        self.known = {key: step for key, step in self.known.items() if not is_larger(key, watch.key)}
        self.over.add(watch.key)
        return peak_bytes


def predicted(model: nn.Module, args: Any, kwargs: Any, request: Request) -> PlainStep | None:
    """The step without a plan; None if its predicted peak is not within the budget, or cannot be predicted."""
    device = device_of(model)
    if isinstance(model, OneGraph) or is_sharded(model) or device.type not in _MARGIN:
        return None
    if request.budget != "auto":
        asked_bytes = resolve_budget(request.budget, device)
        if is_known_to_need_a_plan(model, args, kwargs, request, asked_bytes):
            return None
    count = functools.partial(counted_step, model, args, kwargs, request.loss_fn, device.type, runs=1)
    counted = count(workspaces=False)
    if counted is None:
        return None
    reads_values = counted.reads_values
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    held = [*parameters, *model.buffers(), *(p.grad for p in parameters), *pytree.tree_leaves((args, kwargs))]
    there_bytes = storage_bytes(held, device.type) + request.beside_bytes
    coming_bytes = sum(p.nbytes for p in trained if p.grad is None)
    budget_bytes = resolve_budget(request.budget, device, there_bytes)

    def fitting(state_bytes: int, peak_bytes: int, *, is_bound: bool = False) -> PlainStep | None:
        if (there_bytes + peak_bytes) * (1 + _MARGIN[device.type]) > budget_bytes:
            return None
        return PlainStep(
            label=request.label or type(model).__name__,
            budget_bytes=budget_bytes,
            predicted_bytes=there_bytes + peak_bytes,
            is_bound=is_bound,
            there_bytes=there_bytes + state_bytes,
            reads_values=reads_values,
        )

    def step_bytes(found: BaselinePeak) -> int:
        return found.step_bytes + found.outputs_held_bytes + _LOSS_COPIES * found.outputs_bytes

    most_bytes = _most_state_bytes(request.optimizer)
    if most_bytes is not None:
        far = fitting(most_bytes, most_bytes + coming_bytes + int(_FAR * step_bytes(counted)), is_bound=True)
        if far is not None:
            return far
    cost = optimizer_cost(request.optimizer, device.type)
    after_bytes = cost.state_bytes + coming_bytes + cost.step_bytes
    if fitting(cost.state_bytes, max(cost.state_bytes + step_bytes(counted), after_bytes)) is None:
        return None
    counted = count(workspaces=True)
    if counted is None:
        return None
    return fitting(cost.state_bytes, max(cost.state_bytes + step_bytes(counted), after_bytes))


def _most_state_bytes(optimizer: Any) -> int | None:
    """An upper bound of what an optimizer of torch holds and takes, which need not step to tell; None for another."""
    if optimizer is None:
        return 0
    found = unwrapped_optimizer(optimizer)
    if not type(found).__module__.startswith("torch.optim.") or isinstance(found, torch.optim.LBFGS):
        return None
    copied = sum(int(p.nbytes) for group in found.param_groups for p in group["params"])
    return _STATE_COPIES * copied


def _memory(device: torch.device) -> tuple[int, int]:
    """The most bytes that were in use until now, and the bytes that are in use: on a CPU, of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    return _status("VmHWM"), _status("VmRSS")


def _status(name: str) -> int:
    """A number of bytes in the state of the process; 0 where the system does not tell it."""
    try:
        lines: Sequence[str] = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
