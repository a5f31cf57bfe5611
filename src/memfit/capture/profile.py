"""Costs measured on the device: each distinct op once, one at a time.

FLOP counts rank ops wrongly (a pointwise op has few and takes long), so every distinct combination of op,
shapes, dtypes and strides is timed with operands made for it. Only one op's operands exist at a time, hence a
model that does not fit can be profiled. Results are cached per machine.

Known limits: an op that cannot run on made-up operands (`memfit.capture.operands`) is priced by roofline.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from memfit.capture.again import Call
from memfit.capture.by_samples import batch_of, sliced_operands
from memfit.capture.cost_cache import CostCache
from memfit.capture.joint import tensors_of
from memfit.capture.operands import operand_values, operands_of
from memfit.capture.parts import call_in_parts, candidate_parts
from memfit.capture.rewrite import IN_PLACE, convolution_input_gradient
from memfit.capture.roofline import roofline_seconds
from memfit.capture.slices import Cuts, convolution_input_slices
from memfit.capture.trace import Capture
from memfit.errors import CaptureError
from memfit.runtime.measure import allocation_peak
from memfit.step.graph import Op, StepGraph, Way

__all__ = ["cost_key", "profile_ops", "ways_of", "with_rooflines"]

log = logging.getLogger(__name__)

_aten = torch.ops.aten
_SHORT_SECONDS = 2e-3
_ALIGNMENT = 64
"""Bytes of the widest vectors; allocations start at multiples of it."""

_REPEATS = 4
_WHOLE_HANDICAP = 1.05
"""Running in parts takes less memory, so it is preferred at about equal time."""

Progress = Callable[[int, int], None]
Costs = tuple[tuple[Way, ...], tuple[Way, ...]]
"""What an op costs whole and in parts, and slice of the batch by slice if it can run so with the same bits."""


@dataclass(frozen=True, slots=True)
class _Measurement:
    """A call, the samples of its slices (0 if it does not run in slices), and what measures both."""

    call: fx.Node | Call
    samples: int
    run: Callable[[], Costs]


def profile_ops(
    capture: Capture, device: torch.device, cache: CostCache, *, progress: Progress | None = None
) -> StepGraph:
    """Measures what is not in the cache and returns the graph with times and workspaces.

    Args:
        capture: the captured step.
        device: where to run the ops.
        cache: known costs, extended by the new ones.
        progress: called with the number of ops done and to do.

    Returns:
        The step graph of the capture with `seconds` and `workspace_bytes` set.
    """
    distinct: dict[str, _Measurement] = {}
    for joint in capture.joint_ops:
        if joint is None:
            continue
        samples = 0 if joint.by_samples is None else joint.by_samples.samples
        if joint.again is None:
            costs = functools.partial(costs_of, joint.node, samples, device)
            distinct.setdefault(_key_by_samples(joint.node, samples), _Measurement(joint.node, samples, costs))
        else:
            costs = functools.partial(costs_of, joint.node, 0, device)
            distinct.setdefault(cost_key(joint.node), _Measurement(joint.node, 0, costs))
            costs = functools.partial(costs_again, joint.node, joint.again, samples, device)
            distinct.setdefault(_key_by_samples(joint.again, samples), _Measurement(joint.again, samples, costs))
    missing = [m for key, m in distinct.items() if key not in cache or cost_key(m.call) not in cache]
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        for done, measurement in enumerate(missing):
            if progress is not None:
                progress(done, len(missing))
            ways, in_slices = measurement.run()
            cache[cost_key(measurement.call)] = ways
            if measurement.samples:
                cache[_key_by_samples(measurement.call, measurement.samples)] = in_slices
    if progress is not None and missing:
        progress(len(missing), len(missing))
    cache.save()
    return _with_costs(
        capture,
        lambda call: cache[cost_key(call)],
        lambda call, samples: cache[_key_by_samples(call, samples)],
    )


def with_rooflines(capture: Capture) -> StepGraph:
    """The step graph with times from rooflines only; nothing runs."""
    return _with_costs(capture, _roofline_ways, lambda call, _: _roofline_ways(call)[:1])


def _with_costs(
    capture: Capture,
    ways_of_call: Callable[[fx.Node | Call], tuple[Way, ...]],
    way_of_slices: Callable[[fx.Node | Call, int], tuple[Way, ...]],
) -> StepGraph:
    ops: list[Op] = []
    for op, joint in zip(capture.graph.ops, capture.joint_ops, strict=True):
        if joint is not None:
            op = _with_ways(op, ways_of_call(joint.node), joint.node)
        if joint is not None and joint.again is not None and op.again is not None:
            ways = ways_of_call(joint.again)
            op = replace(op, again=_with_ways(op.again, ways, joint.again) if ways else None)
        if joint is not None and joint.by_samples is not None:
            ways = way_of_slices(joint.again or joint.node, joint.by_samples.samples)
            if op.again is not None:
                op = replace(op, again=_with_slices(op.again, ways))
            elif joint.again is None:
                op = _with_slices(op, ways)
        ops.append(op)
    return replace(capture.graph, ops=tuple(ops))


def _with_ways(op: Op, ways: tuple[Way, ...], node: fx.Node | Call) -> Op:
    """The op with its costs, to be run the quickest way."""
    in_parts, in_place_over = ways[1:], op.in_place_over
    best = min(ways, key=lambda way: way.seconds * (1.0 if way.parts > 1 else _WHOLE_HANDICAP))
    if in_place_over and candidate_parts(node):  # only in parts does such a kernel write over its operand
        best, in_place_over = (in_parts[0], in_place_over) if in_parts else (best, ())
    return replace(
        op,
        in_place_over=in_place_over,
        seconds=best.seconds,
        workspace_bytes=best.workspace_bytes,
        parts=best.parts,
        ways=ways if in_parts else (),
    )


def _with_slices(op: Op, ways: tuple[Way, ...]) -> Op:
    """The op with the cost of its slices, which it has none of if their bits are others."""
    if op.by_samples is None or not ways:
        return replace(op, by_samples=None)
    (way,) = ways
    slices = replace(op.by_samples, seconds=way.seconds, workspace_bytes=way.workspace_bytes)
    return replace(op, by_samples=slices)


def _key_by_samples(call: fx.Node | Call, samples: int) -> str:
    return f"{cost_key(call)} by {samples} samples" if samples else cost_key(call)


def _roofline_ways(node: fx.Node | Call) -> tuple[Way, ...]:
    seconds = roofline_seconds(node)
    return tuple(Way(parts=parts, seconds=seconds, workspace_bytes=0) for parts in (1, *candidate_parts(node)))


def cost_key(node: fx.Node | Call) -> str:
    """What distinguishes the cost of one call from another's: op, shapes, strides, dtypes, constants."""

    def describe(value: Any) -> str:
        if isinstance(value, fx.Node):
            tensors = tensors_of(value)
            if tensors and not isinstance(value.meta.get("val"), list | tuple):
                t = tensors[0]
                return f"{str(t.dtype)[6:]}{list(t.shape)}{list(t.stride())}"
            return f"<{value.meta.get('val')!r}>"
        if isinstance(value, list | tuple):
            return "(" + ",".join(describe(v) for v in value) + ")"
        return repr(value)

    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if isinstance(node.target, torch._ops.OpOverload):
        target = str(node.target)
    named = [f"{k}={describe(v)}" for k, v in sorted(node.kwargs.items())]
    return f"{target}({','.join([*(describe(a) for a in node.args), *named])})"


