"""A gradient that arrives as one expanded number gives eager's bits, whatever takes it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.profiling.memory import allocation_peak


class Broken(nn.Module):
    """A graph break before the last layer, and a sum behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x.relu())


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, width))


_IMAGES = (6, 4, 12, 12)

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "rows": (lambda: mlp(10), (8, 16)),
    "one number a row": (lambda: mlp(1), (12, 16)),
    "tokens": (lambda: mlp(7), (4, 6, 16)),
    "images": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3)), (6, 3, 12, 12)),
    "one-dimensional": (lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.Tanh(), nn.Conv1d(8, 4, 3)), (6, 3, 30)),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.Tanh(), nn.Conv3d(4, 4, 3)), (3, 2, 8, 8, 8)),
    "grouped": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Tanh(), nn.Conv2d(8, 4, 3, groups=4)), _IMAGES),
    "dilated": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3, dilation=2)), _IMAGES),
    "transposed": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.ConvTranspose2d(8, 4, 3)), _IMAGES),
    "normalised": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), (6, 3, 12, 12)),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)), (6, 3, 12, 12)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(16, 12), nn.LayerNorm(12)), (10, 16)),
    "behind a break": (Broken, (8, 16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_sum_by_a_factor_has_the_gradients_of_the_baseline_step(name: str, dtype: torch.dtype) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().to(dtype)
    plain, x = copy.deepcopy(model), torch.randn(shape, dtype=dtype)
    loss = lambda out: out.sum() * 0.01  # noqa: E731
    memfit.fit(model, (x,), budget="1GiB", loss_fn=loss)
    proof = memfit.plan_of(model).proof
    assert proof is not None
    for scale in (1.0, 0.3):
        for module in (model, plain):
            module.zero_grad()
            (loss(module(x)) * scale).backward()
        for (where, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad), where


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum over the batch": lambda out: (out.sum(0) * torch.linspace(0.1, 0.7, out.shape[-1])).sum(),
    "sum over the last axis": lambda out: (out.sum(-1).flatten() * torch.arange(out.shape[:-1].numel()) * 0.01).sum(),
    "one row for all": lambda out: (out * torch.linspace(0.1, 0.7, out.shape[-1])).sum() * 0.3,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("name", ["rows", "layer norm", "behind a break"])
def test_a_gradient_that_repeats_along_some_axes(name: str, loss: Callable[[Tensor], Tensor]) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    plain = copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=loss)
    for module in (model, plain):
        loss(module(x)).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_another_loss_in_the_loop_takes_gradients_of_its_own() -> None:
    torch.manual_seed(0)
    model = mlp(10)
    plain, x = copy.deepcopy(model), torch.randn(8, 16)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=lambda out: out.sum() * 0.01)
    for loss in (torch.square, torch.sin):
        for module in (model, plain):
            module.zero_grad()
            loss(module(x)).mean().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    for module in (model, plain):  # the graph runs backward twice
        module.zero_grad()
        out = module(x)
        (out.sum() * 0.01).backward(retain_graph=True)
        out.square().mean().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_such_a_gradient_takes_no_memory_beyond_its_copy(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """From the gradient as it arrives, the kernel of a convolution would make a second copy."""
    torch.manual_seed(0)
    last = nn.BatchNorm2d(32) if kind is nn.BatchNorm2d else kind(4, 32, 3)
    first = nn.Conv2d(3, 32 if kind is nn.BatchNorm2d else 4, 3)
    model, x = nn.Sequential(first, last).to(dtype), torch.randn(4, 3, 40, 40, dtype=dtype)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=lambda out: out.square().mean())

    def peak_of(gradient: Tensor) -> int:
        model(x).backward(gradient)
        output = model(x)
        model.zero_grad()
        return allocation_peak(lambda: output.backward(gradient))

    number = torch.tensor(0.01, dtype=dtype).expand_as(model(x))
    dense = number.contiguous()
    assert peak_of(number) <= peak_of(dense) + dense.nbytes  # AOTAutograd's copy, which the plan counts


class Turned(nn.Module):
    """Results that lie as the gradient does are read in another shape behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).transpose(1, 2) * 0.5


class Complex(nn.Module):
    """A view of pairs of numbers, which must lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.layer(x).unflatten(-1, (-1, 2)))
        return torch.view_as_real(z * (1 + 2j)) + 1.0


@pytest.mark.parametrize("make", [Turned, Complex])
@pytest.mark.parametrize("fitted_with", [torch.sum, lambda out: out.square().mean()], ids=["sum", "squares"])
def test_other_ops_take_the_copy(make: Callable[[], nn.Module], fitted_with: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 6, 16)
    plain = copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=lambda out: fitted_with(out) * 0.01)
    for module in (model, plain):
        (module(x).sum() * 0.01).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_gradient_that_a_hook_changes_counts() -> None:
    torch.manual_seed(0)
    model, x = mlp(10), torch.randn(8, 16)
    plain = copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=lambda out: out.sum() * 0.01)
    for module in (model, plain):
        out = module(x)
        assert out.grad_fn is not None
        out.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))
        (out.sum() * 0.01).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_sum_over_a_repeated_number_rounds_otherwise() -> None:
    """Otherwise the tests above would show nothing."""
    number = torch.tensor(0.01).expand(8, 10)
    assert not torch.equal(number.sum(0), number.contiguous().sum(0))
