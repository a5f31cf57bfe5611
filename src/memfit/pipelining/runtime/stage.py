"""A stage for PyTorch's pipelining engine: it receives, runs, sends and holds tensors.

The engine's schedules call a stage for each micro-batch; the engine's own `PipelineStage` holds memory that a plan
cannot afford: receive buffers for all micro-batches during the whole step, and every sent result until the backward
pass. Here a receive buffer exists only from the start of its receive, a result is held until it has arrived
(`memfit.pipelining.runtime.send_queue`), and autograd saves only the tensors that the stage's plan saves. This module
handles the data only; the engine decides the order of passes.

A tensor that only passes through a stage never enters its module, and is held no longer than the stage's own sent
results. The same is true of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from memfit.pipelining.partition.boundary_layout import in_memory_order, same_layout
from memfit.pipelining.partition.stages import Crossing, Stage
from memfit.pipelining.runtime.rng import RandomStream
from memfit.pipelining.runtime.send_queue import Outbox
from memfit.runtime.deferred_backward import Later
from memfit.torch_compat.distributed import PipelineStageBase

__all__ = ["EngineStage"]

StageCall = Callable[..., Any]
"""A call with the arguments and results of the stage's module."""


class _Root(torch.autograd.Function):
    """The scalar from which a stage's backward pass starts, so that nothing else holds the results or their gradients.

    `waiting` is filled with the gradients just before the backward pass; autograd then owns them, and frees each
    gradient after its last use.
    """

    @staticmethod
    def forward(ctx: Any, waiting: list[torch.Tensor | None], *results: torch.Tensor) -> torch.Tensor:
        ctx.waiting = waiting
        return results[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients = tuple(ctx.waiting)
        ctx.waiting.clear()
        return (None, *gradients)


class _InFlight:
    """Tensors that a stage holds for a micro-batch in flight, between its passes."""

    __slots__ = ("arrived", "root", "waiting")

    def __init__(
        self,
        arrived: Sequence[torch.Tensor | None],
        root: torch.Tensor | None,
        waiting: list[torch.Tensor | None],
    ) -> None:
        self.arrived = arrived
        self.root = root
        self.waiting = waiting


class EngineStage(PipelineStageBase):
    """A stage of the pipeline.

    Args:
        runs: for each micro-batch, the stage for its size and the call that runs the module by its plan.
        num_stages: number of stages of the pipeline.
        device: device on which the stage runs.
        outbox: outbox for all stages of this process.
        group: group of the pipeline's processes; None for the default group.
        random_stream: random numbers of each micro-batch; None if the model draws none.
        later: list to which `runs` add the second parts of backward passes (`memfit.runtime.deferred_backward`).
    """

    def __init__(
        self,
        runs: Sequence[tuple[Stage, StageCall]],
        num_stages: int,
        device: torch.device,
        outbox: Outbox,
        group: dist.ProcessGroup | None = None,
        random_stream: RandomStream | None = None,
        later: Later | None = None,
    ) -> None:
        stage, _ = runs[0]
        super().__init__(stage.module, stage.index, num_stages, device, group)
        self.runs = runs
        self.random_stream = random_stream
        self.later: Later = [] if later is None else later
        self.deferred: dict[int, Later] = {}
        self.outbox = outbox
        self.arriving: dict[int, tuple[torch.Tensor, ...]] = {}
        self.to_send: dict[int, tuple[torch.Tensor, ...]] = {}
        self.returning: dict[int, list[torch.Tensor | None]] = {}
        self.to_return: dict[int, tuple[torch.Tensor | None, ...]] = {}
        self.in_flight: dict[int, _InFlight] = {}

    # Hooks in which the engine prepares its own stages: nothing to do here, as shapes and buffers are known before.

    def _prepare_forward_infra(self, num_microbatches: int, *rest: Any, **more: Any) -> Any:
        self.chunks = num_microbatches
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        return None

    def _prepare_backward_infra(self, num_microbatches: int, *rest: Any, **more: Any) -> Any:
        return None

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> Any:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        connects = self.group_size > 1 and dist.get_backend(self.group) != "gloo"  # gloo is connected from the start
        return super()._get_init_p2p_neighbors_ops() if connects else []

    def clear_runtime_states(self) -> None:
        """Drops the state of a step that did not end."""
        for held in (self.arriving, self.to_send, self.returning, self.to_return, self.in_flight, self.deferred):
            held.clear()
        self.later.clear()
        self.outbox.clear()
        self.output_chunks.clear()

    # Transfers.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocates buffers for arriving results, and returns the ops that receive into them."""
        if self.is_first:
            return []
        return [self._receive(t, self.stage_index - 1) for t in self.room_for_results(fwd_chunk_id)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends the results; nothing is left for the engine to do."""
        if not self.is_last:
            to = self._rank_of(self.stage_index + 1)
            sent = self.to_send.pop(fwd_chunk_id)
            self.outbox.send(sent, to, self.group, answer=(self.stage_index, fwd_chunk_id))
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocates buffers for gradients, and returns the ops that receive into them."""
        if self.is_last or not self.has_backward:
            return []
        room = self.room_for_gradients(bwd_chunk_id)
        return [self._receive(t, self.stage_index + 1) for t in room if t is not None]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends gradients back; nothing is left for the engine to do."""
        if not self.is_first and self.has_backward:
            gradients = [g for g in self.to_return.pop(bwd_chunk_id) if g is not None]
            self.outbox.send(gradients, self._rank_of(self.stage_index - 1), self.group)
        return []

    def room_for_results(self, microbatch: int) -> Sequence[torch.Tensor]:
        """Allocates buffers for arriving results."""
        self.outbox.let_go()
        stage, _ = self.runs[microbatch]
        self.arriving[microbatch] = (*(c.empty(self.device) for c in stage.arriving), *self.random_states())
        return self.arriving[microbatch]

    def room_for_gradients(self, microbatch: int) -> Sequence[torch.Tensor | None]:
        """Allocates buffers for the gradients of sent results; None for a result without gradient."""
        self.outbox.let_go(answer=(self.stage_index, microbatch))
        stage, _ = self.runs[microbatch]
        self.returning[microbatch] = [c.empty_gradient(self.device) if c.requires_grad else None for c in stage.leaving]
        return self.returning[microbatch]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Takes the results of the previous stage, on the same device."""
        self.arriving[mb_index] = tuple(t.detach() for t in prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """Gradients for the previous stage, on the same device."""
        return self.to_return.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Takes gradients from the next stage, on the same device."""
        self.returning[mb_index] = list(next_stage_bwd_outputs)

    def _receive(self, tensor: torch.Tensor, source: int) -> dist.P2POp:
        return dist.P2POp(dist.irecv, in_memory_order(tensor), self._rank_of(source), self.group)

    def _rank_of(self, stage: int) -> int:
        rank = self.stage_index_to_group_rank[stage]
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def random_states(self) -> list[torch.Tensor]:
        """Buffer for the random state that goes with a micro-batch; empty if the model draws no random numbers."""
        return [] if self.random_stream is None else [self.random_stream.state().to(self.device)]

    # Compute.

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Runs the stage on a micro-batch; `args` are the leaves of the step's inputs."""
        self.outbox.begin_pass()
        stage, call = self.runs[fwd_chunk_id]
        arrived = list(self.arriving.pop(fwd_chunk_id, ()))
        stream = self.random_stream
        state = arrived.pop() if stream is not None and not self.is_first else None
        for tensor, crossing in zip(arrived, stage.arriving, strict=True):
            tensor.requires_grad_(crossing.requires_grad and self.has_backward)
        operands = [*(arrived[place] for place in stage.taken), *(args[place] for place in stage.leaves)]
        if stream is None:
            output = call(*operands)
        else:
            with stream.of(fwd_chunk_id, state, last=self.is_last) as after:
                output = call(*operands)
        if self.is_last:
            self.in_flight[fwd_chunk_id] = _InFlight(arrived, None, [])
            return output
        made = iter(output)
        leaving = [next(made) if place is None else arrived[place] for place in stage.passed_through]
        waiting: list[torch.Tensor | None] = []
        roots = [leaving[place] for place in _differentiated(stage)]
        root = _Root.apply(waiting, *roots) if self.has_backward and roots else None
        taken = set(stage.taken)
        saved = [tensor if place in taken else None for place, tensor in enumerate(arrived)]
        self.in_flight[fwd_chunk_id] = _InFlight(saved, root, waiting)
        sent = (
            *(_shaped(tensor, crossing) for tensor, crossing in zip(leaving, stage.leaving, strict=True)),
            *(() if stream is None else after),
        )
        if self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank:
            self.to_send[fwd_chunk_id] = sent
        return sent

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs the backward pass of a micro-batch, or the part for which the previous stage waits."""
        if not self.has_backward:
            return
        self.outbox.begin_pass()
        stage, _ = self.runs[bwd_chunk_id]
        held = self.in_flight.pop(bwd_chunk_id)
        gradients = self.returning.pop(bwd_chunk_id, [])
        if self.is_last:
            root = loss
        else:
            root, held.root = held.root, None
            held.waiting.extend(
                _as_returned(gradients[place], stage.leaving[place]) for place in _differentiated(stage)
            )
        passing = [None if place is None else g for place, g in zip(stage.passed_through, gradients, strict=True)]
        gradients.clear()
        if root is not None:
            root.backward()
        if self.is_last:
            loss.detach_()  # the engine keeps all losses; their graphs would keep the arrived tensors
        if not self.is_first:
            self.to_return[bwd_chunk_id] = _gradients(stage, held.arrived, passing, self.device)
        self.deferred[bwd_chunk_id] = list(self.later)
        self.later.clear()
        if full_backward:
            self._run_deferred(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Runs the deferred part of the backward pass of a micro-batch."""
        self.outbox.begin_pass()
        self._run_deferred(bwd_chunk_id)

    def _run_deferred(self, bwd_chunk_id: int) -> None:
        for rest in self.deferred.pop(bwd_chunk_id, ()):
            rest()


def _shaped(result: torch.Tensor, crossing: Crossing) -> torch.Tensor:
    """A tensor that a stage returned or passed through, in the layout that the next stage takes."""
    if result.dim() != len(crossing.shape):
        return result.detach().as_strided(crossing.shape, crossing.stride)
    if same_layout(crossing.shape, result.stride(), crossing.stride):
        return result.detach()
    return crossing.empty(result.device).copy_(result.detach())


def _as_returned(gradient: torch.Tensor | None, crossing: Crossing) -> torch.Tensor | None:
    """A gradient in the form that the backward pass of the returned tensor takes: flat if the crossing is flat."""
    return in_memory_order(gradient) if crossing.is_flat and gradient is not None else gradient


def _differentiated(stage: Stage) -> list[int]:
    """Places among the leaving tensors of those that the module computes and that receive a gradient."""
    leaving = zip(stage.leaving, stage.passed_through, strict=True)
    return [place for place, (crossing, handed) in enumerate(leaving) if crossing.requires_grad and handed is None]


def _gradients(
    stage: Stage,
    arrived: Sequence[torch.Tensor | None],
    passing: Sequence[torch.Tensor | None],
    device: torch.device,
) -> tuple[torch.Tensor | None, ...]:
    """The gradient of each arrived tensor: zeros if no gradient reached it, as the previous stage waits for one."""
    gradients: list[torch.Tensor | None] = []
    through = dict(zip(stage.passed_through, passing, strict=True))
    for place, (tensor, crossing) in enumerate(zip(arrived, stage.arriving, strict=True)):
        own = through.get(place)
        if tensor is not None:
            own, tensor.grad = tensor.grad, None
        if crossing.requires_grad and own is None:
            own = crossing.empty_gradient(device).zero_()
        gradients.append(own if own is None else _laid_out(own, crossing))
    return tuple(gradients)


def _laid_out(tensor: torch.Tensor, crossing: Crossing) -> torch.Tensor:
    """The gradient with the strides that the previous stage expects."""
    if same_layout(crossing.shape, tensor.stride(), crossing.gradient_stride):
        return tensor
    return crossing.empty_gradient(tensor.device).copy_(tensor)
