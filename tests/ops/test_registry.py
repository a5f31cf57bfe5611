"""Each claim of an op's rule holds on torch's own sample inputs, contiguous, channels-last and transposed."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from memfit.fxir.call import Call
from memfit.ops.batching.sampling import sampling_of
from memfit.ops.batching.slices import accumulates, samples_between
from memfit.ops.kernels.convolution import (
    convolution_input_gradient,
    convolution_input_slices,
    input_gradient_beside_stand_in,
)
from memfit.ops.op_rule import OpRule, View
from memfit.ops.registry import REGISTERED, is_pointwise, rule_named, rule_of, sums_of
from memfit.ops.rules import pointwise
from memfit.ops.tiling.tiled import tiling_of
from memfit.ops.tiling.window import narrowed, tiles_of
from memfit.profiling.synthetic_inputs import operands_of
from memfit.torch_compat.core import OpOverload, TorchDispatchMode, pytree
from tests.op_database import samples_of, torchs_ops
from tests.ops.kernels.test_library import SAMPLES

_aten = torch.ops.aten

_DATABASE = (
    *("add", "sub", "mul", "div", "neg", "clone", "tanh", "sigmoid", "masked_fill", "to", "fmin", "pow"),
    *("mm", "bmm", "addmm", "baddbmm", "softmax", "log_softmax", "masked.softmax", "cumsum", "mean", "sum", "amax"),
    *("amin", "cat", "select", "narrow", "trapz", "native_batch_norm", "native_layer_norm", "native_group_norm"),
    *(
        "t",
        "transpose",
        "permute",
        "expand",
        "select",
        "unsqueeze",
        "squeeze",
        "as_strided",
        "where",
        "zeros_like",
        "linalg.lu_solve",
        "linalg.ldl_solve",
        "lu_unpack",
        "torch.ops.aten._safe_softmax.default",
    ),
)
"""Entries of torch's op database, in addition to those of `torch.nn.functional`, that reach the registered ops."""

_NOT_FUNCTIONAL = ("embedding_bag", "gaussian_nll", "ctc", "cdist", "multi_head", "rrelu", "linear_cross", "scaled_mm")

_ELSEWHERE = {
    _aten._scaled_dot_product_efficient_attention_backward.default,  # on CUDA
    _aten._efficient_attention_backward.default,
    _aten.miopen_batch_norm.default,
    _aten._fused_rms_norm.default,  # on CUDA, and in half precision
    _aten._fused_rms_norm_backward.default,
    _aten.upsample_nearest3d.default,  # the database has no volumes to resize
    _aten.upsample_nearest3d_backward.default,
}
"""Ops of torch that its database does not reach on a CPU; `tests/ops/batching` and `tests/gpu` run them."""

_OTHER_ARGUMENTS: dict[OpOverload, tuple[Any, ...]] = {
    _aten.relu_.default: (),
    _aten.native_dropout.default: (0.5, True),
    _aten.full_like.default: (3.0,),
    _aten.new_ones.default: ([5],),
    _aten.new_full.default: ([5], 3.0),
    _aten.randn_like.default: (),
}
"""Arguments behind the tensor, of ops that torch's database reaches under another name."""

_BESIDE_SHAPE = {convolution_input_gradient, convolution_input_slices, input_gradient_beside_stand_in}
"""Kernels with a metadata-only operand; `tests/ops/batching` and `tests/ops/tiling` run them."""

Recorded = dict[OpOverload, list[tuple[tuple[Any, ...], dict[str, Any]]]]
"""Arguments of calls, by position and by name."""

_CALLS_OF_AN_OP = 12
_TOLERANCE = 1e-9


