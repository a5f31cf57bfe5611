"""The pipeline as the caller holds it: plans at its first step, then runs steps on the engine.

In one process all stages run here, one after the other, for tests and for a single device. With as many processes as
devices (`torchrun`), each runs its own stages and all call `step` with the same batch; see
`memfit.pipeline.processes` for what they agree on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from memfit.capture.trace import device_of
from memfit.pipeline.coupling import check_halves, refuse_batch_norm
from memfit.pipeline.engine import runtime, step_microbatches
from memfit.pipeline.engine_stage import EngineStage, StageCall
from memfit.pipeline.forward_graph import (
    ForwardGraph,
    PipelineLoss,
    capture_forward,
    flatten_inputs,
    loss_of,
)
from memfit.pipeline.loss_weights import Normaliser, loss_normalisers, weights_of
from memfit.pipeline.microbatches import batch_size, cut_batch, sizes_of
from memfit.pipeline.random_stream import RandomStream
from memfit.pipeline.search import Found, Question, StagePlan, capture_stage, plan_cuts, search
from memfit.pipeline.stages import cut_into_stages
from memfit.planner.schedule import Schedule, on_one_device
from memfit.runtime.apply import compile_program

__all__ = ["Pipeline", "Prepared"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReading:
    """What the loss of a micro-batch divides by, and for each leaf of the inputs its name there."""

    normalisers: list[Normaliser] | None
    names: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What runs steps of one shape.

    Attributes:
        found: cuts, schedule and plans.
        sizes: the samples of each micro-batch.
        stages: this process's, as the engine drives them.
        engine: PyTorch's.
        losses: for each micro-batch how its loss is read.
        stream: of random numbers; None if the model takes none.
    """

    found: Found
    sizes: tuple[int, ...]
    stages: tuple[EngineStage, ...]
    engine: Any
    losses: tuple[LossReading, ...]
    stream: RandomStream | None


