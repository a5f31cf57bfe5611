"""Branches on constants, small buffers or one input break no graph, nor do sizes read from the former; others do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memfit
from benchmarks.notices import notices
from memfit.capture.training_step import capture_step


class Branching(nn.Module):
    def __init__(self, *conditions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.conditions = nn.Linear(8, 8), conditions

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        for condition in self.conditions:
            if condition(x):
                x = x * 2
            else:
                x = x - 1
        return x


def _breaks(model: nn.Module) -> bool:
    """Whether the plan that a model was fitted to last has graph breaks."""
    planned = memfit.plan_of(model).planned
    assert planned is not None
    return bool(planned.capture.subgraphs.breaks)


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


def test_constants_break_nothing() -> None:
    torch.manual_seed(0)
    model, x = Branching(*CONSTANT.values()), torch.randn(3, 8)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)  # proves which way is eager's
    assert not _breaks(model)


@pytest.mark.parametrize("name", NOT_CONSTANT)
def test_anything_else_breaks_the_graph(name: str) -> None:
    capture = capture_step(Branching(NOT_CONSTANT[name]), (torch.randn(3, 8),), {}, loss_fn=torch.sum)
    assert capture.subgraphs.breaks


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
    twin = copy.deepcopy(model)
    memfit.fit(model, (x,), {"mask": FULL}, budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)
    assert not _breaks(model)
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


@pytest.mark.parametrize("name", ["written over", "a large buffer", "many turns"])
def test_a_branch_breaks_the_graph_if_it_is_not_on_the_input_as_given(name: str) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("mask", torch.ones(32, dtype=torch.long))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = torch.tanh(self.layer(x))
            if name == "written over":
                mask.view(-1).zero_()
            while name == "many turns" and mask.sum() < 60:
                mask = mask + 1
                x = x * 1.5
            if (self.mask if name == "a large buffer" else mask).all():
                return x
            return x * 2

    model, x = Other(), torch.randn(3, 8)
    twin = copy.deepcopy(model)
    memfit.fit(model, (x, FULL.clone()), budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)
    assert _breaks(model)
    for mask in (FULL, LAST):
        assert torch.equal(model(x, mask.clone()), twin(x, mask.clone()))


class Checked(nn.Module):
    """Compares numbers that it reads from an input, and notes one in each third call."""

    def __init__(self, condition: Callable[[Tensor, int], bool]) -> None:
        super().__init__()
        self.table, self.layer, self.condition = nn.Embedding(16, 8), nn.Linear(8, 8), condition
        self.calls, self.noted, self.notes = 0, 0.0, False

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.min().item() >= 0, "ids begin with nought"
        hidden = torch.tanh(self.layer(self.table(ids)))
        if self.condition(ids, self.table.num_embeddings):
            hidden = hidden * 2
        self.calls += 1
        if self.notes and self.calls % 3 == 0:
            self.noted = ids.float().mean().item()
        return hidden


def _highest(ids: Tensor, most: int) -> bool:
    highest = ids.max().item()
    return 3 < highest < most / 2


COMPARED: dict[str, Callable[[Tensor, int], bool]] = {
    "item": lambda ids, most: ids.max().item() < most // 2,
    "int": lambda ids, most: int(ids.max()) + 1 <= most // 2,
    "float": lambda ids, most: float(ids.float().mean()) * 0.1 < 0.1 * 0.3 * most,
    "bool": lambda ids, most: bool((ids < most // 2).all()),
    "truth": lambda ids, most: not (ids >= most // 2).any().item(),
    "count": lambda ids, most: (ids >= most // 2).sum().item() == 0,
    "two": _highest,
}


@pytest.mark.parametrize("name", COMPARED)
def test_numbers_of_an_input_that_are_only_compared_break_nothing(name: str) -> None:
    torch.manual_seed(0)
    model, low, high = Checked(COMPARED[name]), torch.randint(0, 8, (4, 6)), torch.randint(8, 16, (4, 6))
    plain = copy.deepcopy(model)
    memfit.fit(model, (low,), budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)
    assert not _breaks(model)
    for ids in (low, high, low.flip(0), high.flip(0)):
        _assert_same_gradients(plain, model, ids)


def test_a_number_that_is_read_in_a_later_call_is_the_plain_one() -> None:
    torch.manual_seed(0)
    model, ids = Checked(COMPARED["item"]), torch.randint(0, 8, (4, 6))
    plain = copy.deepcopy(model)
    memfit.fit(model, (ids,), budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)
    model.notes = plain.notes = True
    model.calls = plain.calls = 0
    for _ in range(4):
        _assert_same_gradients(plain, model, ids)
        assert type(model.noted) is float and model.noted == plain.noted and model.calls == plain.calls
    with pytest.raises(AssertionError, match="begin with nought"):
        model(ids - 20)
    _assert_same_gradients(plain, model, ids)


def _assert_same_gradients(plain: nn.Module, fitted: nn.Module, *inputs: Tensor) -> None:
    for module in (plain, fitted):
        module.zero_grad()
        module(*inputs).square().sum().backward()
    for one, other in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


class EachPlace(nn.Module):
    """Goes one of 16 ways, by which places of a mask are set."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        for place in range(4):
            if mask[place]:
                x = x * 0.5
        return x


def test_a_branch_that_goes_many_ways_is_planned_in_subgraphs_from_some_way_on() -> None:
    torch.manual_seed(0)
    model, x = EachPlace(), torch.randn(3, 8)
    twin = copy.deepcopy(model)
    masks = [torch.tensor([number >> place & 1 for place in range(4)]) for number in range(10)]
    memfit.fit(model, (x, masks[0]), budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)
    with notices() as told:
        for mask in [*masks, *masks]:
            before = memfit.plan_of(model)
            assert torch.equal(model(x, mask), twin(x, mask))
        assert memfit.plan_of(model) is before
    assert sum("go many ways" in text for text in told) == 1, told
    planned = before.planned
    assert planned is not None and planned.capture.subgraphs.breaks