class Calls(TorchDispatchMode):
    """Copies the arguments of registered ops, of each shape and each setting once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Recorded = defaultdict(list)
        self.keys: dict[OpOverload, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in REGISTERED:
            given = (args, kwargs or {})
            key = str(pytree.tree_map_only(Tensor, lambda t: (t.dtype, *t.shape), given))
            if len(self.found[func]) < _CALLS_OF_AN_OP and key not in self.keys[func]:
                self.keys[func].add(key)
                self.found[func].append(pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), given))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def calls() -> Recorded:
    """Arguments of registered ops, from forward and backward passes of the database's samples."""
    with Calls() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in torchs_ops():
            functional = op.name.startswith("nn.functional.") and not any(n in op.name for n in _NOT_FUNCTIONAL)
            if not (functional or op.name in _DATABASE) or not op.supports_dtype(torch.float64, "cpu"):
                continue
            for _, sample in zip(range(24), samples_of(op, torch.float64), strict=False):
                made = pytree.tree_leaves(op.op(sample.input, *sample.args, **sample.kwargs))
                made = [t for t in made if isinstance(t, Tensor) and t.requires_grad]
                if made and op.supports_autograd:
                    torch.autograd.backward(made, [torch.ones_like(t) for t in made])
    found = dict(seen.found)
    norm = found[_aten.native_batch_norm.default]  # in a graph, the functional op runs
    found[_aten._native_batch_norm_legit_functional.default] = [
        c for c in norm if all(isinstance(t, Tensor) for t in c[0][1:5])
    ]
    data = torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 4)
    for op, rest in _OTHER_ARGUMENTS.items():
        found[op] = [((data, *rest), {})]
    found[_aten._to_copy.default] += [(args, {"dtype": torch.float32}) for args, _ in found[_aten._to_copy.default]]
    for op in (_aten.convolution_backward.default, _aten.native_batch_norm_backward.default):  # passes split them
        found[op] += [((*args[:-1], [False, True, bool(args[-1][2])]), kwargs) for args, kwargs in found[op]]
    return found


def laid_out(op: OpOverload, args: Any) -> Iterator[Any]:
    """The arguments, and those with images channels-last and with their last two axes exchanged in memory."""
    yield args
    if rule_of(op).view is View.SHAPE:  # not possible in every layout
        return
    images = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor) and t.dim() == 4]
    if images and "attention" not in str(op):  # its kernel takes rows that are contiguous
        yield pytree.tree_map_only(
            Tensor, lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t, args
        )
    if "attention" not in str(op) and any(isinstance(t, Tensor) and t.dim() > 2 for t in pytree.tree_leaves(args)):
        yield pytree.tree_map_only(Tensor, lambda t: t.mT.contiguous().mT if t.dim() > 2 else t, args)


def call_of(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Call, dict[fx.Node, Tensor]]:
    """The call as a graph has it, with the results of the whole op, and its operands."""
    graph, values = fx.Graph(), dict[fx.Node, Tensor]()

    def operand(tensor: Tensor) -> fx.Node:
        node = graph.placeholder(f"operand_{len(values)}")
        node.meta["val"] = tensor
        values[node] = tensor
        return node

    given, named = pytree.tree_map_only(Tensor, operand, (tuple(args), kwargs))
    made = op(*copied(args), **copied(kwargs))
    return Call(name=op.__name__, target=op, args=given, kwargs=named, meta={"val": made}), values


def copied(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.clone(), value)


def results(made: Any) -> list[Any]:
    return list(made) if isinstance(made, tuple | list) else [made]


