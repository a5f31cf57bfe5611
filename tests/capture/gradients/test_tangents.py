"""Gradients of outputs are planned in the layout that the loss makes them in."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.bits import same_bits
from memfit.capture.gradients.tangents import strides_without_overlap
from memfit.capture.training_step import capture_step
from memfit.compiler.request import Request
from memfit.tools.verify import verify


class Turned(nn.Module):
    """An output in the order of axes that a permuted result has in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).permute(2, 0, 1).tanh()


class Shuffled(nn.Module):
    """An op that lays its result out in another way than fake tensors tell."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.channel_shuffle(functional.logsigmoid(x * self.scale), 3)


class Broken(nn.Module):
    """Subgraphs around code that draws a number outside torch, which hand each other gradients of another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * self.first.bias
        y = y * float(np.random.default_rng(0).random())
        return self.last(y.permute(1, 0, 2).tanh()).permute(1, 0, 2)


class Sine(nn.Module):
    """Two subgraphs; the first leaves a number behind that nobody uses."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x.sin()
        self.seen = x.exp().sum()
        torch._dynamo.graph_break()
        return x.sin()


class ManySubgraphs(nn.Module):
    """The first subgraph sums over its gradient, the last one turns it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(32, 32), nn.Parameter(torch.tensor(1e-3))
        self.parts = nn.Sequential(*[Sine(times) for times in range(1, 7)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = self.parts(y * self.first.bias.sum() * (y * self.scale).sum().sigmoid())
        return y.permute(1, 0, 2)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mse": lambda o: functional.mse_loss(o, torch.ones_like(o)),
    "square": lambda o: o.square().mean(),
    "real target": lambda o: functional.huber_loss(o, torch.ones(o.shape)),
    "cross-entropy": lambda o: functional.cross_entropy(o, torch.zeros(o.shape[0], o.shape[2], dtype=torch.long)),
    "looks at values": lambda o: (o * (2.0 if bool(o.sum() > 1e9) else 1.0)).square().mean(),
}


def _stepped(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], tuple[int, ...]]:
    """The gradients of a step, and the strides of the output's."""
    strides: list[tuple[int, ...]] = []
    model.zero_grad()
    output = model(x)
    output.register_hook(lambda gradient: strides.append(tuple(gradient.stride())))
    loss(output).backward()
    return [p.grad for p in model.parameters() if p.grad is not None], strides[0]


@pytest.mark.parametrize("name", LOSSES)
def test_a_permuted_output_gives_the_plain_steps_bits(name: str) -> None:
    torch.manual_seed(0)
    model, x, loss = Turned(), torch.randn(7, 333, 32), LOSSES[name]
    plain = copy.deepcopy(model)
    planned = memfit.plan_of(memfit.fit(model, (x,), budget="1GiB", loss_fn=loss))
    expected, strides = _stepped(plain, x, loss)
    found, _ = _stepped(model, x, loss)
    assert planned.planned is not None
    assert planned.planned.capture.gradient_strides == {"": ({0: strides},)}
    assert strides != tuple(plain(x).stride())
    assert all(map(same_bits, expected, found))
    assert len(expected) == len(found) == 2


def test_subgraphs_hand_each_other_gradients_as_in_the_baseline_step() -> None:
    torch.manual_seed(0)
    model, x, loss = Broken(), torch.randn(7, 333, 32), LOSSES["square"]
    plain = copy.deepcopy(model)
    planned = memfit.plan_of(memfit.fit(model, (x,), budget="1GiB", loss_fn=loss)).planned
    assert planned is not None and len(planned.capture.subgraphs.subgraphs) > 1
    told = planned.capture.gradient_strides
    assert told[planned.capture.subgraphs.subgraphs[0].key] == ({0: (32, 7 * 32, 1)},)
    assert all(map(same_bits, _stepped(plain, x, loss)[0], _stepped(model, x, loss)[0]))


