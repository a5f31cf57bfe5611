"""Gets the joint graphs of a module's training step from Dynamo and AOTAutograd.

The first attempt executes nothing: Dynamo traces with fake tensors, and the compiled function returns fake outputs to
the caller. So the model needs no memory beyond its parameters, and the loss can be traced on fake tensors too. A graph
break makes this impossible, because the code between two subgraphs may look at values. Then the subgraphs run one after
the other without saving activations, and buffers and generators are restored afterwards.

Known limits: code between two subgraphs is not planned; its memory shows up in the proving run. `nn.LSTM` and similar
layers are such code: Dynamo could unroll them, but into other kernels than eager's, with different bits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from memfit.capture.allocation_tracker import LiveBytes
from memfit.capture.call_settings import CallSettings
from memfit.capture.checkpoints import refusing_checkpoints, without_checkpoints
from memfit.capture.distributed.fsdp import gathering, is_sharded, local
from memfit.capture.dynamo.dynamo_call import DynamoCall
from memfit.capture.dynamo.graph_at_sizes import NotOfSizesError
from memfit.capture.dynamo.recording import Recording, Source, record_graph
from memfit.capture.dynamo.symbolic_call import recorded_at_sizes
from memfit.capture.dynamo.traced_graph import (
    DynamoGraph,
    Surroundings,
    Traced,
    trace,
)
from memfit.capture.failures import explained, left_to_plain_code, nothing_captured, nothing_reached, quiet
from memfit.capture.frontend import frontend_of
from memfit.capture.gradients.settling import settled
from memfit.capture.gradients.tangents import strides_of_outputs
from memfit.capture.loss.reading import LossReading
from memfit.capture.options import CaptureOptions
from memfit.capture.state.snapshot import preserved
from memfit.capture.subgraphs import Subgraphs, tensors_in
from memfit.capture.unplanned_parts import (
    NOTHING_PLAIN,
    VARYING,
    GradientsTakenError,
    PlainParts,
    find_plain_parts,
)
from memfit.capture.values.decisions import Decision
from memfit.capture.values.numpy_code import NumpyCodeError
from memfit.errors import MemfitError
from memfit.fxir.refused import UnplannableGraphError
from memfit.torch_compat.compiler import BackendCompilerFailed, TorchDynamoException, Unsupported

__all__ = ["capture_subgraphs", "first_lines"]

log = logging.getLogger(__name__)

_Read = Callable[[Subgraphs, Callable[[], None]], LossReading]


def capture_subgraphs(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    options: CaptureOptions,
    read: _Read | None = None,
) -> Subgraphs:
    """Captures the training step of `model(*args, **kwargs)`. Changes nothing.

    Args:
        model: in training mode.
        args: positional inputs.
        kwargs: keyword inputs.
        options: how the step is captured.
        read: reads the loss while changes of the forward pass to modules and hooks are still in place; its second
            argument undoes these changes where they are fake. Without `read`, graphs are traced as if all outputs
            received a gradient.

    Returns:
        The subgraphs and the output of the module.

    Raises:
        CaptureError: if Dynamo cannot capture the model; names the line. Errors of the plain forward pass are raised as
            they are.
        NotOfSizesError: if the call for many sizes does not serve these inputs.
    """
    captured = functools.partial(_capture, model, args, kwargs, options=options, read=read)
    try:
        with preserved(model, args, kwargs, values=False) as state, quiet():
            return captured(fake=True, take_back=state.restore)
    except UnplannableGraphError as error:
        failure: Exception = error
    except MemfitError:
        raise
    except Exception as error:  # any error: the plain forward pass raises it too, or the graph breaks there
        failure = error
    if options.symbolic is not None:
        raise NotOfSizesError(first_lines(str(failure))) from failure
    reason = first_lines(str(failure))
    log.info("the graph breaks, capturing subgraph by subgraph: %s", reason)
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise explained(failure, model, start="the model looks at values, which the meta device does not have")

    def watched(*, gradients: bool) -> PlainParts:
        around = without_checkpoints() if options.checkpointing == "replace" else refusing_checkpoints()
        with preserved(model, args, kwargs), around:
            return find_plain_parts(model, args, kwargs, decide=options.decide, gradients=gradients)

    try:
        plain = watched(gradients=False)
    except GradientsTakenError:
        plain = watched(gradients=True)
    plain = replace(plain, numpy=isinstance(failure, NumpyCodeError))
    try:
        subgraphs, between_bytes = _in_subgraphs(model, args, kwargs, captured, plain, read)
    except MemfitError:
        raise
    except (TorchDynamoException, RuntimeError, LookupError, TypeError, AssertionError) as error:
        # Dynamo fails on some code of forward itself; then only the code that forward calls is captured.
        log.info("capturing only what the model's forward pass calls: %s", first_lines(str(error)))
        failure, plain = error, replace(plain, only_children=True)
        try:
            subgraphs, between_bytes = _in_subgraphs(model, args, kwargs, captured, plain, read)
        except TorchDynamoException as second:
            raise explained(second, model) from second
    if not subgraphs.subgraphs and plain.reasons:
        raise left_to_plain_code(model, plain.reasons) from failure
    if not subgraphs.subgraphs:
        raise nothing_captured(failure, model) from failure
    varies = ", and other data may take more memory there than the budget knows of"
    for told in plain.reasons:
        more = varies if told.startswith(VARYING) else ""
        log.warning("%s: that part runs as plain code, what is around it as planned%s", told, more)
    return replace(subgraphs, breaks=(reason,), between_bytes=between_bytes)


def _in_subgraphs(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    captured: Callable[..., Subgraphs],
    plain: PlainParts,
    read: _Read | None,
) -> tuple[Subgraphs, int]:
    """Captures the subgraphs one after the other, and counts the bytes that plain autograd saves between them."""
    live: list[int] = []

    def counted(subgraphs: Subgraphs, take_back: Callable[[], None]) -> LossReading:
        live.append(counter.live)  # reading the loss copies the state that it closes over
        assert read is not None
        return read(subgraphs, take_back)

    try:
        with preserved(model, args, kwargs), LiveBytes() as counter, quiet():
            subgraphs = captured(fake=False, take_back=lambda: None, plain=plain, read=read and counted)
            live.append(counter.live)
            returned = {
                t.untyped_storage()._cdata: int(t.untyped_storage().nbytes())
                for subgraph in subgraphs.subgraphs
                for t in tensors_in(subgraph.outputs)
            }
            if is_sharded(model):  # `memfit.capture.distributed.fsdp_hooks` counts the memory of its hooks
                return subgraphs, _made_between_bytes(model, args, kwargs, subgraphs, returned)
            return subgraphs, max(0, live[0] - sum(returned.values()))
    except NumpyCodeError:  # in a graph after the first break
        if plain.numpy:
            raise
    return _in_subgraphs(model, args, kwargs, captured, replace(plain, numpy=True), read)


def _made_between_bytes(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    subgraphs: Subgraphs,
    returned: Collection[int],
) -> int:
    """Bytes of the subgraphs' inputs that plain code made, for example a frozen layer; `returned` are storages."""
    held = [local(t) for t in (*model.parameters(), *model.buffers(), *tensors_in((args, kwargs)))]
    known = {*returned, *(t.untyped_storage()._cdata for t in held)}
    made = {}
    for subgraph in subgraphs.subgraphs:
        gathered = {parameter for unit in subgraph.gathered for parameter in unit.parameters}
        for tensor in tensors_in(subgraph.inputs):
            if id(tensor) not in gathered and tensor.untyped_storage()._cdata not in known:
                made[tensor.untyped_storage()._cdata] = int(tensor.untyped_storage().nbytes())
    return sum(made.values())


