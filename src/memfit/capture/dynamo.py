"""Gets the joint graphs of a module's training step from Dynamo and AOTAutograd.

First without running anything: Dynamo traces with fake tensors, and the compiled function hands fake outputs
back to the caller, so the model needs no memory beyond its parameters and the loss can be traced on fakes
too. If the model breaks the graph, that is not possible (the code between two pieces may look at values);
then the pieces run one after the other without saving anything, with buffers and generators restored after.

Known limits: code between two pieces is not planned; its memory shows up in the proving run. `nn.LSTM` and
its kin are such code: Dynamo could unroll them, but into other kernels than eager's, with other bits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.external_utils import wrap_inline
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from memfit.capture.adding import Accumulate
from memfit.capture.between_pieces import as_made_with_gradient, has_tensor_hooks, without_tensor_hooks
from memfit.capture.checkpoints import refusing_checkpoints, without_checkpoints
from memfit.capture.constant_branches import constant_branches
from memfit.capture.eager_answers import eager_answers
from memfit.capture.eager_autocast import cast_once
from memfit.capture.eager_kernels import as_in_eager
from memfit.capture.failures import explained, nothing_captured, quiet
from memfit.capture.joint import read_joint
from memfit.capture.live_bytes import LiveBytes
from memfit.capture.log_calls import logs_left_out
from memfit.capture.loss import LossReading
from memfit.capture.one_graph import OneGraph
from memfit.capture.own_calls import own_call
from memfit.capture.plain_parts import NOTHING_PLAIN, PlainParts, UnplannableGraphError, find_plain_parts
from memfit.capture.preserve import preserved
from memfit.capture.reading import JointReading
from memfit.capture.sharded import Gathered, gathering, is_sharded, resharded
from memfit.capture.tangents import (
    GradientStrides,
    Strides,
    laid_out_as_made,
    layouts_between,
    strides_of_input_gradients,
    strides_of_outputs,
)
from memfit.errors import CaptureError, MemfitError

__all__ = [
    "Piece",
    "Pieces",
    "accumulated_inputs",
    "attach_outputs",
    "call_has_begun",
    "capture_pieces",
    "compile_call",
    "detach_outputs",
    "first_lines",
    "graph_key",
    "is_in_place",
]

log = logging.getLogger(__name__)

_MOST_PLANS = 100_000
_CALL = "fitted_call"
"""Name of the function that Dynamo compiles."""

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One captured graph.

    Attributes:
        reading: its joint graph.
        inputs: the real tensors it takes, in the order of its placeholders.
        outputs: what it returned while capturing, fake or real.
        gathered: the units of a sharded module that were gathered while it ran.
        key: of the graph it was made from (`graph_key`); empty for the only one.
        input_strides: by inputs how their gradients lie.
    """

    reading: JointReading
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    gathered: tuple[Gathered, ...] = ()
    key: str = ""
    input_strides: Mapping[int, Strides] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """All graphs of a step, in forward order, and what the module returned.

    Attributes:
        pieces: one for each captured graph.
        output: the module's output, fake or real.
        breaks: why the graph breaks, if it does.
        between_bytes: what plain autograd saves for the code between pieces.
        staying: the units of a sharded module that were gathered when it had run.
        plain: what is left to plain code.
        replaced: whether the model's own checkpoints are left out.
        loss: what the loss does with the output and with what left by a side door, if it was read.
        gradient_strides: how gradients of outputs of the graphs lie, where that is not as the outputs do.
    """

    pieces: tuple[Piece, ...]
    output: Any
    breaks: tuple[str, ...] = ()
    between_bytes: int = 0
    staying: tuple[Gathered, ...] = ()
    plain: PlainParts = NOTHING_PLAIN
    replaced: bool = False

    @property
    def last_key(self) -> str | None:
        """The key of the last piece's graph, None if an earlier piece has the same."""
        keys = [piece.key for piece in self.pieces]
        return keys[-1] if keys.count(keys[-1]) == 1 else None

    loss: LossReading | None = None
    gradient_strides: GradientStrides = field(default_factory=dict)

    def receivers(self) -> list[torch.Tensor]:
        """The tensors of the output, then those that left the last piece by a side door and need a gradient.

        Hooks collect features, and a forward pass leaves an auxiliary loss on `self`.
        """
        returned = tensors_in(self.output)
        known = {id(t) for t in returned}
        beside = [t for t in tensors_in(self.pieces[-1].outputs) if t.requires_grad and id(t) not in known]
        return [*returned, *beside]


