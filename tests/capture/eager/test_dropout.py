"""Dropout in captured graphs: eager's formula, random stream and layouts, with a mask of a byte an element."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import memfit
from memfit.capture.eager.dropout import drawn
from memfit.capture.eager.no_decomposition import as_in_eager
from memfit.capture.training_step import capture_step
from memfit.ops.kernels.dropout import kept_scale, masked, masked_over_data


class Dropped(nn.Module):
    """A linear layer, and something of its output."""

    def __init__(self, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(16, 16), of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(self.linear(x))


class Attention(nn.Module):
    """Attention with dropout, with or without its weights."""

    def __init__(self, *, weights: bool) -> None:
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(16, 2, dropout=0.15, batch_first=True), weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=self.weights)[0]


def _every_p(y: torch.Tensor) -> torch.Tensor:
    for p in (0.0, 0.04, 0.1, 0.15, 0.45, 0.71):
        y = F.dropout(y, p) + 1
    return torch.stack([y, F.dropout(y, 1.0), F.dropout(y, 0.3, training=False)])


def _heads(y: torch.Tensor) -> torch.Tensor:
    heads = y.unflatten(-1, (4, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.15).transpose(1, 2).flatten(2)


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every p": _every_p,
    "transposed": lambda y: F.dropout(y.transpose(1, 2), 0.15).sin().transpose(1, 2),
    "channels last": lambda y: F.dropout(y.unflatten(-1, (4, 4)).permute(0, 3, 1, 2), 0.45).flatten(1).cos(),
    "alpha, transposed": lambda y: F.alpha_dropout(y.transpose(1, 2), 0.15, training=True).sin(),
    "channels": lambda y: F.dropout1d(y, 0.15) + F.feature_alpha_dropout(y, 0.45, training=True),
    "in place": lambda y: F.dropout((y * 2).transpose(1, 2), 0.15, inplace=True).sin(),
    "drawn by hand": lambda y: y * torch.empty_like(y.transpose(1, 2)).bernoulli_(0.3).transpose(1, 2),
    "noise read twice": lambda y: (lambda noise: y * noise + noise)(torch.empty_like(y).bernoulli_(0.3).div_(0.3)),
    "attention": _heads,
}


class AllOf(nn.Module):
    """Each kind one after the other, with a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ModuleDict({name: Dropped(kind) for name, kind in KINDS.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([dropped(x).flatten() for dropped in self.of.values()])


def _gradients(model: nn.Module, x: torch.Tensor, loss_fn: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    output = model(x)
    loss = loss_fn(output)
    loss.backward()
    return [output.detach(), loss.detach(), torch.rand(1), *(p.grad for p in model.parameters() if p.grad is not None)]


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_captured_step_drops_as_eager_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AllOf().to(dtype)
    plain, x = copy.deepcopy(model), torch.randn(3, 8, 16).to(dtype)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=_loss, search_seconds=0.1)
    wanted = _gradients(plain, x, _loss)
    assert all(torch.equal(a, b) for a, b in zip(wanted, _gradients(model, x, _loss), strict=True))


@pytest.mark.parametrize("weights", [True, False])
def test_attention_drops_as_eager_does_under_autocast_too(weights: bool) -> None:
    torch.manual_seed(0)
    model = Attention(weights=weights)
    plain, x = copy.deepcopy(model), torch.randn(3, 8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        memfit.fit(model, (x,), budget="1GiB", loss_fn=_loss)
        wanted = _gradients(plain, x, _loss)
        assert all(torch.equal(a, b) for a, b in zip(wanted, _gradients(model, x, _loss), strict=True))


def test_dropout_runs_again_with_its_numbers() -> None:
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.15))]
    model = nn.Sequential(*layers)
    plain, x = copy.deepcopy(model), torch.randn(256, 16)
    with pytest.raises(memfit.BudgetError) as refused:
        memfit.fit(model, (x,), budget=100, loss_fn=_loss, search_seconds=0.1)
    least = refused.value.least_bytes
    assert least is not None
    fitted = memfit.fit(model, (x,), budget=int(least * 1.02), loss_fn=_loss, search_seconds=0.1)
    wanted = _gradients(plain, x, _loss)
    assert all(torch.equal(a, b) for a, b in zip(wanted, _gradients(fitted, x, _loss), strict=True))


