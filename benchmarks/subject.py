"""A model under test: captured, profiled, planned under budgets, and run plain or planned from one state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from msgspec import structs

from memfit.bits import same_bits
from memfit.capture.loss.reading import backward_of
from memfit.capture.options import CaptureOptions
from memfit.capture.state.snapshot import preserved
from memfit.capture.training_step import Capture, capture_step
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.proving import prove
from memfit.compiler.request import Request
from memfit.compiler.stages import plan_captured
from memfit.ir.graph import StepGraph
from memfit.ir.program import Program
from memfit.ir.tiers import TierLinks
from memfit.profiling.cost_cache import CostCache, open_cache
from memfit.profiling.profiler import known_separable, profile_ops, separated
from memfit.runtime.executable import compile_program
from memfit.sim.simulator import Timeline, simulate, simulate_baseline
from memfit.tools.training_loop import interleaved_seconds, resident_bytes, step_peak, training_step
from memfit.zoo import Example, build

__all__ = ["Case", "Run", "Subject", "case_of", "differing", "measured_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to measure.

    Attributes:
        spec: see `memfit.zoo.build`.
        batch: samples in a batch.
        shape: of one sample; None for the model's own.
    """

    spec: str
    batch: int
    shape: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The model without where it comes from."""
        return self.spec.partition(":")[2].partition("?")[0]

    def __str__(self) -> str:
        return self.spec.replace("|", "")


def case_of(text: str) -> Case:
    """Reads `SPEC@BATCH` or `SPEC@BATCH@3x64x64`."""
    spec, batch, *shape = text.split("@")
    sizes = tuple(int(size) for size in shape[0].split("x")) if shape else None
    return Case(spec=spec, batch=int(batch), shape=sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured step.

    Attributes:
        peak_bytes: measured.
        results: loss, outputs, gradients, buffers and random state it left behind.
    """

    peak_bytes: int
    results: dict[str, torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Subject:
    """A captured and profiled step.

    Attributes:
        example: the model, its inputs and its loss.
        device: where it is.
        costs: measured op costs.
        capture: the captured step.
        graph: the same with times.
        plain: what the simulator says of the baseline step.
        capture_seconds: how long capturing took.
        profile_seconds: how long profiling took; next to nothing if the costs were known.
    """

    example: Example
    device: torch.device
    costs: CostCache
    capture: Capture
    graph: StepGraph
    plain: Timeline
    capture_seconds: float
    profile_seconds: float
    _calls: dict[int, Callable[..., Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, device: torch.device, *, cached: bool = False, grid: tuple[int, ...] = ()) -> Subject:
        """Builds, captures and profiles a model.

        Args:
            case: what to build.
            device: where.
            cached: whether the costs known for this machine may serve; else they are measured anew.
            grid: for the lever `tile`, see `memfit.passes.read_joint.read_joint`.
        """
        example = build(case.spec, batch=case.batch, shape=case.shape, device=device)
        costs = open_cache(device) if cached else CostCache()
        begin = time.perf_counter()
        capture = capture_step(
            *(example.model, example.args, example.kwargs),
            loss_fn=example.loss_fn,
            label=example.label,
            options=CaptureOptions(separate=known_separable(costs), grid=grid),
        )
        captured = time.perf_counter() - begin
        capture = separated(capture, device, costs)
        graph = profile_ops(capture, device, costs)
        profiled = time.perf_counter() - begin - captured
        return cls(
            example=example,
            device=device,
            costs=costs,
            capture=replace(capture, graph=graph),
            graph=graph,
            plain=simulate_baseline(graph),
            capture_seconds=captured,
            profile_seconds=profiled,
        )

    def plan(self, budget_bytes: int, *, strategy: str = "auto", tiers: Sequence[TierLinks] = ()) -> CompiledPlan:
        """A plan that nobody has run yet.

        Args:
            budget_bytes: peak of the step.
            strategy: by name.
            tiers: where it may swap to.

        Raises:
            BudgetError: if nothing fits.
        """
        example = self.example
        request = Request(budget=budget_bytes, loss_fn=example.loss_fn, label=example.label, strategy=strategy)
        graph = structs.replace(self.graph, tiers=tuple(tiers))
        capture = replace(self.capture, graph=graph)
        return plan_captured(example.model, example.args, example.kwargs, capture, graph, request, budget_bytes)

    def plan_of(self, program: Program) -> CompiledPlan:
        """A plan that runs a program however much it takes."""
        timeline = simulate(self.graph, program)
        plan = self.plan(self.plain.peak_bytes)
        predicted = structs.replace(
            plan.predicted,
            peak_bytes=timeline.peak_bytes,
            step_seconds=timeline.step_seconds,
            overhead=timeline.overhead,
            bound_overhead=None,
        )
        return replace(plan, budget_bytes=timeline.peak_bytes, strategy="given", program=program, predicted=predicted)

    def call(self, plan: CompiledPlan | None) -> Callable[..., Any]:
        """The model's call under a plan, compiled once; the model itself without one."""
        if plan is None:
            return self.example.model
        if id(plan.program) not in self._calls:
            self._calls[id(plan.program)] = compile_program(
                self.example.model, self.capture, plan.program, describe=plan.__str__
            )
        return self._calls[id(plan.program)]

    def step(self, plan: CompiledPlan | None = None) -> Callable[[], object]:
        """One training step without an optimizer, to be timed."""
        example = self.example
        return training_step(self.call(plan), example.model, example.args, example.kwargs, loss_fn=example.loss_fn)

    def run(self, plan: CompiledPlan | None = None) -> Run:
        """Runs a step twice from the same state, the first time to warm up, and measures the second."""
        return measured_run(self.example, self.call(plan), self.device)

    def seconds(self, plans: Sequence[CompiledPlan | None], *, repeats: int = 1) -> list[float]:
        """Median wall-clock seconds of each plan's step, run in turns; the model is left as it was."""
        with preserved(self.example.model):
            return interleaved_seconds([self.step(plan) for plan in plans], self.device, repeats=repeats)

    def proven(self, plan: CompiledPlan) -> tuple[CompiledPlan, Run]:
        """Runs a plan; if it takes more than its budget, has it corrected as `memfit.plan` would.

        Raises:
            BudgetError: if no correction fits.
        """
        run = self.run(plan)
        if run.peak_bytes <= plan.budget_bytes:
            return plan, run
        plan = prove(self.example.model, self.example.args, self.example.kwargs, plan)
        return plan, self.run(plan)


def measured_run(example: Example, call: Callable[..., Any], device: torch.device) -> Run:
    """Runs a step of `call` twice from the same state and measures the second."""
    model = example.model
    results: dict[str, torch.Tensor] = {}

    def step() -> None:
        output = call(*example.args, **example.kwargs)
        torch.rand(3, device=device)  # whoever runs random ops again must not be led astray by others in between
        loss = backward_of(output, example.loss_fn)
        results.clear()
        if loss is not None:
            results["loss"] = loss

    def resident() -> int:
        return resident_bytes(model, example.args, example.kwargs, None, device)

    for last in (False, True):
        with preserved(model):
            torch.manual_seed(0)
            if not last:
                step()
                continue
            peak = step_peak(step, device, resident, warmup=0)
            results |= {f"gradient {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
            results |= {f"buffer {n}": b.detach().clone() for n, b in model.named_buffers()}
            results["random state"] = (
                torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
            )
    return Run(peak_bytes=peak, results=results)


def differing(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    """Names of the results that do not have the same bits, or that only one of two runs has."""
    names: Iterable[str] = dict.fromkeys((*expected, *found))
    return [n for n in names if n not in expected or n not in found or not same_bits(expected[n], found[n])]
