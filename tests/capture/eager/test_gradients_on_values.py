"""Products and extremes have eager's gradients, whether a factor is zero or not and however many elements are equal."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memfit
import memfit.capture.eager.gradients_on_values  # registers the ops
from memfit.bits import same_bits


class Product(nn.Module):
    def __init__(self, product: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after, self.product = nn.Linear(6, 12), nn.Linear(12, 12), product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.after(torch.tanh(self.before(x))))


@pytest.mark.smoke
@pytest.mark.parametrize(
    "product",
    [
        lambda h: (h + 1).prod() * h,
        lambda h: h.prod(1),
        lambda h: h.transpose(0, 1).prod(1, keepdim=True) * h[0, 0],
        lambda h: h.prod(0, dtype=torch.float64),
        lambda h: h.cumprod(1),
        lambda h: h.where(h > 0.1, 0).prod(),
        lambda h: h.where(h > 0.1, 0).prod(-1),
        lambda h: h.where(h > 0.1, 0).T.cumprod(-2),
        lambda h: h.max() * h,
        lambda h: h.T.max() + h.transpose(0, 1).relu().min(),
        lambda h: h.unflatten(1, (3, 4)).movedim(1, 0).median() * h,
        lambda h: h.where(h > 0.1, torch.nan).T.nanmedian() * h,
    ],
    ids=[
        *("all", "axis", "transposed", "wider", "running", "all, zeros", "axis, zeros", "running, zeros"),
        *("maximum", "permuted, equal", "permuted median", "median without NaN"),
    ],
)
def test_bits_of_eager(product: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(1)
    plain, x = Product(product), torch.randn(9, 6)
    fitted = copy.deepcopy(plain)
    memfit.fit(fitted, (x,), budget="1GiB", loss_fn=lambda o: o.square().mean())
    for model in (plain, fitted):
        model(x).square().mean().backward()
    for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and same_bits(p.grad, q.grad)


@pytest.mark.parametrize("name", ["prod", "max", "min", "median", "nanmedian"])
def test_gradients_lie_as_in_eager(name: str) -> None:
    """Of permuted data with equal elements, on real tensors and on fake ones."""
    data = torch.randint(1, 3, (4, 5, 6)).double().permute(2, 0, 1).requires_grad_()
    result = getattr(torch, name)(data)
    (eager,) = torch.autograd.grad(result, data, torch.tensor(3.0, dtype=torch.float64))
    op = getattr(torch.ops.memfit, f"{name}_gradient")
    operands = (torch.tensor(3.0, dtype=torch.float64), data.detach(), result.detach())
    more = (None,) if name == "prod" else ()
    made = op(*operands, *more)
    assert same_bits(made, eager) and made.stride() == eager.stride()
    mode = FakeTensorMode()
    fake = op(*(mode.from_tensor(operand) for operand in operands), *more)
    assert fake.stride() == eager.stride() and fake.dtype == eager.dtype


@pytest.mark.parametrize("name", ["prod", "max"])
def test_an_autocast_region_around_the_backward_pass_changes_nothing(name: str) -> None:
    data = (torch.rand(50, dtype=torch.bfloat16) + 0.5).requires_grad_()
    result = getattr(torch, name)(data)
    (eager,) = torch.autograd.grad(result, data, torch.ones_like(result))
    more = (None,) if name == "prod" else ()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = getattr(torch.ops.memfit, f"{name}_gradient")(
            torch.ones_like(result), data.detach(), result.detach(), *more
        )
    assert same_bits(made, eager)


@pytest.mark.parametrize(
    "product",
    [
        lambda h: h * torch.func.grad(lambda t: t.max() * t.prod())(h.detach()),
        lambda h: torch.func.vmap(lambda t: t.median() * t.prod())(h) * h.max(),
    ],
    ids=["gradient", "map"],
)
def test_transforms_in_the_forward_pass(product: Callable[[Tensor], Tensor]) -> None:
    test_bits_of_eager(product)
