"""The pipeline object of the caller: planned for its first batch, it runs steps on the engine.

A single process runs all stages, one after the other, for tests and for a single device. With one process per device
(`torchrun`), each process runs its own stages, and all processes call `step` with the same batch: each process knows
the shape of the batch and takes the inputs that its stages read.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs
from torch import nn

from memfit.capture.state.snapshot import preserved
from memfit.capture.training_step import device_of
from memfit.compiler.correction import MOST_PLANS
from memfit.distributed import process_group as processes
from memfit.errors import PipelineError, SpecError
from memfit.ops.kernels.settings import kernel_settings
from memfit.pipelining.config import Question
from memfit.pipelining.loss.microbatches import batch_size, cut_batch, sizes_of
from memfit.pipelining.loss.scaling import LossReading, loss_shares, read_loss
from memfit.pipelining.loss.traced import TracedLosses
from memfit.pipelining.partition.forward_graph import ForwardGraph, PipelineLoss, capture_forward, flatten_inputs
from memfit.pipelining.plan import PipelinePlan, decode_pipeline, encode_pipeline
from memfit.pipelining.runtime.build import CompiledStage, capture_stages, engine_stages, planned_cuts
from memfit.pipelining.runtime.engine import runtime, step_microbatches
from memfit.pipelining.runtime.guards import pipeline_signature
from memfit.pipelining.runtime.rng import RandomStream
from memfit.pipelining.runtime.stage import EngineStage
from memfit.pipelining.runtime.tied_weights import SharedStates, share_out
from memfit.pipelining.search.device_budgets import above_budget, corrected, fits
from memfit.pipelining.search.driver import make_pipeline_plan, resident_bytes
from memfit.planner.pipeline.schedule import on_one_device
from memfit.profiling.memory import measure

__all__ = ["Pipeline"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """Plan, stages and engine that run steps of one shape."""

    plan: PipelinePlan
    stages: Mapping[int, EngineStage]
    engine: Any
    losses: tuple[LossReading, ...]
    stream: RandomStream | None
    shared: SharedStates
    loss_dtype: torch.dtype


class Pipeline:
    """A model that trains in stages; created by `memfit.pipeline`.

    The model stays the caller's: its parameters receive the gradients, and an optimizer of them is stepped as usual.
    With several processes, each process holds the parameters of its own stages only; `state_dict` gathers all
    parameters.

    Attributes:
        model: the unmodified module.
    """

    def __init__(
        self,
        model: nn.Module,
        question: Question,
        loss_fn: PipelineLoss | None,
        group: dist.ProcessGroup | None = None,
        data_group: dist.ProcessGroup | None = None,
    ) -> None:
        if processes.world_size(group) not in (1, question.num_devices):
            raise SpecError(
                f"{processes.world_size(group)} processes cannot run {question.num_devices} stages; start as many as "
                "there are stages, or one for all of them"
            )
        self.model = model
        self._question = question
        self._loss_fn = loss_fn
        self._device = device_of(model)
        self._prepared: dict[tuple[Any, ...], _Prepared] = {}
        self._failed: BaseException | None = None
        self._group = group
        self._data_group = data_group
        self._groups = (group,) if data_group is None else (data_group, group)

    @property
    def plan(self) -> PipelinePlan:
        """The newest plan.

        Raises:
            SpecError: if nothing is planned yet.
        """
        if not self._prepared:
            raise SpecError("the pipeline is planned for its first batch; call prepare or step first")
        return next(reversed(self._prepared.values())).plan

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, target: Any = None) -> PipelinePlan:
        """Plans for batches of this shape, if the shape is new; trains nothing.

        Raises:
            BudgetError: if no plan fits.
            CaptureError: if the model cannot be cut, or its gradients would change.
            PipelineError: if another process cannot run the plan.
        """
        return self._prepare(args, kwargs or {}, target).plan

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Forward and backward pass of a batch; gradients are added to `.grad`.

        Args:
            args: the model's positional inputs, of the whole batch, the same on every process.
            target: second argument of the loss, after the output.
            kwargs: the model's keyword inputs.

        Returns:
            The loss of the batch, detached, on every process.

        Raises:
            PipelineError: if another process failed; the pipeline can then no longer be used.
        """
        if self._failed is not None:
            raise PipelineError("this pipeline has failed before and cannot go on; make a new one") from self._failed
        prepared = self._prepare(args, kwargs, target)
        return self._run_together(prepared, flatten_inputs(args, kwargs, target)[0])

    def _run_together(self, prepared: _Prepared, leaves: Sequence[Any]) -> torch.Tensor:
        """Runs a step; if the step fails on one process, it ends on all processes."""
        try:
            return self._run(prepared, leaves)
        except Exception as error:
            prepared.shared.give_back(self.model)
            if processes.world_size(self._group) == 1:
                raise
            self._failed = error
            other = processes.failure_elsewhere(error)
            processes.fail(error)
            for stage in prepared.stages.values():
                stage.clear_runtime_states()
            if other is not None:
                raise other from error
            raise

    def engine_stages(self) -> list[EngineStage]:
        """The stages that the engine runs in this process for the newest plan."""
        return list(next(reversed(self._prepared.values())).stages.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state of the whole model, the same as without a pipeline; on every process."""
        if not self._prepared:
            return dict(self.model.state_dict())
        return self._any().shared.gathered(self.model)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads a whole model's state; each process takes the parameters and buffers of its stages.

        Raises:
            RuntimeError: if names or shapes differ.
        """
        if not self._prepared:
            self.model.load_state_dict(state)
            return
        self._any().shared.load(self.model, state)

    def release(self) -> nn.Module:
        """Gives every process the whole model again, and drops the plans; gradients stay where they are.

        Returns:
            The model, to evaluate or train by itself.
        """
        if self._prepared:
            self._any().shared.restore(self.model)
            self._prepared.clear()
        return self.model

    def _any(self) -> _Prepared:
        return next(iter(self._prepared.values()))

    def _run(self, prepared: _Prepared, leaves: Sequence[Any]) -> torch.Tensor:
        parts = cut_batch(leaves, prepared.plan.sizes)
        shares = loss_shares(prepared.losses, parts, prepared.plan.sizes) if prepared.losses else [1.0]
        weights = [torch.tensor(share, dtype=torch.float64, device=self._device) for share in shares]
        stream = prepared.stream
        if stream is not None:
            stream.begin()
        prepared.shared.begin(self.model)
        losses = step_microbatches(prepared.engine, list(prepared.stages.values()), parts, weights)
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)
        prepared.shared.add_gradients(self.model)
        if self._data_group is not None:
            held = {id(p): p for stage in prepared.stages.values() for p in stage.submod.parameters()}
            processes.average_gradients(held.values(), self._data_group)
        if processes.world_size(self._group) > 1:
            loss = self._tell_loss(prepared, loss)
        return loss

    def _tell_loss(self, prepared: _Prepared, loss: torch.Tensor) -> torch.Tensor:
        """The last stage's loss, on every process; sets the generators as an unpipelined step would leave them."""
        source = prepared.plan.schedule.device_of()[prepared.plan.schedule.num_stages - 1]
        told = loss.double()
        dist.broadcast(told, group=self._group, group_src=source)
        if prepared.stream is not None:
            prepared.stream.share(source, self._group)
        return told.to(prepared.loss_dtype)

    # Planning.

    def _prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> _Prepared:
        leaves, spec = flatten_inputs(args, kwargs, target)
        # Settings of this process alone must not start a new plan here: the other processes would wait for it.
        alone = processes.world_size(self._group) == 1
        settings = kernel_settings(self._device.type) if alone else ()
        key = (*pipeline_signature(self.model, leaves), settings)
        if key not in self._prepared:
            self._refuse_trained_inputs(leaves)
            try:
                self._prepared[key] = self._make(leaves, spec)
            except Exception:
                if self._prepared:
                    self._any().shared.keep_own(self.model)
                raise
        return self._prepared[key]

    def _refuse_trained_inputs(self, leaves: Sequence[Any]) -> None:
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise SpecError("an input of the pipeline requires a gradient, and none would come back; detach it")

    def _make(self, leaves: list[Any], spec: Any) -> _Prepared:
        sizes = sizes_of(batch_size(leaves), self._question.num_microbatches)
        if len(sizes) != self._question.num_microbatches:
            log.warning("a batch of %d gives %d micro-batches of %d", sum(sizes), len(sizes), sizes[0])
        if len(sizes) < self._question.num_devices and not self._question.one_device:
            log.warning(
                "fewer micro-batches (%d) than devices (%d): some of these always wait, and 1f1b runs as gpipe does",
                len(sizes),
                self._question.num_devices,
            )
        if self._prepared:
            self._any().shared.restore(self.model)
        question = replace(self._question, num_microbatches=len(sizes))
        for _ in range(MOST_PLANS):
            prepared = self._planned(question, leaves, sizes, spec)
            prepared = self._proved(prepared, leaves)
            peaks, budgets = prepared.plan.measured_peak_bytes, self._question.budget_bytes
            if not peaks or budgets is None or question.budget_bytes is None or fits(peaks, budgets):
                prepared.shared.keep_own(self.model)
                return prepared
            less = corrected(question.budget_bytes, budgets, prepared.plan.peak_bytes, peaks)
            log.info("processes took %s bytes, above their budgets; planning for %s", peaks, less)
            question = replace(question, budget_bytes=less)
        assert budgets is not None
        raise above_budget(peaks, budgets)

    def _planned(self, question: Question, leaves: list[Any], sizes: list[int], spec: Any) -> _Prepared:
        """Plans in process 0 and builds in all processes; if one process fails, all fail."""
        parts = cut_batch(leaves, sizes)
        document: Any = None
        error: BaseException | None = None
        forwards: list[tuple[ForwardGraph, Sequence[Any]]] = []
        traced = TracedLosses(model=self.model, loss_fn=self._loss_fn, leaves=leaves, spec=spec)
        compiled: Mapping[int, CompiledStage] = {}
        try:
            forwards = [(self._capture(part, spec), part) for part in ([parts[0], parts[-1]][: len(set(sizes))])]
            if processes.is_first(self._groups):
                made = make_pipeline_plan(
                    *(traced, forwards, sizes, question, self._device),
                    fixed=self._any().plan if self._prepared else None,
                )
                compiled, document = made.compiled, encode_pipeline(made.plan)
        except Exception as raised:
            error = raised
        processes.agree(error, self._device, self._groups)
        plan = decode_pipeline(processes.send_document(document, self._device, self._groups))
        try:
            prepared = self._build(plan, forwards, self._read_losses(forwards, sizes, traced), compiled)
        except Exception as raised:
            error = raised
        processes.agree(error, self._device, self._groups)
        return prepared

    def _proved(self, prepared: _Prepared, leaves: Sequence[Any]) -> _Prepared:
        """With several processes: runs the batch with transfers and measures each peak; the model stays unchanged."""
        if processes.world_size(self._group) == 1 or not self._question.prove:
            return prepared
        stages = list(prepared.stages.values())
        with preserved(self.model):
            for parameter in self.model.parameters():
                parameter.grad = None
            start = resident_bytes(stages, leaves, self._question, self._device)
            self._run_together(prepared, leaves)
            start -= prepared.shared.drop_gradients(self.model)
            run = functools.partial(self._run_together, prepared, leaves)
            peak = measure(run, device=self._device, warmup=0, repeats=0, start_bytes=start).peak_bytes
        mine = torch.tensor([peak], device=self._device)
        peaks = [torch.empty_like(mine) for _ in range(processes.world_size(self._group))]
        dist.all_gather(peaks, mine, group=self._group)
        if self._data_group is not None:
            for one in peaks:
                dist.all_reduce(one, dist.ReduceOp.MAX, group=self._data_group)
        plan = structs.replace(prepared.plan, measured_peak_bytes=tuple(int(one) for one in peaks))
        return replace(prepared, plan=plan)

    def _capture(self, part: Sequence[Any], spec: Any) -> ForwardGraph:
        args, kwargs, target = spec.unflatten(part)
        return capture_forward(self.model, args, kwargs, target, self._loss_fn)

    def _read_losses(
        self, forwards: list[tuple[ForwardGraph, Sequence[Any]]], sizes: Sequence[int], traced: TracedLosses
    ) -> tuple[LossReading, ...]:
        """How the loss of each micro-batch is read; empty for a single micro-batch, which is the whole batch."""
        if len(sizes) == 1:
            return ()
        each = (sizes[0], sizes[-1])
        readings = [read_loss(traced.of(size, forward)) for size, forward in zip(each, forwards, strict=False)]
        if not all(reading.is_settled for reading in readings):
            count = 2 if sizes[0] != 2 else 3 if sum(sizes) > 2 else 1  # process 0 has already traced this number
            other = read_loss(traced.of(count))
            readings = [reading.settled(other, count / size) for reading, size in zip(readings, each, strict=False)]
        return (*[readings[0]] * (len(sizes) - 1), readings[-1])

    def _build(
        self,
        plan: PipelinePlan,
        forwards: list[tuple[ForwardGraph, Sequence[Any]]],
        losses: tuple[LossReading, ...],
        compiled: Mapping[int, CompiledStage],
    ) -> _Prepared:
        """Builds the stages and the engine that run the plan; `compiled` holds stages that are compiled already."""
        processes.join()
        device_of_stage = plan.schedule.device_of()
        alone = processes.world_size(self._group) == 1
        mine = [s for s, d in sorted(device_of_stage.items()) if alone or d == processes.rank(self._group)]
        stream = RandomStream(self._device, len(plan.sizes)) if plan.takes_random else None
        compiled = compiled or capture_stages(plan, forwards, mine, self._device)
        stages = engine_stages(plan, compiled, self._device, stream, self._group)
        schedule = on_one_device(plan.schedule) if alone else plan.schedule
        return _Prepared(
            plan=plan,
            stages=stages,
            engine=runtime(schedule, list(stages.values())),
            losses=losses,
            stream=stream,
            loss_dtype=forwards[0][0].loss.meta["example_value"].dtype,
            shared=share_out(planned_cuts(forwards[0][0], plan), device_of_stage, self._group),
        )
