"""Calls on tiles of their operands make the tiles of what they make whole, whatever the window and the grid."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx
from torch.utils import _pytree as pytree

from memfit.fxir.call import Call
from memfit.fxir.marks import METADATA_ONLY_PREFIX
from memfit.ops.kernels.batch_norm import normalise
from memfit.ops.kernels.convolution import convolution_input_slices, input_gradient_beside_stand_in, make_metadata_only
from memfit.ops.registry import sums_of
from memfit.ops.tiling.tiled import reaches_of, tiling_of
from memfit.ops.tiling.window import bands_of, narrowed, tiles_of

_aten = torch.ops.aten
_GRIDS = st.sampled_from([(2,), (3,), (1, 3), (2, 2), (3, 5)])


def node(graph: fx.Graph, name: str, value: torch.Tensor) -> fx.Node:
    made = graph.placeholder(name)
    made.target = name
    made.meta["val"] = value
    return made


def call_on(target: Any, operands: dict[str, torch.Tensor], *settings: Any) -> tuple[Call, dict[fx.Node, torch.Tensor]]:
    """A call of operands, then settings; a setting that is the name of an operand stands for it."""
    graph = fx.Graph()
    nodes = {name: node(graph, name, value) for name, value in operands.items()}
    named = {s for s in settings if isinstance(s, str)}
    first = [n for name, n in nodes.items() if name not in named]
    args = (*first, *(nodes[s] if isinstance(s, str) else s for s in settings))
    values = {nodes[name]: value for name, value in operands.items()}
    whole = target(*(values[a] if isinstance(a, fx.Node) else a for a in args))
    whole = pytree.tree_map_only(torch.Tensor, torch.clone, whole)  # some kernels give slices of what they work in
    return Call(name="c", target=target, args=args, meta={"val": whole}), values


def check(call: Call, values: dict[fx.Node, torch.Tensor], grid: tuple[int, ...], *, tolerance: float = 1e-10) -> None:
    """Every tile of every result, and every sum."""
    tiling = tiling_of(call, len(grid))
    assert tiling is not None
    if any(extent < tiles for extent, tiles in zip(tiling.extents, grid, strict=True)):
        return  # some tiles would be empty
    results = call.meta["val"] if isinstance(call.meta["val"], tuple | list) else (call.meta["val"],)
    sums = {p: torch.zeros_like(results[p]) for p in sums_of(call) if results[p] is not None}
    for tile in tiles_of(tiling.extents, grid):
        needs = dict(zip(tiling.operands, tiling.needs(tile), strict=True))

        def operand(a: fx.Node, needs: dict[fx.Node, Any] = needs) -> torch.Tensor:
            return narrowed(values[a], needs[a]) if a in needs else values[a]

        made = tiling.run(*fx.map_arg(call.args, operand), tile=tile)
        for place, part in enumerate(made if isinstance(made, tuple | list) else (made,)):
            if part is not None and place in sums:
                sums[place] += part
            elif part is not None:
                torch.testing.assert_close(part, narrowed(results[place], tile), rtol=tolerance, atol=tolerance)
    for place, total in sums.items():
        torch.testing.assert_close(total, results[place], rtol=tolerance, atol=tolerance)
    for place in range(len(tiling.operands)):
        assert len(reaches_of(tiling, place)) == len(grid)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Data, weight, and the settings from stride to groups."""
    torch.manual_seed(0)
    groups = draw(st.sampled_from([1, 2]))
    size, stride, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    padding = draw(st.integers(0, 4))
    transposed = draw(st.booleans())
    more = draw(st.integers(0, stride - 1)) if transposed else 0
    data = torch.randn(2, 4, draw(st.integers(9, 17)), 11, dtype=torch.float64)
    weight = torch.randn(4, 4 // groups, size, 3, dtype=torch.float64)
    settings = ([stride, 2], [padding, 1], [dilation, 1], transposed, [more, min(more, 1)], groups)
    reach = dilation * (size - 1)
    rows = (9 - 1) * stride - 2 * padding + reach + 1 if transposed else 9 + 2 * padding - reach
    assume(rows >= 3 * stride)
    return data, weight, settings


@given(convolutions(), _GRIDS, st.booleans())
@settings(max_examples=80)
def test_convolutions_and_their_gradients(case: tuple[Any, ...], grid: tuple[int, ...], with_bias: bool) -> None:
    data, weight, rest = case
    stride, padding, dilation, transposed, _, groups = rest
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    bias = torch.randn(channels, dtype=torch.float64)
    call, values = call_on(_aten.convolution.default, {"data": data, "weight": weight, "bias": bias}, *rest)
    check(call, values, grid)
    gradient = torch.randn_like(call.meta["val"])
    operands = {"gradient": gradient, f"{METADATA_ONLY_PREFIX}0": make_metadata_only(data), "weight": weight}
    check(*call_on(input_gradient_beside_stand_in, operands, [channels], *rest), grid)
    check(*call_on(convolution_input_slices, operands, [channels], *rest, ((1, 4), (0, 1))), grid)
    mask = [False, True, with_bias]
    sums, values = call_on(
        _aten.convolution_backward.default,
        {"gradient": gradient, "data": data, "weight": weight},
        *([channels], *rest, mask),
    )
    more = rest[4][0]
    windows_overlap = (weight.shape[2] - 1) * dilation[0] + 1 != stride[0] or padding[0] or more or len(grid) > 1
    if transposed and with_bias and windows_overlap:
        return  # for the bias what two windows cover would count twice
    check(sums, values, grid)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2), st.booleans(), _GRIDS, st.booleans())
