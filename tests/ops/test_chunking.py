"""Ops in chunks have the bits of the whole and take less memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import fx, nn

from memfit.ops.chunking import call_in_chunks, candidate_chunks
from memfit.ops.kernels.convolution import convolution_input_gradient, make_metadata_only
from memfit.ops.op_rule import Chunks
from memfit.ops.registry import REGISTERED, rule_of
from memfit.profiling.benchmark import variants_of

_aten = torch.ops.aten
_CPU = torch.device("cpu")

CONVOLUTIONS = {
    "plain": (nn.Conv2d(32, 48, 3, padding=1), (6, 32, 14, 14)),
    "strided": (nn.Conv2d(64, 32, 1, stride=2), (5, 64, 15, 15)),
    "grouped": (nn.Conv2d(32, 64, 3, groups=8), (4, 32, 12, 12)),
    "depthwise": (nn.Conv2d(40, 40, 3, padding=1, groups=40), (4, 40, 12, 12)),
    "dilated": (nn.Conv2d(16, 33, 3, dilation=2), (48, 16, 13, 11)),
    "transposed": (nn.ConvTranspose2d(32, 48, 2, stride=2), (4, 32, 9, 9)),
    "transposed grouped": (nn.ConvTranspose2d(32, 64, 3, stride=2, groups=4), (4, 32, 9, 9)),
    "one-dimensional": (nn.Conv1d(32, 48, 5), (6, 32, 50)),
    "three-dimensional": (nn.Conv3d(16, 32, 3), (3, 16, 6, 7, 8)),
}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def arguments(layer: nn.Module) -> tuple[object, ...]:
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return tuple(list(v) if isinstance(v := getattr(layer, n), tuple) else v for n in names)


@pytest.mark.parametrize("chunks", [2, 3, 5, 16])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, chunks: int) -> None:
    torch.manual_seed(0)
    layer, shape = CONVOLUTIONS[name]
    weight, bias, rest = layer.weight.detach(), layer.bias.detach(), arguments(layer)
    data = torch.randn(shape)
    whole = _aten.convolution.default(data, weight, bias, *rest)
    # Small parts may take another kernel, with other bits, which the profiler finds out; values must be right.
    close(call_in_chunks(_aten.convolution.default)(data, weight, bias, *rest, chunks=chunks), whole)

    gradient = torch.randn_like(whole)
    of_data, of_weight, of_bias = _aten.convolution_backward.default(
        gradient, data, weight, [len(bias)], *rest, [True, True, True]
    )
    if data.dim() >= 4:  # others are not split
        split = call_in_chunks(convolution_input_gradient)
        close(split(gradient, make_metadata_only(data), weight, [len(bias)], *rest, chunks=chunks), of_data)
    nothing, weights, biases = call_in_chunks(_aten.convolution_backward.default)(
        gradient, data, weight, [len(bias)], *rest, [False, True, True], chunks=chunks
    )
    assert nothing is None
    close(weights, of_weight)
    close(biases, of_bias)


def backward_node(data: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> fx.Node:
    graph = fx.Graph()
    operands = []
    for value in (gradient, data, weight):
        operands.append(graph.placeholder(f"operand{len(operands)}"))
        operands[-1].meta["val"] = value
    rest = ([0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
    return graph.call_function(_aten.convolution_backward.default, (*operands, *rest))


def large_node() -> fx.Node:
    """The weight's gradient of a 3 x 3 convolution whose result takes 17 MiB."""
    return backward_node(torch.empty(8, 96, 48, 48), torch.empty(8, 256, 46, 46), torch.empty(256, 96, 3, 3))


def test_large_weight_gradients_are_offered_in_chunks_that_take_less() -> None:
    node = large_node()
    assert candidate_chunks(node) == (3, 4, 8)
    whole, *in_chunks = variants_of(node, _CPU)
    assert whole.chunks == 1 and in_chunks
    for variant in in_chunks:
        assert variant.workspace_bytes < whole.workspace_bytes


def test_what_cannot_run_in_chunks_runs_whole() -> None:
    small = backward_node(torch.empty(2, 32, 8, 8), torch.empty(2, 32, 8, 8), torch.empty(32, 32, 1, 1))
    assert candidate_chunks(small) == ()
    assert [variant.chunks for variant in variants_of(small, _CPU)] == [1]
    last = (torch.empty(8, n, 80, 80).contiguous(memory_format=torch.channels_last) for n in (64, 256))
    assert candidate_chunks(backward_node(*last, torch.empty(256, 64, 1, 1))) == ()


def test_parts_with_other_bits_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    node, op = large_node(), _aten.convolution_backward.default
    rule = rule_of(op)
    right = rule.chunks
    assert right is not None

    def wrong(*args: object, **kwargs: object) -> object:
        nothing, of_weight, of_bias = right.call(*args, **kwargs)
        return nothing, of_weight.nextafter(of_weight + 1), of_bias

    monkeypatch.setitem(cast(Any, REGISTERED), op, replace(rule, chunks=Chunks(wrong, right.candidates)))
    assert [variant.chunks for variant in variants_of(node, _CPU)] == [1]
