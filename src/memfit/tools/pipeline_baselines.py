"""Baselines for pipelines: torchgpipe, and PyTorch's engine with the same number of layers in each stage.

Both run all stages in this process, like the pipeline with which they are compared, and take the same micro-batches and
loss. Each uses its own checkpointing: torchgpipe's `except_last`, and `torch.utils.checkpoint` around each stage for
the engine.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

from memfit.distributed import process_group as processes
from memfit.errors import SpecError
from memfit.pipelining.runtime.engine import runtime
from memfit.planner.pipeline.schedule import on_one_device, one_forward_one_backward
from memfit.tools.sequential_pipeline import as_sequential, equal_ends

__all__ = ["Passes", "Step", "Trial", "equal_layers", "inline_workers", "time_passes", "torchgpipe"]


@dataclass(slots=True)
class Passes:
    """Time of the passes of a step, and its loss.

    Attributes:
        forward_seconds: of all forward passes together.
        backward_seconds: of all backward passes.
        loss: of the batch.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    loss: float = 0.0


Step = Callable[[], Passes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Model to train, its batch, and the numbers of stages and micro-batches.

    Attributes:
        model: the model, whose parameters receive gradients.
        inputs: a batch.
        target: of the batch.
        loss_fn: takes output and target; a mean over samples.
        num_stages: number of stages into which the model is cut.
        num_microbatches: number of parts into which the batch is cut.
        checkpointed: whether forward passes are recomputed.
    """

    model: nn.Module
    inputs: torch.Tensor
    target: torch.Tensor
    loss_fn: Callable[[Any, Any], torch.Tensor]
    num_stages: int
    num_microbatches: int
    checkpointed: bool


def torchgpipe(trial: Trial) -> Step:
    """A step of torchgpipe 0.0.7, with its layers balanced by its own measurement.

    Raises:
        SpecError: if torchgpipe is not installed, or the model is not a list of layers.
    """
    try:
        from torchgpipe import GPipe
        from torchgpipe.balance import balance_by_time
    except ImportError as error:
        raise SpecError("torchgpipe is not installed; install it with pip install 'memfit[bench]'") from error
    layers = as_sequential(trial.model)
    sample = trial.inputs[: max(1, len(trial.inputs) // trial.num_microbatches)]
    if trial.num_stages > 1:
        balance = balance_by_time(trial.num_stages, layers, sample, timeout=1.0, device=torch.device("cpu"))
    else:
        balance = [len(layers)]
    for parameter in layers.parameters():
        parameter.grad = None
    devices = ["cpu"] * trial.num_stages
    policy = "except_last" if trial.checkpointed else "never"
    piped = GPipe(layers, balance, devices=devices, chunks=trial.num_microbatches, checkpoint=policy)

    def step() -> Passes:
        begin = time.perf_counter()
        loss = trial.loss_fn(piped(trial.inputs), trial.target)
        middle = time.perf_counter()
        loss.backward()
        return Passes(middle - begin, time.perf_counter() - middle, float(loss.detach()))

    return step


class _Inline(queue.SimpleQueue[Any]):
    """A worker's queue that runs each task at once."""

    def __init__(self, results: queue.SimpleQueue[Any]) -> None:
        super().__init__()
        self.results = results

    def put(self, task: Any, *rest: Any) -> None:
        if task is None:
            return
        try:
            self.results.put((True, (task, task.compute())))
        except Exception:
            self.results.put((False, sys.exc_info()))


@contextlib.contextmanager
def inline_workers() -> Iterator[None]:
    """Lets torchgpipe work in the calling thread, where the profiler sees its memory.

    All its devices are the CPU here, so they share one thread anyway.
    """
    module = sys.modules.get("torchgpipe.pipeline")
    if module is None:
        yield
        return

    @contextlib.contextmanager
    def spawn(devices: Sequence[Any]) -> Iterator[Any]:
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        yield [_Inline(results)] * len(devices), [results] * len(devices)

    spawn_workers, module.spawn_workers = module.spawn_workers, spawn  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.spawn_workers = spawn_workers  # type: ignore[attr-defined]


class _Checkpointed(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layers, x, use_reentrant=False)


def equal_layers(trial: Trial) -> Step:
    """A step of PyTorch's engine: its own stages, 1F1B, the same number of blocks in each stage.

    Raises:
        SpecError: if the model is not a list of layers.
    """
    processes.join()
    layers = as_sequential(trial.model)
    ends = equal_ends(layers, trial.num_stages)
    modules = [layers[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    device = trial.inputs.device
    crossing = trial.inputs[: len(trial.inputs) // trial.num_microbatches]
    stages = []
    for index, module in enumerate(modules):
        with torch.no_grad():
            left = torch.empty_like(module(crossing))
        run = _Checkpointed(module) if trial.checkpointed else module
        stages.append(
            PipelineStage(
                run,
                index,
                trial.num_stages,
                device,
                input_args=(crossing.detach().requires_grad_(crossing.is_floating_point() and index > 0),),
                output_args=(left.requires_grad_(),),
            )
        )
        crossing = left.detach()
    passes = Passes()
    time_passes(stages, passes)
    schedule = one_forward_one_backward(trial.num_stages, trial.num_microbatches)
    engine = runtime(on_one_device(schedule), stages, loss_fn=trial.loss_fn)
    parts, targets = trial.inputs.chunk(trial.num_microbatches), trial.target.chunk(trial.num_microbatches)

    def step() -> Passes:
        passes.forward_seconds = passes.backward_seconds = 0.0
        losses: list[torch.Tensor] = []
        engine.step(
            arg_mbs=[(part,) for part in parts],
            kwarg_mbs=[{} for _ in parts],
            target_mbs=list(targets),
            losses=losses,
            return_outputs=False,
        )
        for parameter in trial.model.parameters():  # losses are means of equal micro-batches
            if parameter.grad is not None:
                parameter.grad.div_(trial.num_microbatches)
        passes.loss = float(torch.stack(losses).mean().detach())
        return passes

    return step


def time_passes(stages: Any, passes: Passes) -> None:
    """Makes stages add the times of their passes to `passes`."""
    for stage in stages:
        for name, kind in (("forward_one_chunk", "forward_seconds"), ("backward_one_chunk", "backward_seconds")):
            run = getattr(stage, name)

            def timed(*args: Any, _run: Any = run, _kind: str = kind, **kwargs: Any) -> Any:
                begin = time.perf_counter()
                result = _run(*args, **kwargs)
                setattr(passes, _kind, getattr(passes, _kind) + time.perf_counter() - begin)
                return result

            setattr(stage, name, timed)
