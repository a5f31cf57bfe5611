"""The predicted memory of a training step, from fake tensors and rooflines; no device is needed.

The peak is that of the baseline step run on fake tensors, so with the lifetimes that Python, autograd and its engine
give; the graph gives the parts of the peak. On CPU, the workspace of kernels comes from samples. A model whose code
reads values runs one real step (`memfit.tools.baseline_peak`). With tiers, the estimate also includes swapping; the
links of the tiers are measured, once for each machine.

Known limits: workspaces are not known on other devices, nor for kernels that are not torch's own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import structs
from torch import nn

from memfit import strategies
from memfit.capture.distributed.ddp import unwrapped
from memfit.capture.distributed.fsdp import is_sharded
from memfit.capture.fx_module import OneGraph
from memfit.capture.loss.reading import LossFunction
from memfit.capture.optimizer.unwrapped import OptimizerLike
from memfit.capture.options import CaptureOptions
from memfit.capture.training_step import Capture, capture_step, device_of, given_args
from memfit.errors import CaptureError, SpecError
from memfit.ir.graph import Phase, StepGraph, StorageKind
from memfit.ir.instructions import computes_in
from memfit.ir.plan_file import Prediction
from memfit.ir.program import whole_program
from memfit.ir.residents import ResidentKind, bytes_of
from memfit.planner.analysis.explain import prediction
from memfit.planner.bounds.lower_bound import widest_op_bytes
from memfit.profiling.baseline_peak import BaselinePeak
from memfit.profiling.profiler import with_rooflines
from memfit.runtime.offload.tiers import tier_links
from memfit.sim.simulator import live_storages_at, simulate, simulate_baseline
from memfit.tools.baseline_peak import baseline_peak
from memfit.torch_compat.core import user_modes_set_aside
from memfit.units import format_bytes

__all__ = ["Estimate", "estimate"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predicted memory of one plain training step, in bytes; the parts are those of its peak and sum to it.

    Attributes:
        label: name of the model and its batch.
        parameters: parameters.
        buffers: buffers, inputs, and gradients that exist before the step.
        gradients: gradients of the parameters.
        optimizer: optimizer state from the second step on.
        activations: forward results that the backward pass reads, and tensors that code between graph breaks or the
            loss holds.
        temporaries: everything else.
        peak: highest memory of the step `loss_fn(model(x)).backward()`, which frees the outputs of the model once the
            loss is computed.
        outputs_held_bytes: bytes that are added to the peak if the loop holds the outputs until the backward pass ends,
            as `outputs = model(x)` does. `fit` plans for such a loop. 0 if only the step graph gives the peak (sharded
            and wrapped models): then the peak includes them.
        least: lower bound of the peak of any program that runs whole ops.
        step_seconds: roofline time, good for ratios only.
        by_module: activations by module, largest first.
        peak_at: op at the peak; the op at the peak of the graph if the peak was measured.
        measured: whether the peak is that of a real step, because the model's code reads values.
        swapping: the step in which all storages that can be swapped are swapped, if asked for; ops by rooflines, links
            as measured.
    """

    label: str
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    peak: int
    least: int
    step_seconds: float
    by_module: tuple[tuple[str, int], ...]
    peak_at: str
    measured: bool = False
    outputs_held_bytes: int = 0
    swapping: Prediction | None = None

    @property
    def basis(self) -> str:
        """How the peak was found, as text for people."""
        return "measured, as its code looks at values" if self.measured else "predicted, the model was not run"

    def by_kind(self) -> tuple[tuple[str, int], ...]:
        """The parts of the step's memory and their bytes."""
        kinds = ("parameters", "buffers", "gradients", "optimizer", "activations", "temporaries")
        return tuple((kind, getattr(self, kind)) for kind in kinds)

    def __str__(self) -> str:
        """A short table."""
        lines = [f"estimate  {self.label} ({self.basis})"]
        lines += [f"  {kind:<12} {format_bytes(nbytes):>12}" for kind, nbytes in self.by_kind()]
        lines.append(f"  {'peak':<12} {format_bytes(self.peak):>12}  at {self.peak_at}")
        if self.outputs_held_bytes:
            lines.append(f"  {'outputs':<12} {format_bytes(self.outputs_held_bytes):>12}  more if the loop holds them")
        return "\n".join(lines)


