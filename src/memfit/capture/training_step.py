"""From a module to a step graph: captures the subgraphs, reads the loss, joins them, and adds the static memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from msgspec import structs
from torch import nn
from torch.nn.parameter import is_lazy

from memfit.capture.checkpoints import checkpoints_itself
from memfit.capture.distributed.fsdp import is_sharded, without_gathering
from memfit.capture.dynamo.capture_subgraphs import capture_subgraphs
from memfit.capture.failures import left_to_plain_code
from memfit.capture.fx_module import OneGraph
from memfit.capture.gradients.shared_inputs import SharedInputs
from memfit.capture.gradients.tangents import GradientStrides
from memfit.capture.link_graphs import join, join_baseline
from memfit.capture.loss.on_values import loss_reading, not_reaching
from memfit.capture.loss.reading import LossFunction, LossReading
from memfit.capture.optimizer.state import OptimizerCost, optimizer_cost
from memfit.capture.optimizer.unwrapped import OptimizerLike
from memfit.capture.options import DEFAULT_OPTIONS, CaptureOptions
from memfit.capture.residents import gradients_of, residents_of
from memfit.capture.subgraphs import Subgraph, Subgraphs, tensors_in
from memfit.errors import CaptureError, SpecError
from memfit.fxir.joint import JointOp
from memfit.fxir.refused import checkpoint_error
from memfit.ir.graph import Phase, StepGraph
from memfit.ir.residents import Resident, ResidentKind
from memfit.torch_compat.core import pytree

__all__ = ["Capture", "beside_gradients", "capture_step", "check_step", "device_of", "given_args", "read_again"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A captured step.

    Attributes:
        graph: the step, without op times yet.
        subgraphs: the subgraphs that the step was joined from.
        joint_ops: for each op of the graph its joint op; None for the loss and for ops of hooks between subgraphs.
        baseline_ops: the same for the ops of the baseline step.
        gradient_outputs: which outputs of the last subgraph receive gradients; None for all.
        assumed: those of them that the module does not return; only the loop can tell whether they receive a gradient.
        without_gradient: outputs of the last subgraph that were detached because the loop brought them no gradient, or
            may bring none.
        unreached: by graph, the outputs of earlier subgraphs that no gradient of the loss reaches.
        cut_between: those of the unreached outputs that were detached.
        decide: whether branches on inputs are decided.
        gradient_strides: strides of gradients of the subgraphs' outputs, where they differ from those of the outputs.
        shared: inputs that subgraphs take once per use (`memfit.capture.gradients.shared_inputs`).
        summed: names of parameters with several uses whose gradients are still added up inside a subgraph.
        residents: the residents of the graph before profiling, which adds workspaces of libraries.
        loss: the reading of the loss.
        optimizer: the memory of the optimizer.
        deferred: ops of the backward pass that come last and can wait (`memfit.planner.pipeline.split_backward`).
    """

    graph: StepGraph
    subgraphs: Subgraphs
    joint_ops: tuple[JointOp | None, ...]
    baseline_ops: tuple[JointOp | None, ...]
    gradient_outputs: frozenset[int] | None
    assumed: frozenset[int] = frozenset()
    without_gradient: frozenset[int] = frozenset()
    unreached: Mapping[str, frozenset[int]] = field(default_factory=dict)
    cut_between: Mapping[str, frozenset[int]] = field(default_factory=dict)
    decide: bool = False
    gradient_strides: GradientStrides = field(default_factory=dict)
    shared: SharedInputs = field(default_factory=dict)
    summed: tuple[str, ...] = ()
    residents: tuple[Resident, ...] = ()
    deferred: frozenset[int] = frozenset()
    loss: LossReading | None = None
    optimizer: OptimizerCost = field(default_factory=OptimizerCost)

    def without_call(self) -> Capture:
        """The same capture without Dynamo's call, so that it does not keep the module alive."""
        return replace(self, subgraphs=replace(self.subgraphs, call=None))

    @property
    def separated(self) -> frozenset[str]:
        """Keys of weight gradients that are computed part by part (`memfit.passes.concat_weight_gradients`)."""
        return frozenset[str]().union(*(subgraph.reading.separated for subgraph in self.subgraphs.subgraphs))

    @property
    def grid(self) -> tuple[int, ...]:
        """Numbers of tiles that samples may be cut into; empty if the step was not captured for the lever `tile`."""
        return max((subgraph.reading.grid for subgraph in self.subgraphs.subgraphs), default=())


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; without one, the device of a traced part's inputs, or CPU."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return model.device() if isinstance(model, OneGraph) else torch.device("cpu")