def capture_pieces(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    separate: Callable[[str], bool],
    grid: tuple[int, ...] = (),
    gradient_outputs: frozenset[int] | None = None,
    gradient_strides: GradientStrides | None = None,
    last_key: str | None = None,
    accumulate: Accumulate | None = None,
    checkpointing: str = "refuse",
    read: Callable[[Pieces], LossReading] | None = None,
) -> Pieces:
    """Captures the training step of `model(*args, **kwargs)`. Changes nothing.

    Args:
        model: in training mode.
        args: positional inputs.
        kwargs: keyword inputs.
        separate: see `memfit.capture.joint.read_joint`.
        grid: see there.
        gradient_outputs: which outputs of the last graph receive a gradient; None for all of them.
        gradient_strides: how gradients of outputs of the graphs lie, where that is not as the outputs do.
        last_key: with that, which graph is the last.
        accumulate: how gradients of parameters are added to `.grad` inside the graph; None if that is left to autograd.
        checkpointing: `"refuse"` or `"replace"`, what is done where the model checkpoints itself.
        read: reads the loss while what the forward pass left on modules and in hooks is still there.

    Returns:
        The pieces and the output of the module.

    Raises:
        CaptureError: if Dynamo cannot capture the model, naming the line. What the plain forward pass raises is raised.
    """
    replaced = checkpointing == "replace"
    captured = functools.partial(
        _capture,
        *(model, args, kwargs),
        separate=separate,
        grid=grid,
        gradient_outputs=gradient_outputs,
        gradient_strides=gradient_strides or {},
        last_key=last_key,
        accumulate=accumulate,
        replaced=replaced,
        read=read,
    )
    try:
        with preserved(model, args, kwargs, values=False), quiet():
            return captured(fake=True)
    except UnplannableGraphError as error:
        failure: Exception = error
    except MemfitError:
        raise
    except Exception as error:  # whatever it is: the plain forward pass raises it too, or the graph breaks there
        failure = error
    reason = first_lines(str(failure))
    log.info("the graph breaks, capturing piece by piece: %s", reason)
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise explained(failure, model, start="the model looks at values, which the meta device does not have")
    around = without_checkpoints() if replaced else refusing_checkpoints()
    with preserved(model, args, kwargs), resharded(model), around:
        plain = find_plain_parts(model, args, kwargs)
    try:
        pieces, between_bytes = _in_pieces(model, args, kwargs, captured, plain)
    except MemfitError:
        raise
    except (torch._dynamo.exc.TorchDynamoException, RuntimeError, LookupError, TypeError, AssertionError) as error:
        # Dynamo fails on some code of forward itself; then only what it calls is captured.
        log.info("capturing only what the model's forward pass calls: %s", first_lines(str(error)))
        failure, plain = error, replace(plain, only_children=True)
        try:
            pieces, between_bytes = _in_pieces(model, args, kwargs, captured, plain)
        except torch._dynamo.exc.TorchDynamoException as second:
            raise explained(second, model) from second
    if not pieces.pieces:
        raise nothing_captured(failure, model) from failure
    if is_sharded(model):  # what its hooks hold is told by `memfit.capture.communication`
        between_bytes = 0
    for told in plain.reasons:
        log.warning("%s: that part runs as plain code, what is around it as planned", told)
    return replace(pieces, breaks=(reason,), between_bytes=between_bytes)


def _in_pieces(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], captured: Callable[..., Pieces], plain: PlainParts
) -> tuple[Pieces, int]:
    """The pieces, one after the other, and what plain autograd saves for the code between them."""
    with preserved(model, args, kwargs), resharded(model), LiveBytes() as counter, quiet():
        pieces = captured(fake=False, plain=plain)
        returned = {
            t.untyped_storage()._cdata: int(t.untyped_storage().nbytes())
            for piece in pieces.pieces
            for t in tensors_in(piece.outputs)
        }
        return pieces, max(0, counter.live - sum(returned.values()))