def costs_again(node: fx.Node, again: Call, samples: int, device: torch.device) -> Costs:
    """What the call costs that runs in place of a batch normalisation later; nothing if it has other bits."""
    try:
        args, kwargs = operands_of(node, device)
        whole = node.target
        assert callable(whole)
        result, mean, invstd = whole(*args, **kwargs)[:3]
        same = _equal(result, again.target(args[0], mean, invstd, *args[1:3]))
        del args, result
    except (RuntimeError, TypeError) as error:
        log.info("cannot run %s again from its statistics (%s)", node.name, error)
        return (), ()
    return costs_of(again, samples, device) if same else ((), ())


def ways_of(node: fx.Node | Call, device: torch.device) -> tuple[Way, ...]:
    """What the op costs whole, then in parts where that gives the same bits."""
    return costs_of(node, 0, device)[0]


def costs_of(node: fx.Node | Call, samples: int, device: torch.device) -> Costs:
    """What the op costs whole, then in parts where that gives the same bits; and in slices of so many samples."""
    try:
        values = operand_values(node, device)
        args, kwargs = fx.map_arg(node.args, values.__getitem__), fx.map_arg(node.kwargs, values.__getitem__)
        call = node.target
        assert callable(call)

        def whole() -> object:
            return call(*args, **kwargs)

        result, first = _measured(whole, device)
        _check_hollow(node, args, result)
        found = [(first, whole)]
        for parts in candidate_parts(node) if first.workspace_bytes else ():
            in_parts = functools.partial(_in_parts, node, args, kwargs, parts)
            way = _measured_alike(in_parts, result, device)
            if way is not None:
                # Where it can write over an operand it mostly will, which saves touching fresh memory.
                over = IN_PLACE.get(node.target, {}).get(0)
                timed = in_parts if over is None else functools.partial(over, *args, parts=parts, **kwargs)
                found.append((replace(way, parts=parts), timed))
        in_slices = way_by_samples(node, samples, values, result, device) if samples else ()
        del result  # timed runs take the memory of those before them, as those of a step do
        ways = tuple(replace(way, seconds=_seconds(run, way.seconds, device)) for way, run in found)
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError) as error:
        log.info("cannot time %s alone (%s); using its roofline", node.name, error)
        return (Way(parts=1, seconds=roofline_seconds(node), workspace_bytes=0),), ()
    return ways, in_slices