@user_modes_set_aside()
def estimate(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerLike | None = None,
    label: str = "",
    tiers: str | None = None,
) -> Estimate:
    """Predicts the memory of a plain training step, without running it unless its code reads values.

    Args:
        model: in training mode; may be on the meta device if it does not fit in memory.
        args: positional inputs.
        kwargs: keyword inputs.
        loss_fn: takes the output and returns a scalar.
        optimizer: its state counts.
        label: name of the model and its batch, for people.
        tiers: tiers that could hold swapped bytes, such as `"host"` or `"disk"`; their links are measured if they are
            not known yet. None for an estimate without swaps.

    Returns:
        Bytes by kind and by module.

    Raises:
        CaptureError: if the model cannot be captured.
        SpecError: if there is no such tier.
        SwapError: if a tier cannot be used.
    """
    if tiers is not None and device_of(model).type == "meta":
        raise SpecError(f"links are measured, so swaps need the device to be here (tiers: {tiers!r}, device: meta)")
    links = () if tiers is None else tier_links(tiers, device_of(model))
    args, kwargs = given_args(args), dict(kwargs or {})
    capture = _captured(model, args, kwargs, loss_fn=loss_fn, optimizer=optimizer, label=label)
    graph = structs.replace(with_rooflines(capture), tiers=links)
    device, counted = device_of(model), None
    if not is_sharded(model) and not isinstance(model, OneGraph) and unwrapped(model) is model:
        predicted_bytes = simulate_baseline(graph).peak_bytes
        counted = baseline_peak(model, args, kwargs, loss_fn, device, predicted_bytes=predicted_bytes)
    return _summary(graph, counted)


def _captured(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    loss_fn: LossFunction | None,
    optimizer: OptimizerLike | None,
    label: str,
) -> Capture:
    options = CaptureOptions(separate=lambda _: True)
    captured = partial(capture_step, model, args, kwargs, loss_fn=loss_fn, optimizer=optimizer, label=label)
    try:
        return captured(options=options)
    except CaptureError as error:
        if device_of(model).type != "meta":
            raise
        try:
            capture = captured(options=replace(options, as_compiled=True))
        except CaptureError:
            raise error from None
        log.warning(
            "%s looks at values, which the meta device does not have: the estimate is of the step that it runs when it "
            "is compiled, which may hold masks that eager mode drops",
            type(model).__name__,
        )
        return capture


def _summary(graph: StepGraph, counted: BaselinePeak | None) -> Estimate:
    step = graph.without_memfit()
    program = whole_program(step)
    timeline = simulate(step, program)
    parameters = bytes_of(graph.residents, ResidentKind.PARAMETER)
    buffers = bytes_of(graph.residents, ResidentKind.BUFFER, ResidentKind.INPUT, ResidentKind.GRADIENT)
    state = bytes_of(graph.residents, ResidentKind.OPTIMIZER_STATE)
    kept = bytes_of(graph.residents, ResidentKind.LOSS)
    read = {s for op in step.ops if op.phase is Phase.BACKWARD for s in op.reads}
    read = {s for s in read if step.storages[s].kind is StorageKind.FORWARD}
    position = timeline.peak_position
    producer = step.producers()
    gradients = 0
    saved: dict[str, int] = {}
    for storage in live_storages_at(step, program, position):
        nbytes, kind = step.storages[storage].nbytes, step.storages[storage].kind
        if kind is StorageKind.GRADIENT:
            gradients += nbytes
        elif storage in read:
            module = step.ops[producer[storage]].module or "(root)"
            saved[module] = saved.get(module, 0) + nbytes
    between = bytes_of(graph.residents, ResidentKind.PLAIN_CODE)
    saved |= {name: n for name, n in {"(between graph breaks)": between, "(kept by the loss)": kept}.items() if n}
    activations = sum(saved.values())
    where = "optimizer.step()"
    if position < len(program.instructions):
        computes = computes_in(program.instructions[: position + 1]) or computes_in(program.instructions)[:1]
        op = step.ops[computes[-1].op]
        where = f"{op.target} of {op.module or 'the model'}" + (" (backward)" if op.phase is Phase.BACKWARD else "")
    peak, measured, held_bytes = timeline.peak_bytes, False, 0
    if counted is not None:
        there = parameters + buffers + state + kept
        peak, after_step = there + counted.step_bytes, there + graph.gradient_bytes + graph.after_step_bytes
        measured, held_bytes = not counted.at, max(0, peak + counted.outputs_held_bytes - max(peak, after_step))
        if peak >= after_step:
            where = where if not counted.at or where.startswith(f"{counted.at} ") else counted.at
        else:
            peak, where = after_step, "optimizer.step()"
        room = max(0, peak - parameters - buffers - gradients - state)
        if activations > room:  # lifetimes are shorter than the graph knows
            saved = {module: nbytes * room // activations for module, nbytes in saved.items()}
            activations = sum(saved.values())
    swapping = None
    if graph.tiers:
        swapping = prediction(graph, simulate(graph, strategies.program("swap", graph, None)))
    return Estimate(
        label=graph.label,
        parameters=parameters,
        buffers=buffers,
        gradients=gradients,
        optimizer=state,
        activations=activations,
        temporaries=peak - parameters - buffers - gradients - state - activations,
        peak=peak,
        least=widest_op_bytes(graph),
        step_seconds=timeline.step_seconds,
        by_module=tuple(sorted(saved.items(), key=lambda item: -item[1])),
        peak_at=where,
        measured=measured,
        outputs_held_bytes=held_bytes,
        swapping=swapping,
    )