def test_layouts_of_gradients_reach_the_first_of_many_subgraphs() -> None:
    torch.manual_seed(0)
    model, x = ManySubgraphs(), torch.randn(7, 333, 32)
    plain = copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=LOSSES["mse"], search_seconds=0.1)
    planned = memfit.plan_of(model).planned
    assert planned is not None and len(planned.capture.subgraphs.subgraphs) > 6
    assert all(map(same_bits, _stepped(plain, x, LOSSES["mse"])[0], _stepped(model, x, LOSSES["mse"])[0]))


def test_another_loss_than_the_planned_one_is_right_up_to_rounding_and_same_shapes_lie_alike() -> None:
    torch.manual_seed(0)
    model, plain = Turned().double(), Turned().double()
    plain.load_state_dict(model.state_dict())
    target = torch.ones(32, 7, 33, dtype=torch.double)
    memfit.fit(model, (torch.randn(7, 33, 32).double(),), budget="1GiB", loss_fn=lambda o: (o - target).square().mean())
    for size, loss in itertools.product((7, 5), (torch.sum, lambda o: o.permute(1, 2, 0).exp().sum())):
        x = torch.randn(size, 33, 32).double()
        found, expected = (_stepped(m, x, loss)[0] for m in (model, plain))
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, expected, strict=True))


class Normed(nn.Module):
    """A convolution over time, a break of the graph, and a norm whose weight sums over a permuted result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weight = nn.Conv1d(48, 48, 5, groups=48), nn.Parameter(torch.rand(48) + 0.5)
        self.last = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.transpose(1, 2)).transpose(1, 2) * float(np.random.default_rng(0).random())
        y = y * y.square().mean(-1, keepdim=True).rsqrt() * self.weight
        return self.last(y * float(np.random.default_rng(1).random()))


def test_without_a_loss_gradients_between_subgraphs_lie_as_in_the_baseline_step(told: list[str]) -> None:
    torch.manual_seed(0)
    plain, x = Normed(), torch.randn(2, 24, 48)
    fitted = copy.deepcopy(plain)
    memfit.fit(fitted, (x,), budget="1GiB", search_seconds=0.2)
    for model in (plain, fitted):
        model(x).square().mean().backward()
    for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and same_bits(p.grad, q.grad)
    assert not any("another memory layout" in text for text in told)


@pytest.mark.parametrize("known", [False, True], ids=["no loss", "the loss"])
def test_a_gradient_in_another_layout_than_planned_is_told(known: bool, told: list[str]) -> None:
    def loss(output: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.transpose(1, 2).contiguous(), torch.zeros(2, 32, 6))

    torch.manual_seed(0)
    model, x = nn.Linear(8, 32), torch.randn(2, 6, 8)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=loss if known else None, search_seconds=0.2)
    for _ in range(3):
        loss(model(x)).backward()
    assert sum("another memory layout" in text and "loss_fn" in text for text in told) == (not known)


def test_the_loss_sees_outputs_as_kernels_lay_them_out() -> None:
    model, x = Shuffled(), torch.rand(4, 6, 8, 10).contiguous(memory_format=torch.channels_last)
    read = capture_step(model, (x,), {}, loss_fn=_sum_of_squares).loss
    _, strides = _stepped(model, x, _sum_of_squares)
    assert read is not None
    assert read.gradient_strides == (strides,)


def _sum_of_squares(output: Tensor) -> Tensor:
    return output.square().sum()


@given(some.lists(some.tuples(some.integers(1, 4), some.integers(0, 30)), max_size=3))
def test_strides_are_told_where_each_element_has_memory_of_its_own(axes: list[Any]) -> None:
    sizes, strides = [size for size, _ in axes], [stride for _, stride in axes]
    places = [sum(map(int.__mul__, at, strides)) for at in itertools.product(*map(range, sizes))]
    told = strides_without_overlap(torch.empty_strided(sizes, strides))
    if told is not None:
        assert len(set(places)) == len(places)
        assert told == tuple(strides)
    dense = torch.empty(sizes).permute(torch.randperm(len(sizes)).tolist())
    assert strides_without_overlap(dense) == dense.stride()
    assert strides_without_overlap(dense.unsqueeze(-1).expand(*dense.shape, 2)) is None


class _Normalised(nn.Module):
    """Dynamo thinks that the result of a group normalisation lies as its operand; the kernel's is contiguous."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.last = nn.Conv2d(4, 4, 1), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x))