def capture_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerLike | OptimizerCost | None = None,
    label: str = "",
    options: CaptureOptions = DEFAULT_OPTIONS,
) -> Capture:
    """Captures one training step without running it (with graph breaks: without saving activations).

    Args:
        model: the module, in training mode.
        args: positional inputs.
        kwargs: keyword inputs.
        loss_fn: takes the output, returns a scalar; without it `output.loss` is used where it exists.
        optimizer: the optimizer whose state counts, or its cost.
        label: a name of the step, for people.
        options: how the step is captured.

    Returns:
        The step graph, and the captured joint op of each of its ops.

    Raises:
        CaptureError: if the model is not in training mode, cannot be captured, or its inputs are on another device.
    """
    check_step(model, args, kwargs, checkpointing=options.checkpointing)
    device_type = device_of(model).type
    # Processes that share a module must capture it equally often, independent of the data in their batches.
    options = replace(options, decide=options.decide and not is_sharded(model))

    def read(subgraphs: Subgraphs, take_back: Callable[[], None]) -> LossReading:
        receivers = subgraphs.receivers()
        with without_gathering(model, receivers):
            found = loss_reading(
                model, args, kwargs, subgraphs.output, loss_fn, device_type, receivers=receivers, take_back=take_back
            )
        last = subgraphs.subgraphs[-1].outputs
        return not_reaching(found, receivers, [last[place] for place in options.without_gradient if place < len(last)])

    with torch.autograd.set_detect_anomaly(False):  # anomaly detection looks at values, and there are none
        subgraphs = capture_subgraphs(model, args, kwargs, options=options, read=read)
    loss = subgraphs.loss
    assert loss is not None
    # A capture outlives the call: it must not hold the inputs or the outputs of the subgraphs.
    bare = replace(
        subgraphs,
        subgraphs=tuple(subgraph.without_tensors() for subgraph in subgraphs.subgraphs),
        output=None,
        loss=None,
    )
    graph, joint_ops = join(bare, loss.transient_bytes, device_type, held_bytes=loss.held_bytes)
    if not any(op.phase is Phase.BACKWARD for op in graph.ops):
        if subgraphs.plain.reasons:
            raise left_to_plain_code(model, subgraphs.plain.reasons)
        raise CaptureError(
            f"no gradient of the loss reaches a parameter or an input of {type(model).__name__}, so there is no "
            f"backward pass to plan (device: {device_type}); is everything frozen or detached, or, on the meta "
            "device, does the model look at values? Then build it on a real device"
        )
    baseline, baseline_ops = join_baseline(bare, loss.transient_bytes, device_type, held_bytes=loss.held_bytes)
    cost = optimizer_cost(optimizer, device_type)
    graph = structs.replace(
        graph,
        baseline=baseline,
        residents=residents_of(model, args, kwargs, subgraphs, loss, cost, device_type),
        after_step_bytes=cost.step_bytes,
        label=label or type(model).__name__,
    )
    summed = _summed(model, subgraphs, subgraphs.shared)
    assumed = _assumed(subgraphs, loss.receives_gradient)
    return Capture(
        graph=graph,
        subgraphs=bare,
        joint_ops=joint_ops,
        baseline_ops=baseline_ops,
        gradient_outputs=subgraphs.gradient_outputs,
        assumed=assumed if options.cut else frozenset(),
        without_gradient=options.without_gradient,
        unreached=subgraphs.unreached,
        cut_between=subgraphs.cut_between,
        decide=options.decide,
        gradient_strides=subgraphs.gradient_strides,
        shared=subgraphs.shared,
        summed=summed,
        residents=graph.residents,
        loss=loss,
        optimizer=cost,
    )


_BESIDE = (ResidentKind.GRADIENT, ResidentKind.OTHER, ResidentKind.LIBRARY)


def beside_gradients(capture: Capture, model: nn.Module) -> Capture:
    """The same step as captured, with the gradients that exist now, and nothing else beside it."""
    device_type = device_of(model).type
    others = (r for r in capture.residents if r.kind not in _BESIDE)
    residents = (*others, *gradients_of(model, device_type))
    return replace(capture, graph=structs.replace(capture.graph, residents=residents), residents=residents)


