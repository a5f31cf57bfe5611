"""A view that a subgraph makes of its input, uses and returns: later code's gradient is added to each of its uses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.capture.training_step import capture_step

X = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))


class Detecting(nn.Module):
    """Reshapes what came before a break, normalizes it, and returns it beside the result, as OWL-ViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        queries = hidden.view(16, 3, 8)
        x = torch.exp(x).mul_(2)
        normal = queries / (torch.linalg.norm(queries, dim=-1, keepdim=True) + 1e-6)
        return self.second(normal).sin() * queries.exp() * x.view(16, 3, 8), queries


class Cutting(nn.Module):
    """Returns one of the views it uses, of the other nothing is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        left, right = hidden[:, :12], hidden.t()[12:].t()
        return self.second(left * left.exp() + right * right.cos()), left


def loss_of(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[0].square().mean() + output[1].pow(3).mean() + output[1].sin().mean()


@pytest.mark.smoke
@pytest.mark.parametrize("kind", [Detecting, Cutting])
def test_gradients_of_a_returned_view_are_added_as_in_eager(kind: type[nn.Module], told: list[str]) -> None:
    """`fit` proves the bits; the steps after it are compared here."""
    torch.manual_seed(0)
    plain = kind()
    fitted = copy.deepcopy(plain)
    memfit.fit(fitted, (X,), budget="1MiB", loss_fn=loss_of, search_seconds=0.1)
    for step in range(2):
        for model in (plain, fitted):
            model.zero_grad()
            loss_of(model(X + step)).backward()
        for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    assert not told


def test_the_view_is_an_input_of_the_subgraph() -> None:
    capture = capture_step(Detecting(), (X,), {}, loss_fn=loss_of)
    assert len(capture.subgraphs.subgraphs) == 2
    assert list(capture.shared.values()) == [{max(capture.subgraphs.subgraphs[-1].terms): 3}]


class Prototypes(nn.Module):
    """One graph that returns a view of its parameter, or the parameter, and uses it several times."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.table, self.linear = nn.Parameter(torch.randn(shape)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        table = self.table if self.table.dim() == 3 else self.table.view(16, 3, 8)
        normal = table / (table.norm(dim=-1, keepdim=True) + 1e-6)
        return self.linear(normal).sin() * table.exp() * x.view(16, 3, 8), table


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("shape", [(24, 16), (16, 3, 8)])
def test_a_parameter_that_is_returned(shape: tuple[int, ...], used: bool, told: list[str]) -> None:
    torch.manual_seed(0)
    plain = Prototypes(shape)
    fitted = copy.deepcopy(plain)

    def loss_fn(output: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(output) if used else output[0].square().mean()

    memfit.fit(fitted, (X,), budget="1MiB", loss_fn=loss_fn, search_seconds=0.1)
    for model in (plain, fitted):
        loss_fn(model(X)).backward()
    for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    assert not told


class OfResults(nn.Module):
    """Returns views of its own results and uses them, as text encoders do with the first token."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(8, 16), nn.Linear(16, 8), kind

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.first(x).tanh()
        if self.kind == "first token":
            token = hidden[:, 0]
            return hidden, token, self.second(token).sin()
        if self.kind == "flat":
            flat = hidden.view(len(x), -1)
            return hidden, flat, self.second(flat[:, :16]).sin(), flat.exp()
        turned = hidden.transpose(1, 2)
        return turned, self.second(hidden).sum(1) * (turned * turned).sum(1)[:, :1]


def mean_of_all(output: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([t.square().mean() + t.sin().mean() for t in output]).sum()


@pytest.mark.parametrize("kind", ["first token", "flat", "turned"])
def test_gradients_of_a_returned_view_of_a_result_are_added_as_in_eager(kind: str) -> None:
    torch.manual_seed(0)
    plain, x = OfResults(kind), torch.randn(4, 5, 8)
    fitted = copy.deepcopy(plain)
    memfit.fit(fitted, (x,), budget="1GiB", loss_fn=mean_of_all, search_seconds=0.1)
    expected, found = plain(x), fitted(x)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
    first = [outputs[0].untyped_storage().data_ptr() for outputs in (expected, found)]
    shared = [
        [t.untyped_storage().data_ptr() == start for t in outputs]
        for outputs, start in zip((expected, found), first, strict=True)
    ]
    assert shared[0] == shared[1], "a view takes no memory of its own"
    mean_of_all(expected).backward()
    mean_of_all(found).backward()
    for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


class Written(nn.Module):
    """Returns a result, a view of it, and what is computed from the view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.linear(x)
        flat = made.view(-1)
        return made, flat, flat.exp().sum()


@pytest.mark.parametrize("place", [0, 1])
def test_autograd_sees_writes_to_views_that_have_a_gradient(place: int) -> None:
    """Where eager takes the gradient of a write into account, the planned step refuses the write."""
    model = memfit.fit(Written(), (X,), budget="1MiB", loss_fn=mean_of_all, search_seconds=0.1)
    output = model(X)
    with pytest.raises(RuntimeError, match=r"modified in-?place"):
        output[place].mul_(2)
        mean_of_all(output).backward()


class Whitening(nn.Module):
    """Takes statistics, without a gradient, of a view of the hidden values, after a break."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(24, 6), nn.Linear(6, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.kind == "no_grad":
            with torch.no_grad():
                view = hidden.T
        else:
            view = {"T": hidden.detach().T, "rows": hidden.detach()[2:].T, "data": hidden.data.view(6, -1)}[self.kind]
        torch._dynamo.graph_break()
        covariance = view @ view.T + torch.eye(6)
        values, vectors = torch.linalg.eigh(covariance)
        # A view made under no_grad says that it requires a gradient, and then eager takes another kernel for `cond`.
        condition = 2 if self.kind == "no_grad" else torch.linalg.cond(covariance).log()
        made: Tensor = self.second(hidden @ vectors / values.sqrt()) / condition + view.sum()
        return made


@pytest.mark.parametrize("kind", ["T", "rows", "data", "no_grad"])
def test_a_view_without_a_gradient_is_handed_on_without_one(kind: str, told: list[str]) -> None:
    """Else the graph that reads it is made anew, for an input that requires a gradient, and runs without a plan."""
    torch.manual_seed(0)
    plain = Whitening(kind)
    fitted = copy.deepcopy(plain)
    memfit.fit(fitted, (X,), budget="1MiB", loss_fn=lambda y: y.square().mean(), search_seconds=0.1)
    for step in range(2):
        for model in (plain, fitted):
            model.zero_grad()
            model(X + step).square().mean().backward()
        for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    assert not told