_LAST: dict[str, Callable[[Tensor], Tensor]] = {
    "group norm": lambda y: functional.group_norm(y, 2),
    "log softmax": lambda y: y.transpose(1, 3).log_softmax(-1),
    "layer norm": lambda y: functional.layer_norm(y.transpose(1, 3), (4,)),
}


@pytest.mark.parametrize(
    ("name", "height"), [("group norm", 8), ("group norm", 1), ("log softmax", 1), ("layer norm", 8)]
)
def test_the_loss_sees_outputs_that_lie_as_kernels_lay_them(name: str, height: int, tmp_path: Path) -> None:
    model = _Normalised(_LAST[name])
    x = torch.randn(2, 4, height, 8).contiguous(memory_format=torch.channels_last)
    seen = tmp_path / "strides"

    def loss_fn(y: Tensor) -> Tensor:
        seen.write_text(str(y.stride()))  # what a list would note is taken back
        return y.square().mean()

    captured = capture_step(model, (x,), {}, loss_fn=loss_fn)
    assert len(captured.subgraphs.subgraphs) == 1
    assert seen.read_text() == str(model(x).stride())
    plan = memfit.plan(model, (x,), budget="1MiB", loss_fn=lambda y: y.square().mean(), search_seconds=0.1)
    assert plan.proof is not None and plan.proof.is_exact


class _Counting(_Normalised):
    """Its first call leaves a state that the second one reads, and another number."""

    def __init__(self) -> None:
        super().__init__(_LAST["group norm"])
        self.calls, self.state = 0, torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = super().forward(x) * (self.state + self.calls)
        self.state = y.detach().mean()
        return y


def test_a_loss_that_is_read_twice_sees_the_same_step_twice() -> None:
    model, x = _Counting(), torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    state = model.state
    captured = capture_step(model, (x,), {}, loss_fn=lambda y: y.square().mean())
    assert len(captured.subgraphs.subgraphs) == 1 and not captured.subgraphs.breaks
    assert model.calls == 0 and model.state is state


class _Turning(nn.Module):
    """The same layers behind a break, each a subgraph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.recurrent = nn.Conv1d(4, 8, 3), nn.LSTM(8, 8)
        self.layers = nn.ModuleList([nn.ELU(), nn.ConvTranspose1d(8, 4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).permute(2, 0, 1)
        x = (self.recurrent(x)[0] + x).permute(1, 2, 0)
        for layer in self.layers:
            x = layer(x)
        return x


class _Twice(nn.Module):
    """No gradient comes to the first run of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Turning(), _Turning()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + self.first(x).detach())


def test_a_run_without_gradient_leaves_the_layout_to_the_other_run_of_the_graph() -> None:
    torch.manual_seed(0)
    memfit.fit(_Twice(), (torch.randn(2, 4, 9),), budget="1GiB", loss_fn=LOSSES["square"])


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.linear(x).sin()


def test_runs_of_one_graph_take_gradients_that_lie_otherwise_each() -> None:
    """The loss brings a permuted gradient to the last of them, whose own gradients lie upright."""
    torch.manual_seed(0)
    layers = 3
    model, x = nn.Sequential(nn.Linear(24, 24), *(_Linear() for _ in range(layers))), torch.randn(3, 65, 24)
    scale = torch.randn(3, 24, 65)

    def loss_fn(output: Tensor) -> Tensor:
        return (output.transpose(1, 2) * scale).sum()

    plan = memfit.plan(model, (x,), budget="1GiB", loss_fn=loss_fn)
    assert plan.planned is not None and plan.proof is not None and plan.proof.gradients
    capture = plan.planned.capture
    ((key, lying),) = capture.gradient_strides.items()
    assert lying == (*({},) * (layers - 1), {0: (24 * 65, 1, 65)})
    assert [subgraph.key for subgraph in capture.subgraphs.subgraphs][-layers:] == [key] * layers
    budget = int(0.95 * plan.predicted.plain_peak_bytes)
    result = verify(model, (x,), {}, Request(budget=budget, loss_fn=loss_fn))
    assert not result.differing and result.recomputes_executed == result.recomputes_planned