def test_a_mask_takes_a_byte_an_element_where_eager_keeps_noise() -> None:
    x = torch.randn(32, 16)
    capture = capture_step(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.15)), (x,), {}, loss_fn=_loss)
    (reading,) = [subgraph.reading for subgraph in capture.subgraphs.subgraphs]
    (mask,) = [s for s in reading.storages if s.base.target is drawn]
    assert mask.nbytes == 32 * 16
    assert sum(op.node.target is masked for op in reading.ops) == 2
    assert capture.graph.baseline is not None
    (dropout,) = [op for op in capture.graph.baseline.ops if op.target == "eager_dropout"]
    noise = capture.graph.baseline.storages[dropout.writes[1]]
    assert noise.nbytes == 32 * 16 * 4
    assert any(noise is capture.graph.baseline.storages[s] for op in capture.graph.baseline.ops for s in op.reads)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.floats(0.001, 0.999),
    st.permutations([0, 1, 2, 3]),
    st.integers(0, 9),
)
def test_a_mask_of_bytes_has_the_bits_of_noise(dtype: torch.dtype, p: float, order: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(3, 4, 5, 7).to(dtype).permute(order)
    x[0, 0, 0, 0], x[-1, -1, -1, -1] = float("inf"), -0.0
    x.requires_grad_()
    gradient = torch.randn(x.shape).to(dtype)
    torch.manual_seed(seed)
    kept = F.dropout(x, p)
    (wanted,) = torch.autograd.grad(kept, x, gradient)
    scale = kept_scale(1 - p, torch.empty((), dtype=dtype))
    assert scale is not None
    torch.manual_seed(seed)
    mask = drawn(torch.empty_like(x, dtype=torch.bool), 1 - p)
    ours = masked(x.detach(), mask, scale)
    assert ours.stride() == kept.stride()
    assert torch.equal(ours.nan_to_num(3.0), kept.detach().nan_to_num(3.0))
    assert torch.equal(masked(gradient, mask, scale), wanted)
    assert torch.equal(masked_over_data(gradient.clone(), mask, scale), wanted)


def test_noise_without_a_finite_value_stays_noise() -> None:
    half = torch.empty((), dtype=torch.float16)
    assert kept_scale(1e-6, half) is None and kept_scale(0.5, half) == 2.0


def test_a_gpu_keeps_its_kernel_for_dropout() -> None:
    with FakeTensorMode(), as_in_eager(), enable_python_dispatcher():
        graph = make_fx(lambda x: F.dropout(x, 0.3))(torch.empty(4, 4, device="cuda"))
    targets = [node.target for node in graph.graph.nodes if "dropout" in str(node.target)]
    assert targets == [torch.ops.aten.native_dropout.default]


def test_afterwards_the_ops_are_as_before() -> None:
    ops = (torch.ops.aten.dropout.default, torch.ops.aten.bernoulli_.float)
    before = [dict(op.py_kernels) for op in ops]
    with as_in_eager():
        assert [dict(op.py_kernels) for op in ops] != before
    assert [dict(op.py_kernels) for op in ops] == before


UNREAD: dict[str, Callable[[torch.Tensor], object]] = {
    "dropout": lambda hidden: F.dropout(hidden.softmax(-1), 0.3).view(-1).exp(),
    "in place": lambda hidden: torch.empty_like(hidden).normal_(),
    "channels": lambda hidden: F.dropout1d(hidden[None], 0.3),
    "other shape": lambda hidden: torch.randint(0, 5, (7,), device=hidden.device),
}


class Unread(nn.Module):
    """Draws whose results nobody reads, as in the last layer of a model with two streams; of each kind one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in UNREAD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, draw in zip(self.layers, UNREAD.values(), strict=True):
            hidden = torch.relu(layer(x))
            draw(hidden)
            x = x + F.dropout(hidden, 0.3)
        return x


@pytest.mark.smoke
def test_draws_that_nobody_reads_take_their_numbers() -> None:
    """`fit` proves one step; recomputed draws and the steps after it are compared here."""
    torch.manual_seed(0)
    plain, x = Unread(), torch.randn(64, 16)
    fitted = copy.deepcopy(plain)

    def loss_of(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    with pytest.raises(memfit.BudgetError) as least:
        memfit.fit(fitted, (x,), budget=1, loss_fn=loss_of, search_seconds=0.1)
    memfit.fit(fitted, (x,), budget=least.value.least_bytes, loss_fn=loss_of, search_seconds=0.1)
    for step in range(2):
        for model in (plain, fitted):
            torch.manual_seed(step)
            model.zero_grad()
            loss_of(model(x)).backward()
        for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