@settings(max_examples=60)
def test_pooling(
    size: int, stride: int, padding: int, dilation: int, ceil: bool, grid: tuple[int, ...], flat: bool
) -> None:
    assume(2 * padding <= size)
    torch.manual_seed(0)
    data = torch.randn(2, 3, 13, 17, dtype=torch.float64)
    data = torch.full_like(data, -math.inf) if flat else data
    rest = ([size, 3], [stride, 2], [padding, 1], [dilation, 1], ceil)
    if not flat:
        call, values = call_on(_aten.max_pool2d_with_indices.default, {"data": data}, *rest)
        check(call, values, grid)
        most, places = call.meta["val"]
        gradient = torch.randn_like(most)
        operands = {"gradient": gradient, f"{METADATA_ONLY_PREFIX}0": make_metadata_only(data), "places": places}
        check(*call_on(_aten.max_pool2d_with_indices_backward.default, operands, *rest, "places"), grid)
    else:  # whatever place is told, it is one there is
        call, values = call_on(_aten.max_pool2d_with_indices.default, {"data": data}, *rest)
        tiling = tiling_of(call, len(grid))
        assert tiling is not None
        for tile in tiles_of(tiling.extents, grid):
            (need,) = tiling.needs(tile)
            _, places = tiling.run(narrowed(data, need), *rest, tile=tile)
            assert int(places.min()) >= 0 and int(places.max()) < 13 * 17
    if not ceil and not flat:
        average = ([size, 3], [stride, 2], [padding, 1], False, True, None)
        call, values = call_on(_aten.avg_pool2d.default, {"data": data}, *average)
        check(call, values, grid)
        operands = {
            "gradient": torch.randn_like(call.meta["val"]),
            f"{METADATA_ONLY_PREFIX}0": make_metadata_only(data),
        }
        check(*call_on(_aten.avg_pool2d_backward.default, operands, *average), grid)


@pytest.mark.parametrize("grid", [(2,), (3, 5)])
def test_what_is_pointwise_takes_the_same_tile(grid: tuple[int, ...]) -> None:
    a, b = (torch.randn(2, 3, 11, 13, dtype=torch.float64) for _ in range(2))
    per_channel = torch.rand(3, dtype=torch.float64)
    check(*call_on(_aten.add.Tensor, {"a": a, "b": b}), grid)
    check(*call_on(_aten.mul.Tensor, {"a": a, "b": per_channel.view(1, 3, 1, 1)}), grid)
    check(*call_on(_aten.threshold_backward.default, {"a": a, "b": b}, 0), grid)
    check(*call_on(normalise, {"a": a, "m": per_channel, "i": per_channel, "w": per_channel, "c": per_channel}), grid)


@given(st.integers(1, 3), st.integers(2, 4), st.sampled_from(["nearest2d", "bilinear2d"]), _GRIDS)
@settings(max_examples=40)
def test_resizing_by_whole_factors(rows: int, columns: int, way: str, grid: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    data, sizes = torch.randn(2, 3, 7, 11, dtype=torch.float64), [7 * rows, 11 * columns]
    rest = [False] if way == "bilinear2d" else []
    check(*call_on(getattr(_aten, f"upsample_{way}").default, {"data": data}, sizes, *rest), grid)
    given = [*rest, float(rows), float(columns)]
    check(*call_on(getattr(_aten, f"upsample_{way}").default, {"data": data}, sizes, *given), grid)
    back, gradient = getattr(_aten, f"upsample_{way}_backward").default, torch.randn(2, 3, *sizes, dtype=torch.float64)
    check(*call_on(back, {"gradient": gradient}, sizes, list(data.shape), *rest), grid)


@pytest.mark.parametrize("settings", [([15, 22], False), ([14, 22], True), ([14, 22], False, 2.1, 2.0)])
def test_resizing_by_fractions_or_with_aligned_corners_has_no_tiles(settings: tuple[Any, ...]) -> None:
    call, _ = call_on(_aten.upsample_bilinear2d.default, {"data": torch.randn(2, 3, 7, 11)}, *settings)
    assert tiling_of(call, 2) is None


def test_what_looks_at_all_of_an_image_has_no_tiles() -> None:
    a = torch.randn(2, 3, 11, 13)
    rows = torch.randn(11, 1)
    assert tiling_of(call_on(_aten.add.Tensor, {"a": a, "b": rows})[0], 1) is None
    assert tiling_of(call_on(_aten.mean.dim, {"a": a}, [2, 3])[0], 1) is None
    assert tiling_of(call_on(_aten.native_group_norm.default, {"a": a}, None, None, 2, 3, 143, 1, 1e-5)[0], 2) is None


def test_bands_share_nothing_and_leave_nothing_out() -> None:
    assert bands_of(7, 3) == [(0, 2), (2, 4), (4, 7)]
    tiles = tiles_of((7, 4), (3, 2))
    assert sum((b - a) * (d - c) for (a, b), (c, d) in tiles) == 28
