"""Gradients of tensors that several subgraphs take, where one of them uses such a tensor several times."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from benchmarks.notices import notices


class _Broken(nn.Module):
    """What a break and its subgraphs share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.scale = nn.Parameter(torch.linspace(0.3, 1.7, 16))


class _Intermediate(_Broken):
    """A result of the first subgraph that the second uses three times, and the third."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        middle = hidden * self.second(hidden) + hidden.sin()
        torch._dynamo.graph_break()
        return self.third(middle) * hidden.cos()


class _PlainCode(_Broken):
    """The same with plain code in the third place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        middle = hidden * self.second(hidden) + F.normalize(hidden)
        return _plainly(middle, hidden)


class _Weight(_Broken):
    """A parameter that both subgraphs use, the first three times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (self.first(x * self.scale) * self.scale).tanh() * self.scale.cos()
        torch._dynamo.graph_break()
        return self.second(hidden) * self.scale


class _Returned(_Broken):
    """A tensor that the loss takes too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return hidden * self.second(hidden) + hidden.sin(), hidden


class _Repeated(_Broken):
    """One graph that runs several times and takes the same tensor each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        total = hidden
        for _ in range(3):
            torch._dynamo.graph_break()
            total = torch.tanh(total * hidden + self.second(hidden) * hidden)
        return total


@torch._dynamo.disable
def _plainly(middle: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return middle * hidden.cos() + hidden * hidden


def _loss(output: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    if isinstance(output, tuple):
        return output[0].square().mean() + (output[1] * output[1].cos()).mean()
    return output.square().mean()


@pytest.mark.parametrize("kind", [_Intermediate, _PlainCode, _Weight, _Returned, _Repeated])
def test_gradients_have_the_bits_of_the_baseline_step(kind: type[_Broken]) -> None:
    torch.manual_seed(0)
    plain = kind()
    x = torch.randn(64, 16)
    model = copy.deepcopy(plain)
    fitted = memfit.fit(model, (x,), budget="90%", loss_fn=_loss, search_seconds=0.1)
    for _ in range(2):
        _loss(plain(x)).backward()
        _loss(fitted(x)).backward()
    for (name, own), planned in zip(plain.named_parameters(), model.parameters(), strict=True):
        if own.grad is None:
            assert planned.grad is None, name
        else:
            assert planned.grad is not None and torch.equal(own.grad, planned.grad), name


class _Tied(nn.Module):
    """A table read at both ends, and a layer that runs several times in between."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.table, self.layer, self.times = nn.Embedding(40, 16), nn.Linear(16, 16), times

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for _ in range(self.times):
            x = x + torch.tanh(self.layer(x))
        return F.linear(x, self.table.weight)


def _differing(model: nn.Module, other: nn.Module, batches: list[torch.Tensor], penalty: float = 0.0) -> list[str]:
    for each in (model, other):
        each.zero_grad()
        loss = sum(number * each(batch).square().mean() for number, batch in enumerate(batches, 1))
        more = penalty * sum(p.square().sum() for p in each.parameters()) if penalty else 0.0
        (loss + more).backward()
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    return [name for (name, p), (_, q) in pairs if not torch.equal(p.grad, q.grad)]


@pytest.mark.parametrize("times", [1, 4])
def test_uses_are_added_up_as_in_eager_once_the_loop_is_seen_to_make_several_passes(times: int) -> None:
    torch.manual_seed(0)
    model = _Tied(times)
    plain, batches = copy.deepcopy(model), [torch.randint(0, 40, (4, 12)) for _ in range(2)]
    memfit.fit(model, (batches[0],), budget="1GiB", loss_fn=lambda out: out.square().mean(), search_seconds=0.1)
    assert _differing(model, plain, batches[:1]) == []
    with notices() as told:
        rounded = _differing(model, plain, batches)
    assert rounded and set(rounded) <= {"layer.weight", "layer.bias", "table.weight"}
    assert sum(".weight" in text and "up to rounding" in text for text in told) == 1
    assert _differing(model, plain, batches) == []


def test_a_penalty_on_a_parameter_of_several_uses_is_told_and_planned_for() -> None:
    torch.manual_seed(0)
    model = _Tied(4)
    plain, batches = copy.deepcopy(model), [torch.randint(0, 40, (4, 12))]
    memfit.fit(model, (batches[0],), budget="1GiB", loss_fn=lambda out: out.square().mean(), search_seconds=0.1)
    with notices() as told:
        assert _differing(model, plain, batches) == [] and not told
        rounded = _differing(model, plain, batches, 0.37)
    assert rounded and set(rounded) <= {"layer.weight", "layer.bias", "table.weight"}
    assert len(told) == 1 and ".weight" in told[0] and "up to rounding" in told[0]
    assert _differing(model, plain, batches, 0.37) == []


def test_an_input_that_other_code_uses_too_gets_its_gradient_as_in_eager() -> None:
    """A block with a skip around it, in a larger model: its input is used inside, twice, and outside."""
    torch.manual_seed(0)

    class Block(_Broken):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)) * x)

    before, block = nn.Linear(16, 16), Block()
    model = nn.ModuleDict({"before": before, "block": block})
    plain, x = copy.deepcopy(model), torch.randn(8, 16)
    memfit.fit(block, (torch.randn(8, 16, requires_grad=True),), budget="1GiB", search_seconds=0.1)

    def step(of: nn.ModuleDict) -> None:
        of.zero_grad()
        hidden = of["before"](x)
        (hidden.sin() * 0.3 + of["block"](hidden) + hidden.cos()).square().mean().backward()

    with notices() as told:
        step(model)
    assert "an input" in told[0] and "up to rounding" in told[0]
    step(model)
    step(plain)
    pairs = zip(model.named_parameters(), plain.named_parameters(), strict=True)
    for name, p, q in [(name, p.grad, q.grad) for (name, p), (_, q) in pairs if q.grad is not None]:
        assert torch.equal(p, q), name
