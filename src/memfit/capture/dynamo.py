"""Gets the joint graphs of a module's training step from Dynamo and AOTAutograd.

First without running anything: Dynamo traces with fake tensors, and the compiled function hands fake outputs
back to the caller, so the model needs no memory beyond its parameters and the loss can be traced on fakes
too. If the model breaks the graph, that is not possible (the code between two pieces may look at values);
then the pieces run one after the other without saving anything, with buffers and generators restored after.

Known limits: code between two pieces is not planned; its memory shows up in the proving run. `nn.LSTM` and
its kin are such code: Dynamo could unroll them, but into other kernels than eager's, with other bits.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.capture.adding import Accumulate
from memfit.capture.between_pieces import Handed, handed_over, has_tensor_hooks, without_tensor_hooks
from memfit.capture.branches import Decision
from memfit.capture.checkpoints import refusing_checkpoints, without_checkpoints
from memfit.capture.compiled_call import compile_call
from memfit.capture.dynamo_graph import (
    accumulated_inputs,
    detach_outputs,
    graph_key,
    in_place_nodes,
    outputs_of,
    returned_inputs,
    weights_made,
)
from memfit.capture.eager_autocast import cast_once
from memfit.capture.eager_kernels import as_in_eager
from memfit.capture.failures import explained, left_to_plain_code, nothing_captured, quiet
from memfit.capture.joint import read_joint
from memfit.capture.live_bytes import LiveBytes
from memfit.capture.loss import LossReading
from memfit.capture.module_names import name_modules
from memfit.capture.pieces import Piece, Pieces, gradient_strides_of, inputs_shared_in, tensors_in
from memfit.capture.plain_parts import NOTHING_PLAIN, PlainParts, UnplannableGraphError, find_plain_parts
from memfit.capture.preserve import preserved
from memfit.capture.reading import JointReading
from memfit.capture.returned_views import calling_after, returned_views_first
from memfit.capture.sharded import gathering, is_sharded
from memfit.capture.shared_inputs import (
    SharedInputs,
    repeated_places,
    return_each_term,
    taking_for_each_use,
    terms_of_inputs,
    uses_of_inputs,
)
from memfit.capture.tangents import (
    GradientStrides,
    Strides,
    laid_out_as_made,
    strides_of_input_gradients,
    strides_of_outputs,
)
from memfit.errors import CaptureError, MemfitError

__all__ = ["capture_pieces", "first_lines"]

log = logging.getLogger(__name__)

_Read = Callable[[Pieces, Callable[[], None]], LossReading]

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def capture_pieces(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    separate: Callable[[str], bool],
    grid: tuple[int, ...] = (),
    gradient_outputs: frozenset[int] | None = None,
    gradient_strides: GradientStrides | None = None,
    shared: SharedInputs | None = None,
    by_use: bool = False,
    last_key: str | None = None,
    accumulate: Accumulate | None = None,
    checkpointing: str = "refuse",
    read: _Read | None = None,
    before: Pieces | None = None,
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
        shared: which inputs graphs take once for each use (`memfit.capture.shared_inputs`).
        by_use: whether all that have several uses shall be.
        last_key: with that, which graph is the last.
        accumulate: how gradients of parameters are added to `.grad` inside the graph; None if that is left to autograd.
        checkpointing: `"refuse"` or `"replace"`, what is done where the model checkpoints itself.
        read: reads the loss while what the forward pass left on modules and in hooks is still there; its second
            argument takes that back, where it is fake.
        before: the same step as it was captured with other settings; where its graph broke, it is not tried whole.

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
        shared=shared or {},
        by_use=by_use,
        last_key=last_key,
        accumulate=accumulate,
        replaced=replaced,
        read=read,
    )
    if before is not None and before.breaks:
        pieces, between_bytes = _in_pieces(model, args, kwargs, captured, before.plain, read)
        return replace(pieces, breaks=before.breaks, between_bytes=between_bytes)
    try:
        with preserved(model, args, kwargs, values=False) as state, quiet():
            return captured(fake=True, take_back=state.restore)
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
    with preserved(model, args, kwargs), around:
        plain = find_plain_parts(model, args, kwargs)
    try:
        pieces, between_bytes = _in_pieces(model, args, kwargs, captured, plain, read)
    except MemfitError:
        raise
    except (torch._dynamo.exc.TorchDynamoException, RuntimeError, LookupError, TypeError, AssertionError) as error:
        # Dynamo fails on some code of forward itself; then only what it calls is captured.
        log.info("capturing only what the model's forward pass calls: %s", first_lines(str(error)))
        failure, plain = error, replace(plain, only_children=True)
        try:
            pieces, between_bytes = _in_pieces(model, args, kwargs, captured, plain, read)
        except torch._dynamo.exc.TorchDynamoException as second:
            raise explained(second, model) from second
    if not pieces.pieces and plain.reasons:
        raise left_to_plain_code(model, plain.reasons) from failure
    if not pieces.pieces:
        raise nothing_captured(failure, model) from failure
    for told in plain.reasons:
        log.warning("%s: that part runs as plain code, what is around it as planned", told)
    return replace(pieces, breaks=(reason,), between_bytes=between_bytes)


def _in_pieces(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    captured: Callable[..., Pieces],
    plain: PlainParts,
    read: _Read | None,
) -> tuple[Pieces, int]:
    """The pieces, one after the other, and what plain autograd saves for the code between them."""
    live: list[int] = []

    def counted(pieces: Pieces, take_back: Callable[[], None]) -> LossReading:
        live.append(counter.live)  # reading the loss makes copies of what it closes over
        assert read is not None
        return read(pieces, take_back)

    with preserved(model, args, kwargs), LiveBytes() as counter, quiet():
        pieces = captured(fake=False, take_back=lambda: None, plain=plain, read=read and counted)
        live.append(counter.live)
        returned = {
            t.untyped_storage()._cdata: int(t.untyped_storage().nbytes())
            for piece in pieces.pieces
            for t in tensors_in(piece.outputs)
        }
        if is_sharded(model):  # what its hooks hold is told by `memfit.capture.communication`
            return pieces, 0
        return pieces, max(0, live[0] - sum(returned.values()))


def _capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    fake: bool,
    take_back: Callable[[], None],
    separate: Callable[[str], bool],
    grid: tuple[int, ...],
    gradient_outputs: frozenset[int] | None,
    gradient_strides: GradientStrides,
    shared: SharedInputs,
    by_use: bool,
    last_key: str | None,
    accumulate: Accumulate | None,
    replaced: bool,
    read: _Read | None,
    plain: PlainParts = NOTHING_PLAIN,
) -> Pieces:
    pieces: list[Piece] = []
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    gathered = gathering(model)
    held = frozenset(id(t) for t in (*model.parameters(), *model.buffers()))

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        name_modules(gm.graph, model)
        gm, inputs, views = returned_views_first(gm, inputs)
        readings: list[JointReading] = []
        of_inputs: dict[int, Strides | None] = {}
        terms: dict[int, int] = {}

        def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> Any:
            found = {} if gathered() else terms_of_inputs(joint, num_fwd_outputs, uses)
            terms.update({place: number for place, number in found.items() if place not in without})
            return_each_term(joint, num_fwd_outputs, repeated)
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
        without = accumulated | frozenset(casts)  # eager adds up gradients of a cast weight before it casts them back
        key = graph_key(gm)
        if fake and any(isinstance(node.meta.get("example_value"), _NUMBERS) for node in gm.graph.nodes):
            raise UnplannableGraphError("a number is read from a tensor")  # in a graph it would round as a tensor does
        if fake or key == last_key:
            detach_outputs(gm, gradient_outputs)
        weights = weights_made(gm, inputs, held)
        repeated = shared.get("" if fake else key, {})
        taken, examples = taking_for_each_use(gm, inputs, repeated)
        uses = uses_of_inputs(gm)
        results = [n.meta["example_value"] if isinstance(n, fx.Node) else n for n in outputs_of(gm)]
        original = gm.forward if fake else types.MethodType(type(gm).forward, gm)
        if not fake and has_tensor_hooks(gm):
            original = without_tensor_hooks(gm).forward
        try:
            with as_in_eager(), laid_out_as_made(gradient_strides.get("" if fake else key, {})):
                aot_autograd(fw_compiler=_as_is, bw_compiler=_as_is, partition_fn=partition)(taken, examples)
        except UnplannableGraphError as error:
            if fake:
                raise
            log.warning("%s: the graph around it runs as plain code", error)
            return calling_after(views, gm.forward)
        if not readings:
            if fake:
                raise CaptureError(
                    f"no gradient reaches a parameter or an input of {type(model).__name__}, so there is nothing "
                    "to train: is everything frozen, under no_grad, or detached, in the model or in loss_fn?"
                )
            return calling_after(views, gm.forward)

        lying = strides_of_outputs(readings[0].module.graph)

        def run(*real_inputs: Any) -> tuple[Any, ...]:
            units = gathered()
            real_inputs = (*real_inputs, *views(*real_inputs))
            operands = (*real_inputs, *(real_inputs[place] for place in repeated_places(repeated)))
            if fake:
                handed = Handed(outputs=tuple(_twin(r, fake_mode, lying.get(p)) for p, r in enumerate(results)))
            else:
                with torch.no_grad():
                    made = original(*real_inputs)
                handed = handed_over(made, results, () if units else operands, of_inputs)
            pieces.append(
                Piece(
                    reading=readings[0],
                    inputs=operands,
                    handed=handed,
                    gathered=units,
                    key="" if fake else key,
                    terms=terms,
                    returned=returned_inputs(gm),
                    weights=weights,
                )
            )
            return handed.outputs

        return run

    # Processes that share a module must capture it equally often, whatever is in their batches.
    decisions = None if is_sharded(model) else list[Decision]()
    call = compile_call(
        model, backend, fullgraph=fake, in_pieces=not fake, plain=plain, replaced=replaced, decisions=decisions
    )
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
    loss = read(made, take_back)
    made = replace(made, loss=loss, gradient_strides=gradient_strides_of(made, loss))
    return replace(made, shared=inputs_shared_in(made, by_use=by_use))


def _as_is(gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
    return gm


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
