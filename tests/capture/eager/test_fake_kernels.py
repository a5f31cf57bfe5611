"""A mixture of experts in one grouped product is planned in each precision that its kernel takes."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memfit
from memfit.capture.eager.fake_kernels import grouped_product_layout, rules_of_kernels


def operands(dims: tuple[int, int], columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    left = torch.randn((8, 16) if dims[0] == 2 else (3, 8, 16), dtype=dtype)
    right = torch.randn((columns, 16) if dims[1] == 2 else (3, columns, 16), dtype=dtype)
    ends = {(2, 3): [2, 5, 8], (2, 2): [4, 8, 16], (3, 2): [1, 2, columns], (3, 3): None}[dims]
    return left, right.transpose(-2, -1), None if ends is None else torch.tensor(ends, dtype=torch.int32)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dims", "columns"), itertools.product(itertools.product((2, 3), repeat=2), (4, 5, 7, 8)))
def test_a_fake_product_lies_as_the_kernels(dims: tuple[int, int], columns: int, dtype: torch.dtype) -> None:
    left, right, ends = operands(dims, columns, dtype)
    made = torch._grouped_mm(left, right, ends)
    layout = grouped_product_layout(left, right, 0 if ends is None else len(ends))
    assert (list(made.shape), list(made.stride())) == layout
    with rules_of_kernels(), FakeTensorMode() as mode:
        taken = [None if t is None else mode.from_tensor(t) for t in (left, right, ends)]
        if dtype is torch.bfloat16 and columns % 8 and dims != (2, 3):
            return  # PyTorch's own check, which asks for more than the kernel
        fake = torch._grouped_mm(*taken)
    assert (fake.shape, fake.stride(), fake.dtype) == (made.shape, made.stride(), made.dtype)


class Experts(nn.Module):
    """Tokens are sorted by their expert and multiplied group by group, as in transformers."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(16, count)
        self.up, self.down = nn.Parameter(torch.randn(count, 24, 16)), nn.Parameter(torch.randn(count, 16, 24))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        count = len(self.up)
        ends = torch.histc(chosen.float(), bins=count, min=0, max=count - 1).cumsum(0).to(torch.int32)
        hidden = torch.nn.functional.grouped_mm(x[order], self.up.transpose(-2, -1), offs=ends)
        made = torch.nn.functional.grouped_mm(hidden.relu(), self.down.transpose(-2, -1), offs=ends)
        return x + made[order.argsort()] * weight[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_planned(dtype: torch.dtype, told: list[str]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), Experts(), nn.Tanh(), Experts()).to(dtype)
    fitted, x = copy.deepcopy(plain), torch.randn(32, 16, dtype=dtype)

    def loss_of(output: Tensor) -> Tensor:
        return output.square().mean()

    with pytest.raises(memfit.BudgetError) as least:
        memfit.fit(fitted, (x,), budget="1KiB", loss_fn=loss_of, search_seconds=0.2)
    memfit.fit(fitted, (x,), budget=least.value.least_bytes, loss_fn=loss_of, search_seconds=0.2)
    for step in range(2):
        for model in (plain, fitted):
            model.zero_grad()
            loss_of(model(x + step)).backward()
        for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    assert not told
