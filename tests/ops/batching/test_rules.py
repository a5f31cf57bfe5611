"""Calls on samples of operands make the samples of what they make whole, whatever axes the batch is folded into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from memfit.capture.options import CaptureOptions
from memfit.capture.training_step import capture_step
from memfit.fxir.layout import looks_alike, results_of
from memfit.fxir.marks import METADATA_ONLY_PREFIX, is_view
from memfit.ir.slicing import BySlices
from memfit.ops.batching.sampling import sampling_of
from memfit.ops.batching.slices import ViewOfSlice, accumulates, samples_between, view_of_samples
from memfit.ops.kernels.convolution import convolution_input_slices, make_metadata_only
from memfit.ops.kernels.dropout import masked
from memfit.ops.registry import sums_of
from memfit.passes.dropout_split import split_dropout
from memfit.passes.fused_cross_entropy import rewrite_by_rows
from memfit.profiling.measurements import _measurement
from tests.ops.tiling.test_rules import call_on

_BATCH, _LENGTH, _WIDTH = 6, 5, 8


class FusedAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        made = functional.scaled_dot_product_attention(q, k, v, **self.options)
        return x + self.out(made.transpose(1, 2).flatten(2))


class WrittenAttention(FusedAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~mask, -1e30).softmax(-1)
        return x + self.out((scores @ v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A block as Llama's: root-mean-square normalisation, rotated halves, a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(_WIDTH)
        self.up, self.gate, self.down = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        halves = torch.cat((-y[..., _WIDTH // 2 :], y[..., : _WIDTH // 2]), -1)
        y = y * angle.cos() + halves * angle.sin()
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.mish(self.norm(self.conv(x)))
        y = functional.interpolate(functional.avg_pool2d(y, 2), scale_factor=2, mode="bilinear")
        return self.head(y.mean((2, 3)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, _WIDTH), nn.Parameter(torch.randn(1, _LENGTH, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens((x[..., 0] > 0).long()) + self.places
        return (y[:, 1:] - y[:, :-1]).log_softmax(-1).amax(-1)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "fused attention": (lambda: FusedAttention(is_causal=True), (_BATCH, _LENGTH, _WIDTH), set()),
    "masked attention": (
        lambda: FusedAttention(attn_mask=torch.randn(_LENGTH, _LENGTH, dtype=torch.float64)),
        (_BATCH, _LENGTH, _WIDTH),
        set(),
    ),
    "written attention": (lambda: WrittenAttention(), (_BATCH, _LENGTH, _WIDTH), set()),
    "gated": (Gated, (_BATCH, _LENGTH, _WIDTH), set()),
    "images": (Images, (_BATCH, 4, 6, 6), {"avg_pool2d_backward", "convolution_backward"}),
    "words": (Words, (_BATCH, _LENGTH, _WIDTH), {"embedding_dense_backward"}),
    "tokens of one sample": (Gated, (1, _BATCH, _WIDTH), set()),
}
"""A module, the shape of its input, and what runs whole although it takes samples, before it is rewritten say."""


def traced(module: nn.Module, x: torch.Tensor) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Forward and backward pass as aten calls, and what they take."""
    names, parameters = zip(*module.named_parameters(), strict=True)

    def step(x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        made = torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))
        ones = torch.ones(made.shape, dtype=made.dtype)
        return torch.autograd.grad(made, [x, *parameters], ones, allow_unused=True)

    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x, *parameters)
    rewrite_by_rows(graph)
    return graph, [x, *parameters]