class Solving(nn.Module):
    """A condition that some inputs have no value for, which is not always asked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.asks = nn.Linear(8, 8), True

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        if not self.asks:
            return x * 3
        return x * 2 if torch.linalg.cholesky(matrix).sum() > 0 else x


def test_a_condition_that_cannot_be_computed_raises_only_where_the_module_does() -> None:
    torch.manual_seed(0)
    model, x = Solving(), torch.randn(3, 8)
    memfit.fit(model, (x, torch.eye(2)), budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)
    assert not _breaks(model)
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        model(x, -torch.eye(2))
    assert torch.equal(model(x, 2 * torch.eye(2)), 2 * torch.tanh(model.layer(x)))
    model.asks = False
    assert torch.equal(model(x, -torch.eye(2)), 3 * torch.tanh(model.layer(x)))


class Padded(nn.Module):
    """Keeps its sizes as buffers and pads by them, as audio codecs do."""

    kernel: Tensor
    stride: Tensor

    def __init__(self, kernel: int, stride: int, mode: str) -> None:
        super().__init__()
        self.layer, self.mode = nn.Conv1d(4, 4, kernel, stride), mode
        self.register_buffer("kernel", torch.tensor(kernel), persistent=False)
        self.register_buffer("stride", torch.tensor(stride), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        left = self.kernel - self.stride
        count = torch.ceil((x.shape[-1] - self.kernel + left) / self.stride + 1).long() - 1
        right = count * self.stride + self.kernel - left - x.shape[-1]
        more = max(left, right) - x.shape[-1] + 1
        if more > 0:
            x = nn.functional.pad(x, (0, int(more)))
        x = nn.functional.pad(x, (left, right), self.mode)
        return torch.tanh(self.layer(x[..., : x.shape[-1] - max(more, 0 * more)]))


class Counted(nn.Module):
    """Reads numbers from positions that it counts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0])
        count = int(places.max()) + 1
        return self.layer(x)[:count] * torch.arange(count).unsqueeze(1) * places.float().mean().item()


NUMBERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "zeros": lambda: (nn.Sequential(Padded(3, 2, "constant"), Padded(5, 2, "constant")), torch.randn(2, 4, 37)),
    "a reflection": lambda: (nn.Sequential(Padded(3, 2, "reflect"), Padded(4, 3, "reflect")), torch.randn(2, 4, 37)),
    "constants": lambda: (Counted(), torch.randn(5, 8)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_sizes_that_are_constants_or_small_buffers_break_nothing(name: str) -> None:
    torch.manual_seed(0)
    model, x = NUMBERS[name]()
    twin = copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)
    assert not _breaks(model)
    assert torch.equal(model(x), twin(x))


def test_a_broken_graph_goes_on_at_sizes_too() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.recurrent, self.second = Padded(3, 2, "constant"), nn.LSTM(4, 4), Padded(3, 2, "constant")

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).permute(2, 0, 1)
            return self.second(self.recurrent(x)[0].permute(1, 2, 0))

    torch.manual_seed(0)
    capture = capture_step(Broken(), (torch.randn(2, 4, 13),), {}, loss_fn=torch.sum)
    assert capture.subgraphs.breaks and not capture.subgraphs.plain.modules


def test_a_buffer_that_changes_is_read_anew() -> None:
    class Counter(nn.Module):
        steps: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("steps", torch.tensor(1))

        def forward(self, x: Tensor) -> Tensor:
            made = self.layer(x) * int(self.steps)
            self.steps += 1
            return made

    torch.manual_seed(0)
    model, x = Counter(), torch.randn(5, 8)
    twin = copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)
    plans = []
    for _ in range(5):
        found, expected = model(x), twin(x)
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()
        plans.append(memfit.plan_of(model))
    for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and plain.grad is not None and torch.equal(mine.grad, plain.grad)
    assert plans[0] is not plans[2] is plans[4], "the last plan looks at the buffer"


class Limited(nn.Module):
    """Compares an input with a number that it keeps as a buffer."""

    limit: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("limit", torch.tensor([2]))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.layer(x * self.limit)
        if mask.sum() < self.limit:
            return x.sin()
        return x * 2


def test_a_branch_may_look_at_an_input_and_a_small_buffer() -> None:
    torch.manual_seed(0)
    model, x = Limited(), torch.randn(3, 8)
    twin = copy.deepcopy(model)
    memfit.fit(model, (x, FULL), budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)
    assert not _breaks(model)
    few = torch.tensor([1, 0, 0])
    for mask in (FULL, few, FULL, few):
        assert torch.equal(model(x, mask), twin(x, mask))
    for each in (model, twin):
        each.limit.fill_(4)
    for mask in (FULL, few):
        assert torch.equal(model(x, mask), twin(x, mask))


def test_a_buffer_that_changes_within_a_call_is_read_each_time() -> None:
    class Stepping(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("count", torch.tensor(1))

        @torch._dynamo.disable
        def advance(self, x: Tensor) -> Tensor:
            self.count += 1
            return x

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).sin() * int(self.count)
            return self.second(self.advance(x)).sin() * int(self.count)

    torch.manual_seed(0)
    model, x = Stepping(), torch.randn(3, 8)
    twin = copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)
    for _ in range(3):
        found, expected = model(x), twin(x)
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()
        for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.grad is not None and plain.grad is not None and torch.equal(mine.grad, plain.grad)
