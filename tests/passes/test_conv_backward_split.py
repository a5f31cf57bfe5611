"""Rewrites change no bit; in-place calls give what the functional ones give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import CaptureError
from memfit.ops.chunking import call_in_chunks
from memfit.ops.kernels.batch_norm import chunks_of, takes_channels
from memfit.ops.kernels.convolution import convolution_input_gradient, convolution_input_slices, make_metadata_only
from memfit.ops.registry import REGISTERED, rule_of
from memfit.profiling.benchmark import _check_metadata_only

_aten = torch.ops.aten


@pytest.mark.smoke
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("channels", "out", "size", "kernel", "stride", "padding", "groups"),
    [
        (8, 16, 14, 3, 1, 1, 1),
        (8, 16, 14, 1, 1, 0, 1),
        (3, 8, 31, 7, 2, 3, 1),
        (16, 16, 15, 3, 2, 1, 16),
        (8, 8, 9, 3, 1, 2, 2),
    ],
)
def test_split_convolution_backward(
    channels: int, out: int, size: int, kernel: int, stride: int, padding: int, groups: int, channels_last: bool
) -> None:
    x, weight = torch.randn(2, channels, size, size), torch.randn(out, channels // groups, kernel, kernel)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    y = torch.nn.functional.conv2d(x, weight, None, stride, padding, 1, groups)
    rest = ([0], [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    gradient = torch.randn_like(y)
    whole = _aten.convolution_backward.default(gradient, x, weight, *rest, [True, True, False])
    metadata_only = make_metadata_only(x)
    assert metadata_only.untyped_storage().nbytes() == 0
    half = convolution_input_gradient(gradient, metadata_only, weight, *rest)
    assert torch.equal(half, whole[0]) and half.stride() == whole[0].stride()
    assert torch.equal(
        _aten.convolution_backward.default(gradient, x, weight, *rest, [False, True, False])[1], whole[1]
    )


def test_a_half_with_other_bits_than_the_whole_is_refused_with_its_shapes() -> None:
    x, weight, rest = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3), ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    args = (torch.randn(2, 4, 6, 6), make_metadata_only(x), weight, *rest)
    graph = torch.fx.Graph()
    node = graph.call_function(convolution_input_gradient, ())
    node.meta["nn_module_stack"] = {"": ("L['self'].stem", torch.nn.Conv2d)}
    half = convolution_input_gradient(*args)
    _check_metadata_only(node, args, half)
    with pytest.raises(CaptureError, match=r"of stem, gradient \(2, 4, 6, 6\), weight \(4, 3, 3, 3\) of torch.float32"):
        _check_metadata_only(node, args, half + 1)


ARGUMENTS = {
    "masked_fill": (0.5,),
    "hardtanh": (),
    "threshold_backward": (0,),
    "hardtanh_backward": (-1.0, 1.0),
}


@pytest.mark.smoke
@pytest.mark.parametrize(
    "target",
    [t for t, rule in REGISTERED.items() if rule.in_place and t.namespace == "aten" and "norm" not in str(t)],
    ids=str,
)
def test_in_place_calls(target: torch._ops.OpOverload) -> None:
    names = [a.name for a in target._schema.arguments if not a.has_default_value() and not a.kwarg_only]
    tensors = [a.name for a in target._schema.arguments if "Tensor" in str(a.type) and a.name in names]
    values = [torch.randn(3, 5) for _ in tensors]
    if "masked_fill" in str(target):
        values[1] = values[1] > 0
    scalars = ARGUMENTS.get(target._opname, (2.0,) if len(names) > len(tensors) else ())
    expected = target(*values, *scalars)
    for position, call in rule_of(target).in_place.items():
        operands = [v.clone() for v in values]
        result = call(*operands, *scalars)
        assert torch.equal(result, expected)
        assert result.data_ptr() == operands[position].data_ptr()


@pytest.mark.smoke
@pytest.mark.parametrize("shape", [(4, 8, 14, 14), (2, 7, 5, 3), (16, 33), (2, 4, 5, 5, 5)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_norm_over_its_input(shape: tuple[int, ...], channels_last: bool) -> None:
    norm = _aten._native_batch_norm_legit_functional.default
    x, channels = torch.randn(shape), shape[1]
    if channels_last and len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    rest = (torch.randn(channels), torch.randn(channels), torch.randn(channels), torch.rand(channels), True, 0.1, 1e-5)
    expected = norm(x, *rest)
    over = x.clone()
    result = rule_of(norm).in_place[0](over, *rest)
    assert all(torch.equal(a, b) for a, b in zip(expected, result, strict=True))
    assert result[0].data_ptr() == over.data_ptr()


@pytest.mark.smoke
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "shape", [(4, 8, 14, 14), (3, 33, 7, 5), (16, 24, 28, 28), (2, 64, 3, 3), (2, 9, 40), (2, 8, 4, 5, 6)]
)
def test_batch_norm_backward_by_channels(shape: tuple[int, ...], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x, gradient, channels = torch.randn(shape), torch.randn(shape), shape[1]
    weight, mean, invstd = torch.randn(channels), torch.randn(channels), torch.rand(channels)
    rest = (weight, None, None, mean, invstd, True, 1e-5, [True, True, True])
    assert takes_channels((gradient, x, *rest), gradient, x)
    expected = _aten.native_batch_norm_backward.default(gradient, x, *rest)
    backward = _aten.native_batch_norm_backward.default
    chunks = call_in_chunks(backward)(gradient, x, *rest, chunks=chunks_of(x))
    over = gradient.clone()
    result = rule_of(backward).in_place[0](over, x, *rest, chunks=chunks_of(x))
    torch.set_num_threads(before)
    for found in (chunks, result):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert result[0].data_ptr() == over.data_ptr()
    assert not takes_channels((gradient, x, *rest), gradient, x.to(torch.bfloat16))


def test_slices_of_an_input_gradient_have_the_bits_of_the_whole() -> None:
    data, weight = torch.randn(4, 24, 9, 9), torch.randn(16, 24, 3, 3)
    rest = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    gradient, cuts = torch.randn(4, 16, 9, 9), ((0, 8), (8, 24))
    whole = convolution_input_gradient(gradient, data, weight, *rest)
    metadata_only = make_metadata_only(data)
    apart = convolution_input_slices(gradient, metadata_only, weight, *rest, cuts)
    in_chunks = call_in_chunks(convolution_input_slices)(gradient, metadata_only, weight, *rest, cuts, chunks=3)
    for (start, stop), one, other in zip(cuts, apart, in_chunks, strict=True):
        assert torch.equal(one, whole[:, start:stop]) and torch.equal(other, one)
        assert one.is_contiguous() and other.is_contiguous()


def test_numbers_in_place_have_the_bits_of_numbers_in_half_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        data = torch.randn(999).to(dtype)
        for op in (torch.ops.aten.mul.Scalar, torch.ops.aten.div.Scalar):
            for number in (1.1283791670955126, 0.7, 1 / 3):
                assert torch.equal(rule_of(op).in_place[0](data.clone(), number), op(data, number)), (op, number)


class _Polar(nn.Module):
    """The gradient of a complex product is a product with a conjugate, which is a view until it is read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mapped, self.kind = nn.Linear(6, 6), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = self.mapped(x).unflatten(-1, (-1, 2)).contiguous()
        if self.kind == "polar":
            return torch.view_as_real(torch.polar(pairs[..., 1].abs() + 0.1, pairs[..., 0])).flatten(-2)
        z = torch.view_as_complex(pairs)
        made = {
            "product": z.conj() * z.sin(),
            "sum": z.conj() + z.exp(),
            "negative": torch.complex(z.real, z.conj().imag),
        }
        return torch.view_as_real(made[self.kind] * 1.5).flatten(-2)


@pytest.mark.parametrize("kind", ["polar", "product", "sum", "negative"])
@pytest.mark.parametrize("middle", [False, True])
def test_nothing_is_written_over_a_conjugate(kind: str, middle: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Polar(kind), *([nn.Tanh(), _Polar(kind)] if middle else []))
    plain, x = copy.deepcopy(model), torch.randn(5, 6)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=lambda out: out.square().mean(), search_seconds=0.1)
    for each in (model, plain):
        each(x).square().mean().backward()
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
