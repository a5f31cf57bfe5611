"""Gets the joint graphs of a module's training step from Dynamo and AOTAutograd.

The first attempt executes nothing: Dynamo traces with fake tensors, and the compiled function returns fake outputs to
the caller. So the model needs no memory beyond its parameters, and the loss can be traced on fake tensors too. A graph
break makes this impossible, because the code between two subgraphs may look at values. Then the subgraphs run one after
the other without saving activations, and buffers and generators are restored afterwards.

Known limits: code between two subgraphs is not planned; its memory shows up in the proving run. `nn.LSTM` and similar
layers are such code: Dynamo could unroll them, but into other kernels than eager's, with different bits.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from memfit.capture.allocation_tracker import LiveBytes
from memfit.capture.checkpoints import refusing_checkpoints, without_checkpoints
from memfit.capture.compiled_call import compile_call
from memfit.capture.distributed.fsdp import gathering, is_sharded, local
from memfit.capture.dynamo_call import DynamoCall, made_while_running, running_plan
from memfit.capture.dynamo_graph import graph_key, outputs_of, reads_numbers, returned_inputs, weights_made
from memfit.capture.failures import explained, left_to_plain_code, nothing_captured, nothing_reached, quiet
from memfit.capture.gradients.returned_views import calling_after, returned_views_first
from memfit.capture.gradients.settling import settled
from memfit.capture.gradients.tangents import Strides, strides_of_outputs
from memfit.capture.gradients.used_views import hand_on_used_views
from memfit.capture.loss.reading import LossReading
from memfit.capture.state.snapshot import preserved
from memfit.capture.subgraph_boundaries import Handed, handed_over, has_tensor_hooks, without_tensor_hooks
from memfit.capture.subgraphs import Subgraph, Subgraphs, tensors_in
from memfit.capture.traced_graph import (
    DynamoGraph,
    Reader,
    Surroundings,
    Trace,
    Traced,
    as_dynamo_made,
    not_traced,
    trace,
)
from memfit.capture.unplanned_parts import (
    NOTHING_PLAIN,
    VARYING,
    GradientsTakenError,
    PlainParts,
    find_plain_parts,
)
from memfit.capture.values.decisions import Decision
from memfit.capture.values.numpy_code import NumpyCodeError, numbers_by_numpy, refuse_rounding_numpy
from memfit.errors import MemfitError
from memfit.fxir.module_names import name_modules
from memfit.fxir.refused import UnplannableGraphError
from memfit.torch_compat.compiler import BackendCompilerFailed, TorchDynamoException, Unsupported
from memfit.torch_compat.core import FakeTensorMode

__all__ = ["capture_subgraphs", "first_lines"]

log = logging.getLogger(__name__)

_Read = Callable[[Subgraphs, Callable[[], None]], LossReading]


def capture_subgraphs(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    reader: Reader,
    checkpointing: str = "refuse",
    read: _Read | None = None,
    by_use: bool = False,
    cut: bool = True,
    cut_between: bool = False,
    decide: bool = True,
) -> Subgraphs:
    """Captures the training step of `model(*args, **kwargs)`. Changes nothing.

    Args:
        model: in training mode.
        args: positional inputs.
        kwargs: keyword inputs.
        reader: how joint graphs are read.
        checkpointing: `"refuse"` or `"replace"`, how checkpoints of the model itself are treated.
        read: reads the loss while changes of the forward pass to modules and hooks are still in place; its second
            argument undoes these changes where they are fake. Without `read`, graphs are traced as if all outputs
            received a gradient.
        by_use: whether graphs take every input with several uses once per use
            (`memfit.capture.gradients.shared_inputs`).
        cut: whether outputs of the last graph that receive no gradient are detached.
        cut_between: whether such outputs of earlier graphs are detached too.
        decide: whether branches on inputs are decided at capture; otherwise they break the graph.

    Returns:
        The subgraphs and the output of the module.

    Raises:
        CaptureError: if Dynamo cannot capture the model; names the line. Errors of the plain forward pass are raised as
            they are.
    """
    captured = functools.partial(
        _capture,
        *(model, args, kwargs),
        reader=reader,
        read=read,
        by_use=by_use,
        cut=cut,
        cut_between=cut_between,
        decide=decide,
    )
    try:
        with preserved(model, args, kwargs, values=False) as state, quiet():
            return captured(fake=True, take_back=state.restore)
    except UnplannableGraphError as error:
        failure: Exception = error
    except MemfitError:
        raise
    except Exception as error:  # any error: the plain forward pass raises it too, or the graph breaks there
        failure = error
    reason = first_lines(str(failure))
    log.info("the graph breaks, capturing subgraph by subgraph: %s", reason)
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise explained(failure, model, start="the model looks at values, which the meta device does not have")

    def watched(*, gradients: bool) -> PlainParts:
        around = without_checkpoints() if checkpointing == "replace" else refusing_checkpoints()
        with preserved(model, args, kwargs), around:
            return find_plain_parts(model, args, kwargs, decide=decide, gradients=gradients)

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
    fake: bool,
    take_back: Callable[[], None],
    reader: Reader,
    read: _Read | None,
    by_use: bool,
    cut: bool,
    cut_between: bool,
    decide: bool,
    plain: PlainParts = NOTHING_PLAIN,
) -> Subgraphs:
    subgraphs: list[Subgraph] = []
    graphs: list[DynamoGraph] = []
    runs: list[int] = []
    traces: dict[DynamoGraph, list[Trace]] = {}
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    gathered = gathering(model)
    held = frozenset(id(t) for t in (*model.parameters(), *model.buffers()))
    is_read = read is not None  # Dynamo keeps the backend, which must not hold `read` and with it the inputs
    later = fake and is_read  # one graph is traced after the loss is read, when all facts for tracing are known
    lying: dict[int, Strides] = {}
    without_gradients = set[str]()

    def trace_anew(graph: DynamoGraph, around: Surroundings) -> Traced | None:
        traced = trace(graph, around, reader, keep=not gathered())
        if traced is None and fake:
            raise nothing_reached(model)
        return traced

    identity = object()

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if running_plan(identity) is not None:
            return made_while_running(gm, inputs, identity)
        numbers_by_numpy(gm)
        refuse_rounding_numpy(gm.graph)
        name_modules(gm.graph, model)
        gm, inputs, views = returned_views_first(gm, inputs)
        hand_on_used_views(gm)
        graph = as_dynamo_made(gm, inputs, "" if fake else graph_key(gm), gathered=bool(gathered()))
        if fake and reads_numbers(gm):
            raise UnplannableGraphError("a number is read from a tensor")
        results = [n.meta["example_value"] if isinstance(n, fx.Node) else n for n in outputs_of(gm)]
        original = gm.forward if fake else types.MethodType(type(gm).forward, gm)
        if not fake and has_tensor_hooks(gm):
            original = without_tensor_hooks(gm).forward
        if later and not any(isinstance(r, torch.Tensor) and r.requires_grad for r in results):
            raise nothing_reached(model)
        try:
            traced = not_traced(gm) if later else trace(graph, Surroundings(), reader, keep=is_read)
        except UnplannableGraphError as error:
            if fake:
                raise
            log.warning("%s: the graph around it runs as plain code", error)
            return calling_after(views, gm.forward)
        if traced is None:
            if fake:
                raise nothing_reached(model)
            without_gradients.add(graph.key)
            return calling_after(views, gm.forward)
        weights = weights_made(gm, inputs, held)
        key, number = graph.key, len(graphs)
        graphs.append(graph)
        bare = replace(graph, inputs=(), traces=[])
        traces[bare] = graph.traces
        del graph  # Dynamo keeps the function below, which must not hold the inputs
        if not later:
            lying.update(strides_of_outputs(traced.reading.module.graph))

        def run(*real_inputs: Any) -> Any:
            plan = running_plan(identity)
            if plan is not None:
                return plan.run(bare, views, real_inputs)
            units = gathered()
            operands = (*real_inputs, *views(*real_inputs))
            if fake:
                handed = Handed(outputs=tuple(_twin(r, fake_mode, lying.get(p)) for p, r in enumerate(results)))
            else:
                with torch.no_grad():
                    made = original(*operands)
                handed = handed_over(made, results, () if units else operands, traced.of_inputs)
            runs.append(number)
            subgraphs.append(
                Subgraph(
                    trace=traced.trace,
                    reading=traced.reading,
                    inputs=operands,
                    handed=handed,
                    gathered=units,
                    key=key,
                    terms=traced.terms,
                    returned=returned_inputs(gm),
                    weights=weights,
                )
            )
            return handed.outputs

        return run

    decisions = list[Decision]() if decide else None
    call = compile_call(
        model,
        backend,
        fullgraph=fake,
        in_subgraphs=not fake,
        plain=plain,
        replaced=reader.replaced,
        decisions=decisions,
    )
    try:
        output = call(*args, **kwargs)
        captured, sources, of_call = tuple(subgraphs), tuple(graphs[number] for number in runs), dict(traces)
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, MemfitError):
            raise error.inner_exception from None
        raise
    except Unsupported as error:
        cause = getattr(error.__cause__, "inner_exception", None)
        if isinstance(cause, MemfitError):
            raise cause from None
        raise
    finally:
        subgraphs.clear()  # Dynamo keeps the backend, and with it these lists
        graphs.clear()
        traces.clear()
    made = Subgraphs(subgraphs=captured, output=output, staying=gathered(), plain=plain, replaced=reader.replaced)
    if not is_sharded(model):
        made = replace(
            made,
            call=DynamoCall(
                model=model,
                identity=identity,
                call=call,
                decisions=() if decisions is None else decisions,
                traces=of_call,
                without_gradients=without_gradients,
            ),
        )
    if read is None or not captured:
        return made
    settle = functools.partial(
        settled, trace=trace_anew, traced=not later, by_use=by_use, cut=cut, cut_between=cut_between
    )
    found = settle(made, sources, read(made, take_back))
    if not later:
        return found
    lying.update(strides_of_outputs(found.subgraphs[0].reading.module.graph))
    seen = found.subgraphs[0].outputs
    if all(seen[place].stride() == strides for place, strides in lying.items()):
        return found
    # The loss was read on outputs with Dynamo's strides. It is read again on outputs with the kernels' strides.
    take_back()
    output = call(*args, **kwargs)
    sources = tuple(graphs) or sources  # changes of the first call to the module may lead to another graph
    graphs.clear()
    of_call.update(traces)
    traces.clear()
    made = replace(made, subgraphs=tuple(subgraphs), output=output)
    subgraphs.clear()
    return settle(made, sources, read(made, take_back))


def _twin(value: Any, fake_mode: FakeTensorMode, strides: Strides | None) -> Any:
    """A leaf fake tensor with the metadata of Dynamo's, but the kernels' strides, which Dynamo does not ask for."""
    if not isinstance(value, torch.Tensor):
        return value
    with fake_mode:
        strides = value.stride() if strides is None else strides
        twin = torch.empty_strided(tuple(value.shape), strides, dtype=value.dtype, device=value.device)
    return twin.requires_grad_(value.requires_grad)


def first_lines(text: str, count: int = 12) -> str:
    """The first non-empty lines of a message."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:count])
