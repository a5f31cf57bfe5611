"""A branch on a tensor made from constants or from one input breaks no graph; any other does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.capture.trace import capture_step
from tests.notices import notices


class Branching(nn.Module):
    def __init__(self, condition: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.condition = nn.Linear(8, 8), condition

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        if self.condition(x):
            return x * 2
        return x - 1


CONSTANT: dict[str, Callable[[Tensor], Tensor]] = {
    "positions": lambda x: (torch.arange(x.shape[1]).diff() == 1).all(),
    "a mask": lambda x: torch.ones(4, 4).tril().sum() > 100,
    "of two": lambda x: torch.tensor(3) > torch.full((), 2),
}
NOT_CONSTANT: dict[str, Callable[[Tensor], Tensor]] = {
    "a result": lambda x: x.sum() > 0,
    "at random": lambda x: torch.rand(()) > 0.5,
    "written over": lambda x: torch.zeros(3).add_(x.detach().sum()).sum() > 0,
}


@pytest.mark.parametrize("name", CONSTANT)
def test_constants_break_nothing(name: str) -> None:
    torch.manual_seed(0)
    model, x = Branching(CONSTANT[name]), torch.randn(3, 8)
    assert not capture_step(model, (x,), {}, loss_fn=torch.sum).pieces.breaks
    memfit.fit(model, (x,), budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)  # proves which way is eager's


@pytest.mark.parametrize("name", NOT_CONSTANT)
def test_anything_else_breaks_the_graph(name: str) -> None:
    capture = capture_step(Branching(NOT_CONSTANT[name]), (torch.randn(3, 8),), {}, loss_fn=torch.sum)
    assert capture.pieces.breaks


class Masked(nn.Module):
    """Drops a mask that is all ones, as transformers do, and looks whether the first place is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.layer(x))
        if mask is None or mask.all():
            return x
        if not mask[0].any():
            return x.sigmoid() * mask.unsqueeze(-1)
        return x * mask.unsqueeze(-1)


FULL = torch.ones(3, dtype=torch.long)
LAST, FIRST = torch.tensor([1, 1, 0]), torch.tensor([0, 1, 1])


def test_a_branch_on_an_input_breaks_nothing_and_holds_for_its_way_only() -> None:
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(3, 8)
    assert not capture_step(model, (x,), {"mask": FULL}, loss_fn=torch.sum).pieces.breaks
    twin = copy.deepcopy(model)
    memfit.fit(model, (x,), {"mask": FULL}, budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)
    plans = set()
    with notices() as told:
        for mask in (FULL, LAST, FULL, FIRST, LAST, FIRST, FULL.clone()):
            found, expected = model(x, mask=mask), twin(x, mask=mask)
            assert torch.equal(found, expected)
            found.sum().backward()
            expected.sum().backward()
            for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
                assert mine.grad is not None
                assert plain.grad is not None
                assert torch.equal(mine.grad, plain.grad)
            plans.add(id(memfit.plan_of(model)))
            model.zero_grad()
            twin.zero_grad()
    assert not told, "each way is planned once"
    assert len(plans) == 3


def test_a_way_that_was_planned_is_not_planned_again() -> None:
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(3, 8)
    memfit.fit(model, (x,), {"mask": FULL}, budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)
    for mask in (LAST, FIRST):
        model(x, mask=mask)
    before = memfit.plan_of(model)
    for mask in (FULL, LAST, FIRST, FULL):
        model(x, mask=mask).sum().backward()
        model.zero_grad()
    assert memfit.plan_of(model) is before


@pytest.mark.parametrize("name", ["written over", "a buffer", "many turns"])
def test_a_branch_breaks_the_graph_if_it_is_not_on_the_input_as_given(name: str) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("mask", FULL.clone())

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = torch.tanh(self.layer(x))
            if name == "written over":
                mask.view(-1).zero_()
            while name == "many turns" and mask.sum() < 100:
                mask = mask + 1
                x = x * 1.5
            if (self.mask if name == "a buffer" else mask).all():
                return x
            return x * 2

    model, x = Other(), torch.randn(3, 8)
    assert capture_step(model, (x, FULL.clone()), {}, loss_fn=torch.sum).pieces.breaks
    twin = copy.deepcopy(model)
    memfit.fit(model, (x, FULL.clone()), budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)
    for mask in (FULL, LAST):
        assert torch.equal(model(x, mask.clone()), twin(x, mask.clone()))