class Pipeline:
    """A model that trains in stages; made by `memfit.pipeline`.

    Attributes:
        model: the unmodified module; its parameters are those of the stages.
        question: what was asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        question: Question,
        loss_fn: PipelineLoss | None,
        *,
        allow_batch_norm: bool = False,
    ) -> None:
        self.model = model
        self.question = question
        self.loss_fn = loss_fn
        self.allow_batch_norm = allow_batch_norm
        self.device = device_of(model)
        self.prepared: dict[tuple[Any, ...], Prepared] = {}

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Prepared:
        """What runs steps of this shape, planned if it is new."""
        leaves, _ = flatten_inputs(args, kwargs, target)
        key = tuple((tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else t for t in leaves)
        if key not in self.prepared:
            self.prepared[key] = self._plan(args, kwargs, target)
        return self.prepared[key]

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Forward and backward pass of a batch; gradients are added to `.grad`.

        Args:
            args: the model's positional inputs, of the whole batch.
            target: what the loss takes beside the output.
            kwargs: the model's keyword inputs.

        Returns:
            The loss of the batch, detached.
        """
        prepared = self.prepare(args, kwargs, target)
        leaves, _ = flatten_inputs(args, kwargs, target)
        parts = cut_batch(leaves, prepared.sizes)
        shares = _shares(prepared.losses, parts, prepared.sizes)
        weights = [torch.tensor(share, dtype=torch.float64, device=self.device) for share in shares]
        if prepared.stream is not None:
            prepared.stream.begin()
        losses = step_microbatches(prepared.engine, prepared.stages, parts, weights)
        return torch.stack(losses).sum()

    # Planning.

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Prepared:
        leaves, spec = flatten_inputs(args, kwargs, target)
        sizes = sizes_of(batch_size(leaves), self.question.num_microbatches)
        parts = cut_batch(leaves, sizes)
        forward = self._capture(parts[0], spec)
        if len(sizes) > 1:
            if not self.allow_batch_norm:
                refuse_batch_norm(forward, self.model)
            self._check_samples(leaves, spec, sizes)
        found = search(forward, parts[0], self.question, self.device)
        loss = self._read_loss(forward, parts[0])
        last_loss = loss if sizes[-1] == sizes[0] else self._read_loss(self._capture(parts[-1], spec), parts[-1])
        last = self._with_size(found, parts[-1], spec) if sizes[-1] != sizes[0] else found.stages
        random = any(op.random_state_bytes for plan in found.stages for op in plan.graph.ops)
        stream = RandomStream(self.device, len(sizes)) if random else None
        _need_process_group()
        stages = tuple(
            self._engine_stage(plan, other, len(sizes), found.schedule, stream)
            for plan, other in zip(found.stages, last, strict=True)
        )
        schedule = on_one_device(found.schedule, [plan.times for plan in found.stages])
        return Prepared(
            found=found,
            sizes=tuple(sizes),
            stages=stages,
            engine=runtime(schedule, stages),
            losses=(*[loss] * (len(sizes) - 1), last_loss),
            stream=stream,
        )

    def _capture(self, part: Sequence[Any], spec: Any) -> ForwardGraph:
        args, kwargs, target = spec.unflatten(part)
        return capture_forward(self.model, args, kwargs, target, self.loss_fn)

    def _with_size(self, found: Found, part: Sequence[Any], spec: Any) -> tuple[StagePlan, ...]:
        """The stages for micro-batches of another size, with the same cuts and planned the same way."""
        return plan_cuts(self._capture(part, spec), part, found, self.question, self.device)

    def _check_samples(self, leaves: Sequence[Any], spec: Any, sizes: Sequence[int]) -> None:
        if self.allow_batch_norm:
            return
        batch = sum(sizes)
        half = 2 if batch >= 4 else 1
        (some, *_) = cut_batch(leaves, [2 * half, batch - 2 * half])
        halves = cut_batch(some, [half, half])
        reading = self._read_loss(self._capture(halves[0], spec), halves[0])
        shares = _shares([reading] * 2, halves, [half] * 2)

        def loss(part: Sequence[Any]) -> torch.Tensor:
            args, kwargs, target = spec.unflatten(part)
            return loss_of(self.model, args, kwargs, target, self.loss_fn)

        check_halves(
            self.model,
            lambda: loss(some),
            lambda: [loss(half) * share for half, share in zip(halves, shares, strict=True)],
        )

    def _read_loss(self, forward: ForwardGraph, part: Sequence[Any]) -> LossReading:
        (whole,) = cut_into_stages(forward, [])
        capture, _ = capture_stage(whole, part, self.question, self.device, profile=False)
        (piece,) = capture.pieces.pieces
        graph = piece.reading.module.graph
        primals = list(graph.find_nodes(op="placeholder"))
        states = len(whole.module.names)
        names = {leaf: primals[states + place].name for place, leaf in enumerate(whole.leaves)}
        trained = frozenset(
            primals[place].name
            for place, name in enumerate(whole.module.names)
            if getattr(whole.module, name).requires_grad
        )
        return LossReading(normalisers=loss_normalisers(graph, frozenset(names.values()), trained), names=names)

    def _engine_stage(
        self, plan: StagePlan, other: StagePlan, count: int, schedule: Schedule, stream: RandomStream | None
    ) -> EngineStage:
        call = _call(plan)
        last_call = call if other is plan and plan.last is None else _call(other, last=True)
        runs: list[tuple[Any, StageCall]] = [(plan.stage, call)] * (count - 1) + [(other.stage, last_call)]
        return EngineStage(runs, schedule.num_stages, self.device, random_stream=stream)


def _shares(losses: Sequence[LossReading], parts: Sequence[Sequence[Any]], sizes: Sequence[int]) -> list[float]:
    operands = [
        {name: part[place] for place, name in loss.names.items()} for loss, part in zip(losses, parts, strict=True)
    ]
    return weights_of([loss.normalisers for loss in losses], operands, sizes)


def _call(plan: StagePlan, *, last: bool = False) -> StageCall:
    planned = plan.last if last and plan.last is not None else plan.planned
    return compile_program(plan.stage.module, plan.capture, planned.program).run


def _need_process_group() -> None:
    """The engine asks for a process group even if there is only one process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