def _capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    fake: bool,
    separate: Callable[[str], bool],
    grid: tuple[int, ...],
    gradient_outputs: frozenset[int] | None,
    gradient_strides: GradientStrides,
    last_key: str | None,
    accumulate: Accumulate | None,
    replaced: bool,
    read: Callable[[Pieces], LossReading] | None,
    plain: PlainParts = NOTHING_PLAIN,
) -> Pieces:
    pieces: list[Piece] = []
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    gathered = gathering(model)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        readings: list[JointReading] = []
        of_inputs: dict[int, Strides] = {}

        def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> Any:
            of_inputs.update(strides_of_input_gradients(joint.graph))
            halves = default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **rest)
            in_place = in_place_nodes(gm)
            reading = functools.partial(
                read_joint, joint, num_fwd_outputs, separate=separate, grid=grid, replaced=replaced
            )
            as_made = accumulate is Accumulate.AS_MADE
            readings.append(reading(in_place=in_place, accumulated=accumulated, as_made=as_made, cast_once=casts))
            return halves

        accumulated = accumulated_inputs(inputs) if accumulate else frozenset[int]()
        casts = cast_once(gm, inputs)
        key = graph_key(gm)
        if fake and any(isinstance(node.meta.get("example_value"), _NUMBERS) for node in gm.graph.nodes):
            raise UnplannableGraphError("a number is read from a tensor")  # in a graph it would round as a tensor does
        if fake or key == last_key:
            detach_outputs(gm, gradient_outputs)
        results = [n.meta["example_value"] if isinstance(n, fx.Node) else n for n in _outputs_of(gm)]
        original = gm.forward if fake else types.MethodType(type(gm).forward, gm)
        if not fake and has_tensor_hooks(gm):
            original = without_tensor_hooks(gm).forward
        try:
            with as_in_eager(), laid_out_as_made(gradient_strides.get("" if fake else key, {})):
                aot_autograd(fw_compiler=_as_is, bw_compiler=_as_is, partition_fn=partition)(gm, inputs)
        except UnplannableGraphError as error:
            if fake:
                raise
            log.warning("%s: the graph around it runs as plain code", error)
            return gm.forward
        if not readings:
            if fake:
                raise CaptureError("the model has nothing to train: no output of it needs a gradient")
            return gm.forward

        lying = strides_of_outputs(readings[0].module.graph)

        def run(*real_inputs: Any) -> tuple[Any, ...]:
            if fake:
                outputs = tuple(_twin(r, fake_mode, lying.get(place)) for place, r in enumerate(results))
            else:
                with torch.no_grad():
                    made = original(*real_inputs)
                outputs = tuple(as_made_with_gradient(o, r) for o, r in zip(made, results, strict=True))
            pieces.append(
                Piece(
                    reading=readings[0],
                    inputs=tuple(real_inputs),
                    outputs=outputs,
                    gathered=gathered(),
                    key="" if fake else key,
                    input_strides=of_inputs,
                )
            )
            return outputs

        return run

    call = compile_call(model, backend, fullgraph=fake, in_pieces=not fake, plain=plain, replaced=replaced)
    try:
        output = call(*args, **kwargs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, MemfitError):
            raise error.inner_exception from None
        raise
    except torch._dynamo.exc.Unsupported as error:
        cause = getattr(error.__cause__, "inner_exception", None)
        if isinstance(cause, MemfitError):
            raise cause from None
        raise
    captured = tuple(pieces)
    pieces.clear()  # Dynamo keeps the backend, and with it this list
    made = Pieces(pieces=captured, output=output, staying=gathered(), plain=plain, replaced=replaced)
    if read is None or not captured:
        return made
    loss = read(made)
    return replace(made, loss=loss, gradient_strides=_gradient_strides(made, loss))