def _capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    options: CaptureOptions,
    read: _Read | None,
    fake: bool,
    take_back: Callable[[], None],
    plain: PlainParts = NOTHING_PLAIN,
) -> Subgraphs:
    reader = options.reader()
    into = Recording(fake=fake, gathered=gathering(model))
    held = frozenset(id(t) for t in (*model.parameters(), *model.buffers()))
    # Dynamo keeps the backend, which must not hold `read` and with it the inputs.
    of = Source(model=model, reader=reader, held=held, is_read=read is not None)
    decisions = list[Decision]() if options.decide else None
    settings = CallSettings(
        fullgraph=fake,
        in_subgraphs=not fake,
        plain=plain,
        replaced=reader.replaced,
        decisions=decisions,
        as_compiled=options.as_compiled,
    )
    if fake and options.symbolic is not None:
        call = recorded_at_sizes(options.symbolic, into, of, decisions)
    else:
        call = frontend_of(model)(model, functools.partial(record_graph, into, of), settings)
    try:
        with _own_errors():
            output = call(*args, **kwargs)
        captured, sources, of_call = tuple(into.subgraphs), into.sources(), dict(into.traces)
    finally:
        into.clear()  # Dynamo keeps the functions of graphs, and with them the recording
    made = Subgraphs(subgraphs=captured, output=output, staying=into.gathered(), plain=plain, replaced=reader.replaced)
    if not is_sharded(model):
        made = replace(
            made,
            call=DynamoCall(
                model=model,
                identity=into,
                call=call,
                decisions=() if decisions is None else decisions,
                traces=of_call,
                without_gradients=into.without_gradients,
            ),
        )
    if read is None or not captured:
        return made

    def trace_anew(graph: DynamoGraph, around: Surroundings) -> Traced | None:
        traced = trace(graph, around, reader, keep=not into.gathered())
        if traced is None and fake:
            raise nothing_reached(model)
        return traced

    settle = functools.partial(
        settled,
        trace=trace_anew,
        traced=not fake,
        by_use=options.by_use,
        cut=options.cut,
        cut_between=options.cut_between,
    )
    found = settle(made, sources, read(made, take_back))
    if not fake:
        return found
    into.lying.update(strides_of_outputs(found.subgraphs[0].reading.module.graph))
    seen = found.subgraphs[0].outputs
    if all(seen[place].stride() == strides for place, strides in into.lying.items()):
        return found
    # The loss was read on outputs with Dynamo's strides. It is read again on outputs with the kernels' strides.
    take_back()
    output = call(*args, **kwargs)
    sources = tuple(into.graphs) or sources  # changes of the first call to the module may lead to another graph
    of_call.update(into.traces)
    made = replace(made, subgraphs=tuple(into.subgraphs), output=output)
    into.clear()
    return settle(made, sources, read(made, take_back))


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """While active, memfit's own errors leave Dynamo as they were raised."""
    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, MemfitError):
            raise error.inner_exception from None
        raise
    except Unsupported as error:
        cause = getattr(error.__cause__, "inner_exception", None)
        if isinstance(cause, MemfitError):
            raise cause from None
        raise


def first_lines(text: str, count: int = 12) -> str:
    """The first non-empty lines of a message."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:count])
