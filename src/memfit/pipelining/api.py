"""`memfit.pipeline`: the public call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from memfit.capture.optimizer.unwrapped import OptimizerLike, check_optimizer
from memfit.capture.training_step import device_of
from memfit.distributed import process_group as processes
from memfit.errors import SpecError
from memfit.pipelining.config import Question
from memfit.pipelining.partition.forward_graph import PipelineLoss
from memfit.pipelining.pipeline import Pipeline
from memfit.pipelining.search.device_budgets import Amount, resolve_budgets
from memfit.torch_compat.core import user_modes_set_aside

__all__ = ["pipeline"]

_BATCH_NORM = ("refuse", "per-microbatch")


@user_modes_set_aside()
def pipeline(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    num_stages: int,
    num_microbatches: int,
    budget_per_device: Amount | Sequence[Amount] | None = None,
    one_device: bool = False,
    schedule: str = "auto",
    checkpoint: str = "auto",
    loss_fn: PipelineLoss | None = None,
    optimizer: OptimizerLike | None = None,
    batch_norm: str = "refuse",
    tiers: str | None = None,
    levers: str | tuple[str, ...] = "bitwise",
    prove: bool = True,
    search_seconds: float = 2.0,
    group: dist.ProcessGroup | None = None,
    data_group: dist.ProcessGroup | None = None,
) -> Pipeline:
    """Trains a model as a pipeline: in stages on several devices, several micro-batches at a time.

    With `num_stages` processes (`torchrun --nproc-per-node K`), each process runs its stages; a single process runs all
    stages. The caller writes the loop: `loss = pipe.step(x, target=y); optimizer.step(); optimizer.zero_grad()`.

    Args:
        model: any module that Dynamo captures as one graph, in training mode.
        args: positional inputs of a whole batch, the same on every process.
        kwargs: keyword inputs.
        target: second argument of the loss, after the output.
        num_stages: number of devices.
        num_microbatches: number of parts into which the batch is cut along its first axis.
        budget_per_device: bytes or `"8GiB"` for every device, or a list with one budget for each; None for no limit.
        one_device: the stages take turns on this process's one device, and the budget is for all of them together.
        schedule: `"auto"`, or a name of `memfit.pipelining.runtime.engine.SCHEDULES`.
        checkpoint: `"auto"` for a plan within the budget; `"never"`, `"always"` or `"except_last"` for the
            micro-batches whose forward pass is recomputed.
        loss_fn: takes the output, and the target if there is one, and returns a scalar that is a sum or a mean over
            samples; without it the loss is the output's own `loss`.
        optimizer: of the model's parameters; its state counts.
        batch_norm: `"refuse"`, or `"per-microbatch"` for statistics of each micro-batch: gradients then differ from
            those of the whole batch.
        tiers: as for `memfit.fit`; a limit is for all micro-batches of a process together.
        levers: as for `memfit.fit`; with `"all"`, a stage that fits in no other way runs slice by slice, and its
            gradients are equal up to rounding.
        prove: run each device's part alone, measure its peak, and correct the plan.
        search_seconds: work of each search for a stage's plan, in seconds of one free core.
        group: the processes of this pipeline; None for all processes.
        data_group: the processes that run the same stage in all replicas, each replica on another batch: all replicas
            use one plan, and gradients are averaged over the replicas after each step.

    Returns:
        The pipeline, planned for batches of this shape; `pipe.plan` is the plan.

    Raises:
        BudgetError: no plan fits; the message names a number of stages that is enough, if one is found.
        CaptureError: the model cannot be cut, or its gradients would change.
        PipelineError: another process cannot run the plan.
        SpecError: an argument is invalid.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise SpecError(f"num_stages and num_microbatches are at least 1 ({num_stages=}, {num_microbatches=})")
    if batch_norm not in _BATCH_NORM:
        raise SpecError(f"batch_norm is one of {', '.join(map(repr, _BATCH_NORM))} (batch_norm: {batch_norm!r})")
    if one_device and processes.world_size(group) > 1:
        raise SpecError(
            f"with one_device=True all stages run in one process, and there are {processes.world_size(group)}; leave "
            "it out, and give the budget of each device"
        )
    check_optimizer(optimizer)
    num_budgets = 1 if one_device else num_stages
    question = Question(
        num_devices=num_stages,
        num_microbatches=num_microbatches,
        one_device=one_device,
        budget_bytes=resolve_budgets(budget_per_device, num_budgets, device_of(model)),
        schedule=schedule,
        policy=checkpoint,
        optimizer=optimizer,
        trained_bytes=sum(p.nbytes for p in model.parameters() if p.requires_grad),
        search_seconds=search_seconds,
        tiers=tiers,
        levers=levers,
        allow_batch_norm=batch_norm == "per-microbatch",
        prove=prove,
        in_processes=processes.world_size(group) > 1,
    )
    made = Pipeline(model, question, loss_fn, group, data_group)
    made.prepare(args, kwargs, target)
    return made