def _gradient_strides(pieces: Pieces, loss: LossReading) -> GradientStrides:
    """By graphs how gradients of their outputs lie, where that is not as the outputs do and always the same."""
    if any(piece.gathered for piece in pieces.pieces):
        return {}  # hooks of a sharded module would communicate
    received = zip(pieces.receivers(), loss.receives_gradient, loss.gradient_strides, strict=False)
    ends = [(tensor, strides) for tensor, receives, strides in received if receives]
    for piece in reversed(pieces.pieces):  # gradients are summed in the order of the backward pass
        inputs = ((piece.inputs[place], strides) for place, strides in piece.input_strides.items())
        ends += [(t, strides) for t, strides in inputs if not isinstance(t, nn.Parameter)]
    found: dict[str, dict[int, Strides]] = {}
    several: set[str] = set()
    for piece, strides in zip(pieces.pieces, layouts_between(ends, [p.outputs for p in pieces.pieces]), strict=True):
        if found.setdefault(piece.key, strides) != strides:
            several.add(piece.key)
    return {key: strides for key, strides in found.items() if strides and key not in several}


def graph_key(gm: fx.GraphModule) -> str:
    """Identifies a graph of Dynamo's: its calls, and the names and layouts of its inputs."""
    lines = []
    for node in gm.graph.nodes:
        value = node.meta.get("example_value") if node.op == "placeholder" else None
        told = (value.shape, value.dtype, value.requires_grad) if isinstance(value, torch.Tensor) else ""
        lines.append(f"{node.op} {node.name} {node.target if isinstance(node.target, str) else ''} {told}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def compile_call(
    model: nn.Module,
    backend: Callable[..., Any],
    *,
    fullgraph: bool = False,
    in_pieces: bool = False,
    plain: PlainParts = NOTHING_PLAIN,
    replaced: bool = False,
) -> Callable[..., Any]:
    """`model`'s call, compiled with `backend` under Dynamo's guards, with a cache of its own; of one graph without.

    What is `plain` Dynamo leaves alone; with `replaced` the model's own checkpoints are calls of their functions.
    """
    if isinstance(model, OneGraph):
        return model.compiled(backend)
    impl: Callable[..., Any] = model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return impl(*args, **kwargs)

    # Dynamo caches by code object; a copy keeps fitted models from sharing one cache and its size limit.
    own = types.FunctionType(call.__code__.replace(co_name=_CALL), call.__globals__, _CALL, None, call.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, backend=backend, fullgraph=fullgraph, dynamic=False)
    forwards = _forwards_of_torch(model) if in_pieces else []
    names = dict(model.named_modules())
    left = [names[name] for name in sorted(plain.modules) if name in names]
    forwards += [(vars(m), torch._dynamo.disable(m.forward)) for m in left]
    if plain.only_children:
        forwards.append((vars(model), torch._dynamo.disable(model.forward, recursive=False)))
    # Where the graph breaks, pieces are cached with the model's own code, which every plan of it shares. At its limit
    # Dynamo would run them plainly, without a plan and over the budget, and say nothing.
    limits = {"recompile_limit": _MOST_PLANS, "accumulated_recompile_limit": _MOST_PLANS}
    # By default Dynamo looks at hooks once: those registered or removed later would not be noticed.
    options = limits | logs_left_out() | {"skip_nnmodule_hook_guards": False}

    def run(*args: Any, **kwargs: Any) -> Any:
        around = without_checkpoints() if replaced and in_pieces else contextlib.nullcontext()
        with (
            torch._dynamo.config.patch(options),
            own_call(),
            _replaced(forwards),
            around,
            eager_answers(),
            constant_branches(),
        ):
            return compiled(*args, **kwargs)

    return run


