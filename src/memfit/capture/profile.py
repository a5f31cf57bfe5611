"""Costs measured on the device: each distinct op once, one at a time.

FLOP counts rank ops wrongly (a pointwise op has few and takes long), so every distinct combination of op,
shapes, dtypes and strides is timed with operands made for it. Only one op's operands exist at a time, hence a
model that does not fit can be profiled. Results are cached per machine.

Known limits: integer operands are zeros unless the op is known to index with them; an op that cannot run on
made-up operands is priced by roofline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from memfit.capture.batch_norm import backward_by_channels
from memfit.capture.cost_cache import CostCache, OpCost
from memfit.capture.joint import JointOp, tensors_of
from memfit.capture.rewrite import HOLLOW_PREFIX, convolution_input_gradient, make_hollow
from memfit.capture.roofline import roofline_seconds
from memfit.capture.trace import Capture
from memfit.errors import CaptureError
from memfit.runtime.measure import allocation_peak
from memfit.step.graph import StepGraph

__all__ = ["cost_key", "profile_ops", "with_rooflines"]

log = logging.getLogger(__name__)

_aten = torch.ops.aten
_SHORT_SECONDS = 2e-3
_LONG_SECONDS = 0.1
_TILE = 1 << 16

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Indexing:
    """Which operand holds indices and how many values they may take."""

    operand: int
    limit: Callable[[tuple[Any, ...]], int]


_INDEXING: dict[Any, _Indexing] = {
    _aten.embedding.default: _Indexing(operand=1, limit=lambda args: int(args[0].shape[0])),
    _aten.embedding_dense_backward.default: _Indexing(operand=1, limit=lambda args: int(args[2])),
}


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
    distinct: dict[str, JointOp] = {}
    keys: list[str | None] = []
    for joint in capture.joint_ops:
        key = None if joint is None else cost_key(joint.node)
        keys.append(key)
        if joint is not None and key is not None:
            distinct.setdefault(key, joint)
    missing = [key for key in distinct if key not in cache]
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        for done, key in enumerate(missing):
            if progress is not None:
                progress(done, len(missing))
            cache[key] = _cost_of(distinct[key].node, device)
    if progress is not None and missing:
        progress(len(missing), len(missing))
    cache.save()
    ops = tuple(
        op if key is None else replace(op, seconds=cache[key].seconds, workspace_bytes=cache[key].workspace_bytes)
        for op, key in zip(capture.graph.ops, keys, strict=True)
    )
    return replace(capture.graph, ops=ops)


def with_rooflines(capture: Capture) -> StepGraph:
    """The step graph with times from rooflines only; nothing runs."""
    ops = tuple(
        op if joint is None else replace(op, seconds=roofline_seconds(joint.node))
        for op, joint in zip(capture.graph.ops, capture.joint_ops, strict=True)
    )
    return replace(capture.graph, ops=ops)


def cost_key(node: fx.Node) -> str:
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


def _cost_of(node: fx.Node, device: torch.device) -> OpCost:
    try:
        args, kwargs = _operands(node, device)
        call = node.target
        assert callable(call)

        def run() -> object:
            return call(*args, **kwargs)

        workspace = _workspace(run, device)
        once = _timed(run, device)
        repeats = 8 if once < _SHORT_SECONDS else 3 if once < _LONG_SECONDS else 1
        # The least of several: other work on the machine only ever adds time.
        seconds = min(once, *(_timed(run, device) for _ in range(repeats)))
        _check_rewrite(node, args, run)
        return OpCost(seconds=seconds, workspace_bytes=workspace)
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError) as error:
        log.info("cannot time %s alone (%s); using its roofline", node.name, error)
        return OpCost(seconds=roofline_seconds(node), workspace_bytes=0)


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


def _workspace(run: Callable[[], object], device: torch.device) -> int:
    """Peak of one run beyond its results."""
    results: list[object] = []
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        results.append(run())
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))
    peak = allocation_peak(lambda: results.append(run()))
    return max(0, peak - _result_bytes(results))


def _result_bytes(results: Iterable[object]) -> int:
    storages: dict[int, int] = {}
    for result in results:
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor):
                storages[tensor.untyped_storage().data_ptr()] = int(tensor.untyped_storage().nbytes())
    return sum(storages.values())


def _operands(node: fx.Node, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    made: dict[fx.Node, Any] = {}
    indexing = _INDEXING.get(node.target)
    index_node = node.args[indexing.operand] if indexing is not None else None

    def real(argument: fx.Node) -> Any:
        if argument not in made:
            value = argument.meta.get("val")
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"operand {argument.name} is not a tensor")
            if str(argument.target).startswith(HOLLOW_PREFIX):
                made[argument] = make_hollow(value, device)
            else:
                made[argument] = _like(value, device)
        return made[argument]

    args = fx.map_arg(node.args, real)
    kwargs = fx.map_arg(node.kwargs, real)
    if indexing is not None and isinstance(index_node, fx.Node):
        made[index_node].random_(0, max(1, indexing.limit(args)))
    return args, kwargs


def _like(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A real tensor with the layout of a fake one, filled with ordinary numbers."""
    tensor = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device=device)
    flat = torch.empty(0, dtype=value.dtype, device=device).set_(tensor.untyped_storage())
    if not value.dtype.is_floating_point and not value.dtype.is_complex:
        flat.fill_(value.dtype is torch.bool)
        return tensor
    tile = torch.randn(_TILE, device=device).to(value.dtype)
    whole = flat.numel() // _TILE
    flat[: whole * _TILE].view(whole, _TILE).copy_(tile)
    flat[whole * _TILE :].copy_(tile[: flat.numel() - whole * _TILE])
    return tensor


def _check_rewrite(node: fx.Node, args: tuple[Any, ...], run: Callable[[], Any]) -> None:
    """A rewritten op must give the bits of the one it stands for, on this machine and shape.

    Raises:
        CaptureError: if it does not.
    """
    if node.target is convolution_input_gradient:
        gradient, hollow, weight, *rest = args
        data = torch.empty_strided(hollow.shape, hollow.stride(), dtype=hollow.dtype, device=gradient.device).zero_()
        whole = _aten.convolution_backward.default(gradient, data, weight, *rest, [True, True, False])
        equal = torch.equal(whole[0], run())
    elif node.target is backward_by_channels:
        whole = _aten.native_batch_norm_backward.default(*args)
        equal = all(torch.equal(a, b) for a, b in zip(whole, run(), strict=True))
    else:
        return
    if not equal:
        raise CaptureError(
            f"{node.name} runs in parts with other bits than as a whole on this machine; please report it"
        )