def read_again(
    capture: Capture, *, separate: Callable[[str], bool], grid: tuple[int, ...], device_type: str
) -> Capture:
    """The same step, with its joint graphs read in another way; nothing is traced.

    Args:
        capture: the captured step.
        separate: see `CaptureOptions`.
        grid: see `capture_step`.
        device_type: the device type of the model.
    """
    assert capture.loss is not None
    subgraphs: list[Subgraph] = []
    for subgraph in capture.subgraphs.subgraphs:
        assert subgraph.trace is not None, "a captured subgraph was traced"
        trace = subgraph.trace.read_in_other_way(separate=separate, grid=grid)
        subgraphs.append(replace(subgraph, trace=trace, reading=trace.read()))
    of_step = replace(capture.subgraphs, subgraphs=tuple(subgraphs))
    graph, joint_ops = join(of_step, capture.loss.transient_bytes, device_type, held_bytes=capture.loss.held_bytes)
    was = capture.graph
    graph = structs.replace(
        graph,
        baseline=was.baseline,
        residents=capture.residents,
        after_step_bytes=was.after_step_bytes,
        tiers=was.tiers,
        label=was.label,
    )
    return replace(capture, graph=graph, subgraphs=of_step, joint_ops=joint_ops)


def _summed(model: nn.Module, subgraphs: Subgraphs, shared: SharedInputs) -> tuple[str, ...]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        names.get(id(subgraph.inputs[place]), "an input")
        for subgraph in subgraphs.subgraphs
        for place in subgraph.terms.keys() - shared.get(subgraph.key, {}).keys()
    }
    return tuple(sorted(found))


def given_args(args: Any) -> tuple[Any, ...]:
    """Positional inputs as a tuple; a bare tensor is refused, as `tuple` would split it into its rows.

    Raises:
        SpecError: if it is a tensor or a dict.
    """
    if isinstance(args, torch.Tensor):
        raise SpecError(
            f"args is a tuple of the model's inputs; pass (x,) (args: a tensor of shape {tuple(args.shape)})"
        )
    if isinstance(args, dict):
        raise SpecError(f"args is a tuple of the model's inputs; pass kwargs={{...}} (args: a dict of {list(args)})")
    return tuple(args)


def check_step(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, checkpointing: str = "refuse") -> None:
    """Refuses a step that cannot be captured for a reason that is visible without running the step.

    Raises:
        CaptureError: says how to fix the problem.
    """
    if not model.training:
        raise CaptureError(
            f"{type(model).__name__} is in eval mode; call model.train() first, memfit plans training steps"
        )
    for name, module in model.named_modules():
        if checkpointing != "replace" and checkpoints_itself(module):
            raise checkpoint_error(name or type(module).__name__)
        lazy = [key for key, tensor in _own_tensors(module) if is_lazy(tensor)]
        if lazy:
            raise CaptureError(
                f"{lazy[0]!r} of {name or type(module).__name__} ({type(module).__name__}) has no shape before the "
                "first call; call the model once on an example input, under torch.no_grad(), before memfit plans it"
            )
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"{type(model).__name__}.forward does not take these inputs: {error} (args: {len(args)}, kwargs: "
            f"{sorted(kwargs)}); pass what the training loop passes, memfit.fit(model, (x,), ...)"
        ) from error
    except ValueError:  # no signature
        pass
    device = device_of(model)
    for tensor in pytree.tree_leaves((list(args), kwargs)):
        if isinstance(tensor, torch.Tensor) and tensor.dim() > 0 and tensor.device.type != device.type:
            raise CaptureError(
                f"an input of shape {tuple(tensor.shape)} is on {tensor.device}, the model on {device}; "
                f"move it with .to('{device}')"
            )


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _assumed(subgraphs: Subgraphs, receives: Sequence[bool]) -> frozenset[int]:
    """Places of the last subgraph's outputs that the module does not return and that may receive a gradient."""
    returned = {id(t) for t in tensors_in(subgraphs.output)}
    does = {id(t) for t, does in zip(subgraphs.receivers(), receives, strict=False) if does} - returned
    return frozenset(place for place, output in enumerate(subgraphs.subgraphs[-1].outputs) if id(output) in does)