def check(node: fx.Node, values: dict[fx.Node, Any], batch: int, samples: int) -> None:
    """Every slice of every result, and every sum."""
    sampling = sampling_of(node, batch)
    assert sampling is not None
    whole = values[node] if isinstance(values[node], tuple | list) else (values[node],)
    totals = {place: torch.zeros_like(whole[place]) for place in sums_of(node) if whole[place] is not None}
    for start in range(0, batch, samples):
        stop = min(start + samples, batch)

        def operand(n: fx.Node, start: int = start, stop: int = stop) -> Any:
            axis = sampling.operands.get(n)
            return values[n] if axis is None else samples_between(values[n], axis, batch, start, stop)

        named = {"total": torch.zeros_like(whole[0])} if accumulates(node) else fx.map_arg(node.kwargs, operand)
        made = sampling.run(*fx.map_arg(node.args, operand), **named)
        for place, part in enumerate(made if isinstance(made, tuple | list) else (made,)):
            axis = sampling.axes[place]
            if part is not None and place in totals:
                totals[place] += part
            elif part is not None and axis is not None:
                expected = samples_between(whole[place], axis, batch, start, stop)
                torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)
    for place, total in totals.items():
        torch.testing.assert_close(total, whole[place], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_slices_of_every_call_are_those_of_the_whole(name: str) -> None:
    torch.manual_seed(0)
    module, shape, whole = CASES[name]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    graph, inputs = traced(module().to(torch.float64), x)
    values: dict[fx.Node, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    Recorder(graph).run(*inputs)
    alone: set[str] = set()
    for node in graph.graph.nodes:
        views = node.op != "call_function" or is_view(node) or isinstance(node.meta["val"], list)
        if views or not any(map(is_of_samples, node.all_input_nodes)):
            continue
        if sampling_of(node, _BATCH) is None:
            alone.add(getattr(node.target, "_opname", str(node.target)))
            continue
        for samples in (1, 2, 4):
            check(node, values, _BATCH, samples)
    assert alone == whole


def is_of_samples(node: fx.Node) -> bool:
    found = [t for t in results_of(node) if isinstance(t, torch.Tensor)]
    return any(_BATCH in t.shape or _BATCH * _LENGTH in t.shape for t in found)


def call_of(run: Callable[[torch.Tensor], Any], shape: tuple[int, ...]) -> fx.Node:
    """The last call that is no view."""
    nodes = make_fx(run)(torch.randn(shape)).graph.nodes
    found = [n for n in nodes if n.op == "call_function" and n.target is not torch.ops.aten.detach.default]
    return cast(fx.Node, found[-1])


COUPLED: dict[str, Callable[[torch.Tensor], Any]] = {
    "softmax": lambda x: x.softmax(0),
    "running sum": lambda x: x.cumsum(0),
    "mean": lambda x: x.mean(0),
    "maximum": lambda x: x.amax(0),
    "concatenation": lambda x: torch.cat((x, x)),
    "sorting": lambda x: x.sort(0),
    "normalisation of all": lambda x: functional.layer_norm(x, x.shape),
    "statistics": lambda x: functional.batch_norm(x, None, None, training=True),
    "reversal": lambda x: x.flip(0),
    "padding": lambda x: functional.pad(x, (0, 0, 1, 1)),
}


@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_samples_runs_whole(name: str) -> None:
    assert sampling_of(call_of(COUPLED[name], (6, 6)), 6) is None


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Memory with samples outermost, a view of it, its axis of samples, and how many there are."""
    batch, rows = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    inner = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    base = torch.arange(float(batch * rows * torch.Size(inner).numel())).view(batch * rows, *inner)
    view = base.unflatten(0, (batch, rows)) if draw(st.booleans()) else base
    for axis in range(1, view.dim()):
        start = draw(st.integers(0, view.shape[axis] - 1))
        view = view.narrow(axis, start, draw(st.integers(1, view.shape[axis] - start)))
    order = draw(st.permutations(range(view.dim())))
    return base, view.permute(order), order.index(0), batch


@given(views(), st.data())
def test_the_view_of_a_slice_is_the_slice_of_the_view(
    case: tuple[torch.Tensor, torch.Tensor, int, int], data: st.DataObject
) -> None:
    base, value, axis, batch = case
    found = ViewOfSlice.of(base, value, batch, axis)
    if found is None:  # what does not reach as far as the next sample has none that is known
        assert value.shape[axis] % batch or value.stride(axis) * (value.shape[axis] // batch) != base.numel() // batch
        return
    start = data.draw(st.integers(0, batch - 1))
    stop = data.draw(st.integers(start + 1, batch))
    part = samples_between(base, 0, batch, start, stop)
    otherwise = part.transpose(0, -1).contiguous().transpose(0, -1)  # as a kernel may lay out a few samples
    expected = samples_between(value, axis, batch, start, stop)
    for made in (part.clone(), part, otherwise):
        assert torch.equal(view_of_samples(found, batch)(made), expected)


def test_views_that_mix_samples_are_none_of_slices() -> None:
    base = torch.zeros(4, 6)
    assert ViewOfSlice.of(base, base.t(), 4, 0) is None
    assert ViewOfSlice.of(base, base.view(8, 3)[1:], 4, 0) is None
    assert ViewOfSlice.of(base, base.view(2, 2, 6), 4, 0) is None
    assert ViewOfSlice.of(base, base.view(torch.int32), 4, 0) is None


@pytest.mark.parametrize(
    ("target", "operands", "settings"),
    [
        (torch.ops.aten.nll_loss_forward.default, {"x": torch.randn(6), "y": torch.tensor(3)}, (None, 2, -100)),
        (torch.ops.aten.sum.dim_IntList, {"x": torch.randn(())}, ([0],)),
        (
            torch.ops.aten.native_group_norm_backward.default,
            {
                n: torch.randn(s)
                for n, s in (("g", (6, 4, 9)), ("x", (6, 4, 9)), ("m", (6, 2)), ("r", (6, 2)), ("w", (4,)))
            },
            (6, 4, 9, 2, [False, True, True]),
        ),
    ],
    ids=["loss of one sample", "sum of a number", "normalisation of an input"],
)
def test_what_has_no_samples_runs_whole(target: Any, operands: dict[str, torch.Tensor], settings: Any) -> None:
    call, _ = call_on(target, operands, *settings)
    assert sampling_of(call, 6) is None


def test_what_is_added_to_products_may_be_the_same_for_all() -> None:
    values = {"bias": torch.randn(6, 5), "a": torch.randn(6, 6, 3), "b": torch.randn(6, 3, 5)}
    call, of = call_on(torch.ops.aten.baddbmm.default, values)
    sampling = sampling_of(call, 6)
    assert sampling is not None and [n.name for n in sampling.operands] == ["a", "b"]
    apart, _ = call_on(torch.ops.aten.baddbmm.default, {**values, "bias": torch.randn(6, 6, 5)})
    found = sampling_of(apart, 6)
    assert found is not None and {n.name for n in found.operands} == {"a", "b", "bias"} and len(of) == 3


def test_what_is_conjugated_when_it_is_read_is_no_slice() -> None:
    base = torch.randn(4, 6, dtype=torch.complex64)
    assert ViewOfSlice.of(base, base, 4, 0) is not None
    assert ViewOfSlice.of(base, base.conj(), 4, 0) is None
    assert ViewOfSlice.of(base, base.conj().view(4, 3, 2), 4, 0) is None
    assert looks_alike(base, base.view(4, 6)) and not looks_alike(base, base.conj())


def test_dropout_of_data_laid_out_otherwise_stays_whole() -> None:
    """Its kernel draws in the order of memory."""

    def dropped(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.native_dropout.default(x, 0.5, True)[0] * 2

    for x, parts in ((torch.randn(2, 3, 4, 4), 1), (torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), 0)):
        graph = make_fx(dropped, tracing_mode="fake")(x)
        split_dropout(graph)
        assert len(graph.graph.find_nodes(op="call_function", target=masked)) == parts


def test_dropout_in_two_has_the_bits_of_dropout() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        data = torch.randn(7, 333).to(dtype)
        torch.manual_seed(3)
        kept, mask = torch.ops.aten.native_dropout.default(data, 0.3, True)
        torch.manual_seed(3)
        drawn = torch.ops.aten.bernoulli.p(torch.empty(7, 333, dtype=torch.bool), 1 - 0.3)
        assert torch.equal(drawn, mask) and torch.equal(masked(data, drawn, 1 / (1 - 0.3)), kept)


def test_what_rounds_more_than_once_runs_whole_where_bits_count() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3))
    capture = capture_step(model, (torch.randn(4, 3, 12, 12),), {}, loss_fn=torch.sum)
    found = {str(op.node.target): op.by_slices for op in capture.joint_ops if op is not None and op.phase == "forward"}
    assert found["aten.convolution.default"] is not None
    assert found["aten.gelu.default"] is found["aten.silu.default"] is None


def test_slices_of_channels_are_made_of_samples() -> None:
    data, weight = (torch.randn(shape, dtype=torch.float64) for shape in ((_BATCH, 4, 7, 5), (6, 4, 3, 3)))
    gradient = torch.randn(_BATCH, 6, 7, 5, dtype=torch.float64)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, ((0, 1), (1, 4)))
    operands = {"gradient": gradient, f"{METADATA_ONLY_PREFIX}0": make_metadata_only(data), "weight": weight}
    call, values = call_on(convolution_input_slices, operands, [6], *rest)
    sampling = sampling_of(call, _BATCH)
    assert sampling is not None and sampling.axes == (0, 0)
    for samples in ((0, 4), (4, 6)):
        given = {n: samples_between(v, 0, _BATCH, *samples) if n in sampling.operands else v for n, v in values.items()}
        made = sampling.run(*fx.map_arg(call.args, given.__getitem__))
        for part, whole in zip(made, call.meta["val"], strict=True):
            torch.testing.assert_close(part, samples_between(whole, 0, _BATCH, *samples))


class Pairs(nn.Module):
    """Two classes, and a weight whose gradient has two rows; its samples are six."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 64, 3), nn.Conv2d(64, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = functional.conv2d(self.first(x).relu(), self.last.weight * 2)
        return functional.conv2d(self.first(x).relu(), self.last.weight * 2) + scaled


def test_a_batch_is_of_samples_whatever_else_is_even() -> None:
    capture = capture_step(
        Pairs(), (torch.randn(6, 3, 16, 16),), {}, loss_fn=lambda y: y.sum(), options=CaptureOptions(grid=(1, 1))
    )
    activations = [op.by_slices for op in capture.graph.ops if op.target == "aten.relu.default"]
    assert activations and all(slices is not None and slices.batch == 6 for slices in activations)


def test_costs_of_slices_are_known_by_how_many_there_are() -> None:
    call, _ = call_on(torch.ops.aten.mm.default, {"a": torch.randn(64, 4), "b": torch.randn(4, 4)})
    cuts = [BySlices(batch=n, samples=2, seconds=0.0, workspace_bytes=0, reads=(), first=True) for n in (16, 32)]
    keys = {_measurement(call, cut, None, torch.device("cpu")).keys[1] for cut in cuts}
    assert len(keys) == 2