def close(found: Tensor, whole: Tensor) -> None:
    torch.testing.assert_close(found, whole, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


def slices_are_those_of_the_whole(call: Call, values: dict[fx.Node, Tensor]) -> int:
    checked = 0
    sizes = {n for t in (*values.values(), *results(call.meta["val"])) if isinstance(t, Tensor) for n in t.shape[:2]}
    for batch in sizes - {0, 1}:
        sampling = sampling_of(call, batch)
        if sampling is None:
            continue
        whole, checked = results(call.meta["val"]), checked + 1
        totals = {place: torch.zeros_like(whole[place]) for place in sums_of(call) if whole[place] is not None}
        size = -(-batch // 2)
        for start, stop in ((0, size), (size, batch)):
            given = {
                n: samples_between(t, sampling.operands[n], batch, start, stop) if n in sampling.operands else t
                for n, t in values.items()
            }
            args, kwargs = fx.map_arg((call.args, call.kwargs), given.__getitem__)
            if accumulates(call):  # adds up itself
                kwargs = {**kwargs, "total": torch.zeros_like(whole[0])}
            made = results(sampling.run(*args, **kwargs))
            for place, part in enumerate(made):
                axis = sampling.axes[place]
                if part is not None and place in totals:
                    totals[place] += part
                elif part is not None and axis is not None:
                    close(part, samples_between(whole[place], axis, batch, start, stop))
        for place, total in totals.items():
            close(total, whole[place])
    return checked


def tiles_are_those_of_the_whole(call: Call, values: dict[fx.Node, Tensor]) -> int:
    checked = 0
    for grid in ((2,), (1, 2), (2, 2)):
        value = results(call.meta["val"])
        tensors = [t for t in (*values.values(), *value) if isinstance(t, Tensor)]
        if not any(t.dim() >= 2 + len(grid) for t in tensors):
            continue
        tiling = tiling_of(call, len(grid))
        if tiling is None or any(extent < n for extent, n in zip(tiling.extents, grid, strict=True)):
            continue
        checked += 1
        totals = {p: torch.zeros_like(value[p]) for p in sums_of(call) if value[p] is not None}
        for tile in tiles_of(tiling.extents, grid):
            needs = dict(zip(tiling.operands, tiling.needs(tile), strict=True))

            given = {n: narrowed(t, needs[n]) if n in needs else t for n, t in values.items()}
            made = results(tiling.run(*fx.map_arg(call.args, given.__getitem__), tile=tile))
            for place, part in enumerate(made):
                if part is not None and place in totals:
                    totals[place] += part
                elif part is not None:
                    close(part, narrowed(value[place], tile))
        for place, total in totals.items():
            close(total, value[place])
    return checked


def in_place_has_the_same_bits(rule: OpRule, call: Call, args: Sequence[Any], kwargs: Any) -> int:
    checked, first = 0, results(call.meta["val"])[0]
    for position, run in rule.in_place.items() if isinstance(first, Tensor) else ():
        operand = args[position] if position < len(args) else None
        alike = isinstance(operand, Tensor) and operand.shape == first.shape and operand.stride() == first.stride()
        if not alike or operand.dtype is not first.dtype or not operand.is_contiguous():
            continue
        if rule.in_place_if is not None and not rule.in_place_if(call, position):  # type: ignore[arg-type]
            continue
        given = copied(list(args))
        made = results(run(*given, **copied(kwargs)))[0]
        assert torch.equal(made.nan_to_num(7), first.nan_to_num(7)), position
        assert made.untyped_storage().data_ptr() == given[position].untyped_storage().data_ptr()
        checked += 1
    return checked


def check(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Checks all claims of the op's rule on these arguments; returns the number of comparisons."""
    rule = rule_of(op)
    call, values = call_of(op, args, kwargs)
    whole = results(call.meta["val"])
    checked = in_place_has_the_same_bits(rule, call, args, kwargs)
    if rule.batch is not None:
        checked += slices_are_those_of_the_whole(call, values)
    if rule.tile is not None and not kwargs:
        checked += tiles_are_those_of_the_whole(call, values)
    if not rule.reads_values and op is not _aten.empty_like.default and op is not _aten.new_empty.default:
        other = torch.full_like(args[0], torch.nan)
        assert torch.equal(seeded(op, other, *args[1:], **kwargs), seeded(op, *args, **kwargs))
        checked += 1
    if rule.binding is not None:
        checked += the_binding_is_the_op(rule.binding, op, args, kwargs)
    if rule.view is not None:
        checked += the_view_changes_what_it_says(rule.view, op, args)
    for position in rule.shape_only:
        unread = [torch.full_like(a, torch.nan) if i == position else a for i, a in enumerate(args)]
        assert torch.equal(results(op(*unread, **kwargs))[0], whole[0])
        checked += 1
    if rule.recompute_as is not None and args[5] is True:
        data, weight, bias, _, _, *rest = args
        assert torch.equal(results(rule.recompute_as(data, weight, bias, None, None, *rest))[0], whole[0])
        checked += 1
    if rule.accumulation is not None and rule.accumulation.can_add(call):  # type: ignore[arg-type]
        made = whole[1] if op is _aten.convolution_backward.default else whole[0]
        total = torch.ones_like(made)
        rule.accumulation.add(total, *args)
        close(total, made + 1)
        rule.accumulation.add(total, *args, beta=0)
        close(total, made)
        checked += 1
    if rule.chunks is not None and all(t.is_contiguous() for t in pytree.tree_leaves(args) if isinstance(t, Tensor)):
        checked += chunks_are_the_whole(rule, call, args, whole)
    if rule.fill is not None or rule.takes_shares:
        made_up, named = operands_of(call, torch.device("cpu"))
        op(*made_up, **named)
        checked += 1
    return checked


def seeded(op: OpOverload, *args: Any, **kwargs: Any) -> Tensor:
    torch.manual_seed(0)
    made: Tensor = op(*args, **kwargs)
    return made


def the_binding_is_the_op(binding: Any, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """A binding gives the bits, the layout and, for views, the memory of the op; only positional arguments reach it."""
    if kwargs:
        return 0
    given, again = copied(args), copied(args)
    torch.manual_seed(0)
    bound = results(binding(*given))
    torch.manual_seed(0)
    for ours, theirs in zip(bound, results(op(*again)), strict=True):
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7)) and ours.stride() == theirs.stride()
        assert ours.storage_offset() == theirs.storage_offset()
        mine, of_op = (t.untyped_storage().data_ptr() for t in (given[0], again[0]))
        shared = theirs.untyped_storage().data_ptr() == of_op
        assert (ours.untyped_storage().data_ptr() == mine) == shared or op is _aten._unsafe_view.default
    return 1


def the_view_changes_what_it_says(view: View, op: OpOverload, args: Sequence[Any]) -> int:
    operand, *rest = args
    made = op(operand, *rest)
    assert made.untyped_storage().data_ptr() == operand.untyped_storage().data_ptr()
    if view is View.NOTHING:
        assert (made.shape, made.stride()) == (operand.shape, operand.stride())
    if view is View.TWO_AXES:
        back = op(made, *rest)
        assert (back.shape, back.stride()) == (operand.shape, operand.stride())
    if view is not View.STRIDES:
        apart = torch.empty(2 * operand.numel(), dtype=operand.dtype)[::2].view(operand.shape).copy_(operand)
        assert view is View.SHAPE or torch.equal(op(apart, *rest), made)
        assert view is not View.SHAPE or torch.equal(made.reshape(-1), operand.reshape(-1))
    return 1


def chunks_are_the_whole(rule: OpRule, call: Call, args: Sequence[Any], whole: Sequence[Any]) -> int:
    """Operands are contiguous; the profiler tries chunks of convolutions on large operands only."""
    assert rule.chunks is not None
    if call.target is _aten.native_batch_norm_backward.default and not rule.chunks.candidates(call):
        return 0
    if call.target is _aten.convolution_backward.default and (args[-1][0] or not args[-1][1]):
        return 0
    for part, made in zip(results(rule.chunks.call(*args, chunks=2)), whole, strict=True):
        if part is not None:
            close(part, made)
    return 1


_TORCHS = [op for op in REGISTERED if op.namespace == "aten" and op not in _ELSEWHERE]
_OWN = [op for op in REGISTERED if op.namespace == "memfit" and op in SAMPLES and op not in _BESIDE_SHAPE]


@pytest.mark.parametrize("op", _TORCHS, ids=str)
def test_claims_of_a_rule(op: OpOverload, calls: Recorded) -> None:
    assert calls.get(op), "the op database does not reach it"
    _check_claims(op, calls[op])


@pytest.mark.parametrize("op", _OWN, ids=str)
def test_claims_of_the_rule_of_an_own_kernel(op: OpOverload) -> None:
    torch.manual_seed(0)
    _check_claims(op, [(SAMPLES[op](), {})])


def _check_claims(op: OpOverload, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    checked = sum(check(op, *laid) for given in calls for laid in laid_out(op, given))
    claims = (rule := rule_of(op)).batch or rule.tile or rule.chunks or rule.in_place or rule.shape_only or rule.fill
    claims = claims or rule.binding or rule.view
    assert checked or not claims, "no sample shows what the rule claims"


def test_ops_without_a_rule_run_whole_and_pointwise_ops_have_one() -> None:
    assert rule_of(_aten.roll.default) == OpRule() == rule_named("aten.roll.default")
    assert rule_of(_aten.exp.default) is pointwise.POINTWISE and rule_named("aten.relu.default").is_pointwise
    assert is_pointwise(Call(name="exp", target=_aten.exp.default, args=(), meta={}))