def way_by_samples(
    call: fx.Node | Call, samples: int, values: Mapping[fx.Node, torch.Tensor], whole: object, device: torch.device
) -> tuple[Way, ...]:
    """What the op costs slice after slice, with the workspace of one slice; nothing if it has other bits so.

    Kernels go by shape and by where operands lie in memory, so the first slice, one in the middle, the last and one
    of each alignment are compared with the whole.
    """
    target, sliced = call.target, sliced_operands(call)
    assert callable(target)

    def run(here: slice) -> object:
        args = fx.map_arg(call.args, lambda n: values[n][here] if n in sliced else values[n])
        return target(*args, **fx.map_arg(call.kwargs, values.__getitem__))

    try:
        _, first = _measured(lambda: run(slice(samples)), device)
        times: list[float] = []
        starts = range(0, batch_of(call), samples)
        operands = [values[node] for node in call.all_input_nodes if node in sliced]
        aligned = {tuple(t[s:].data_ptr() % _ALIGNMENT for t in operands): s for s in reversed(starts)}
        for start in sorted({*aligned.values(), starts[0], starts[len(starts) // 2], starts[-1]}):
            here, results = slice(start, start + samples), list[object]()
            times.append(_timed(functools.partial(_run_into, results, run, here), device))
            if not _equal(_samples(whole, here), results[0]):
                return ()
    except RuntimeError as error:  # a slice is too small for the kernel of the whole
        log.info("cannot run %s by samples (%s)", call.name, error)
        return ()
    return (replace(first, seconds=statistics.median(times) * len(starts)),)


def _run_into(results: list[object], run: Callable[[slice], object], here: slice) -> None:
    results.append(run(here))


def _samples(result: object, here: slice) -> object:
    if isinstance(result, tuple | list):
        return tuple(_samples(r, here) for r in result)
    return result[here] if isinstance(result, torch.Tensor) else result


def _seconds(run: Callable[[], object], once: float, device: torch.device) -> float:
    """The least of several runs, one of them known: other work on the machine only ever adds time."""
    repeats = _REPEATS if once < _SHORT_SECONDS or device.type == "cuda" else 1
    return min(once, *(_timed(run, device) for _ in range(repeats)))


def _in_parts(node: fx.Node | Call, args: tuple[Any, ...], kwargs: dict[str, Any], parts: int) -> object:
    return call_in_parts(node.target)(*args, parts=parts, **kwargs)


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return one is None and other is None


def _timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        del result
        return float(begin.elapsed_time(end)) / 1e3
    start = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    del result
    return seconds


def _measured(run: Callable[[], object], device: torch.device) -> tuple[object, Way]:
    """The result of one run and what it took: its time, and the peak beyond its result."""
    results: list[object] = []
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        seconds = _timed(lambda: results.append(run()), device)
        beyond = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    else:
        times: list[float] = []
        peak = allocation_peak(lambda: times.append(_timed(lambda: results.append(run()), device)))
        (seconds,), beyond = times, peak - _result_bytes(results)
    return results[0], Way(parts=1, seconds=seconds, workspace_bytes=max(0, beyond))


def _measured_alike(run: Callable[[], object], expected: object, device: torch.device) -> Way | None:
    """What one run took, None if its bits are not those expected."""
    try:
        result, way = _measured(run, device)
    except RuntimeError:  # a part is too small for the kernel of the whole
        return None
    return way if _equal(expected, result) else None


def _result_bytes(results: Iterable[object]) -> int:
    storages: dict[int, int] = {}
    for result in results:
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor):
                storages[tensor.untyped_storage().data_ptr()] = int(tensor.untyped_storage().nbytes())
    return sum(storages.values())


def _check_hollow(node: fx.Node | Call, args: Sequence[Any], found: object) -> None:
    """The input's gradient alone must have the bits of `convolution_backward`, on this machine and shape.

    Raises:
        CaptureError: if it does not.
    """
    cuts: Cuts | None = None
    if node.target is convolution_input_slices:
        *args, cuts = args
    elif node.target is not convolution_input_gradient:
        return
    gradient, hollow, weight, *rest = args
    data = torch.empty_strided(hollow.shape, hollow.stride(), dtype=hollow.dtype, device=gradient.device).zero_()
    whole = _aten.convolution_backward.default(gradient, data, weight, *rest, [True, True, False])[0]
    expected = whole if cuts is None else tuple(whole[:, start:stop].contiguous() for start, stop in cuts)
    if not _equal(expected, found):
        raise CaptureError(
            f"{node.name} runs in parts with other bits than as a whole on this machine; please report it"
        )