def call_has_begun() -> bool:
    """Asked while Dynamo compiles a graph of a `compile_call`: whether code of the same call has run before it.

    If so, the graph is one behind a break, and the call's function is a frame that runs.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _CALL:
            return True
        frame = frame.f_back
    return False


def _forwards_of_torch(model: nn.Module) -> list[tuple[dict[str, Any], Callable[..., Any]]]:
    """Attributes of the modules that are torch's own, and forward passes of theirs that Dynamo looks into.

    It looks into an `nn.Linear` from code that it traces. Where a break keeps it out of that (any in a loop does), it
    would leave the layer to eager.
    """
    return [
        (vars(module), wrap_inline(module.forward))
        for module in model.modules()
        if type(module).forward.__module__.startswith("torch.nn.modules") and "forward" not in vars(module)
    ]


@contextlib.contextmanager
def _replaced(forwards: Sequence[tuple[dict[str, Any], Callable[..., Any]]]) -> Iterator[None]:
    """Puts forward passes into modules, for the time of one call."""
    before = [(attributes, attributes.get("forward")) for attributes, _ in forwards]
    for attributes, forward in forwards:
        attributes["forward"] = forward
    try:
        yield
    finally:
        for attributes, own in reversed(before):
            attributes.pop("forward", None)  # a fitted module inside this one may have taken it out
            if own is not None:
                attributes["forward"] = own


def accumulated_inputs(inputs: Sequence[Any]) -> frozenset[int]:
    """Places among a graph's inputs of parameters whose gradients nobody but `.grad` waits for."""
    return frozenset(
        place
        for place, value in enumerate(inputs)
        if isinstance(value, nn.Parameter)
        and value.requires_grad
        and not value._backward_hooks
        and not value._post_accumulate_grad_hooks
    )


def in_place_nodes(gm: fx.GraphModule) -> frozenset[str]:
    """Names of the nodes of Dynamo's graph that write over their operand."""
    return frozenset(node.name for node in gm.graph.nodes if is_in_place(node))


def is_in_place(node: fx.Node) -> bool:
    """Whether a call of Dynamo's graph writes over its operand."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    if getattr(operator, name, None) is node.target:
        return name in ("iadd", "isub", "imul", "itruediv")
    try:
        arguments = inspect.signature(cast(Callable[..., Any], node.target)).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # a builtin
        return bool(node.kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__"))
    return bool(arguments.get("inplace")) or (name.endswith("_") and not name.endswith("__"))


def detach_outputs(gm: fx.GraphModule, gradient_outputs: frozenset[int] | None) -> list[int]:
    """Cuts the outputs that receive no gradient, which AOTAutograd would otherwise feed with zeros.

    Returns:
        Positions of the outputs it cut.
    """
    positions: list[int] = []
    if gradient_outputs is None:
        return positions
    (output,) = gm.graph.find_nodes(op="output")
    results = list(output.args[0])
    for position, node in enumerate(results):
        if position in gradient_outputs or not isinstance(node, fx.Node):
            continue
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.requires_grad:
            with gm.graph.inserting_before(output):
                cut = gm.graph.call_method("detach", (node,))
            cut.meta["example_value"] = value.detach()
            results[position] = cut
            positions.append(position)
    output.args = (tuple(results),)
    gm.recompile()
    return positions


def attach_outputs(gm: fx.GraphModule, positions: Sequence[int]) -> None:
    """Undoes `detach_outputs`."""
    (output,) = gm.graph.find_nodes(op="output")
    results = list(output.args[0])
    cut = {position: results[position] for position in positions}
    for position, node in cut.items():
        results[position] = node.args[0]
    output.args = (tuple(results),)
    for node in cut.values():
        gm.graph.erase_node(node)
    gm.recompile()


def _as_is(gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
    return gm


def _outputs_of(gm: fx.GraphModule) -> list[Any]:
    (output,) = gm.graph.find_nodes(op="output")
    return list(output.args[0])


def _twin(value: Any, fake_mode: FakeTensorMode, strides: Strides | None) -> Any:
    """A leaf fake tensor with the metadata of Dynamo's, laid out as kernels do, which Dynamo does not ask."""
    if not isinstance(value, torch.Tensor):
        return value
    with fake_mode:
        strides = value.stride() if strides is None else strides
        twin = torch.empty_strided(tuple(value.shape), strides, dtype=value.dtype, device=value.device)
    return twin.requires_grad_(value.requires_grad)


def first_lines(text: str, count: int = 12) -> str:
    """The first lines of a message that are not empty."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:count])


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested output."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
