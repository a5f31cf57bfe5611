"""NumPy in a forward pass keeps its bits: in the graph where it is rounded in one way only, else plain code."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch._numpy
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.capture.values.numpy_code import _ROUNDED_ONE_WAY


def of_numbers(x: Tensor) -> Tensor:
    """A root, a number, places, a range and an exponential."""
    x = x / np.sqrt(x.shape[-1] + 3)
    x = x * np.float32(0.3)
    x = x[torch.as_tensor(np.arange(4))]
    x = x * torch.as_tensor(np.arange(0.3, 1.0, 0.1)[5])
    return x * float(np.exp(-0.3))


FUNCTIONS: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "numbers": (True, of_numbers),
    "absolute values of complex numbers": (
        False,
        lambda x: x + torch.from_numpy(np.abs(x.detach().numpy().astype(np.complex64) * (1 + 2j))),
    ),
    "roots": (False, lambda x: x + torch.from_numpy(np.sqrt(np.abs(x.detach().numpy())))),
    "mean": (False, lambda x: x + torch.from_numpy(x.detach().numpy().mean(keepdims=True))),
    "deviation behind a break": (False, lambda x: broken(x) + torch.from_numpy(x.detach().numpy().std(0))),
}
"""Whether the model with the function in its midst is one graph, and the function."""


def broken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.sin()


class With(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.first, self.last = function, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.gelu(self.function(self.first(x))))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


NUMBERS = np.random.default_rng(0).standard_normal((2, 1000))
CALLS = {
    **dict.fromkeys(("abs", "ceil", "floor", "negative", "rint", "sign", "square"), (NUMBERS[0],)),
    **dict.fromkeys(("add", "divide", "maximum", "minimum", "multiply", "subtract"), tuple(NUMBERS)),
    **dict.fromkeys(("amax", "amin", "argmax", "argmin", "nonzero", "ravel", "flip"), (NUMBERS[0].reshape(40, 25),)),
    "clip": (NUMBERS[0], -0.5, 0.7),
    "where": (NUMBERS[0] > 0, *NUMBERS),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CALLS)
def test_torch_rounds_as_numpy_does_what_stays_in_graphs(name: str, dtype: type) -> None:
    assert name in _ROUNDED_ONE_WAY
    args = [a.astype(dtype) if isinstance(a, np.ndarray) and a.dtype != bool else a for a in CALLS[name]]
    numpys, torchs = getattr(np, name)(*args), getattr(torch._numpy, name)(*args)
    for ours, theirs in zip(*(r if isinstance(r, tuple) else (r,) for r in (torchs, numpys)), strict=True):
        assert np.array_equal(np.asarray(ours.tensor), theirs, equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits(name: str) -> None:
    whole, function = FUNCTIONS[name]
    model, x = With(function), torch.randn(33, 16)
    twin = copy.deepcopy(model)
    planned = memfit.plan_of(memfit.fit(model, (x,), budget="1MiB", loss_fn=loss_of)).planned
    assert planned is not None and (len(planned.capture.subgraphs.subgraphs) == 1) is whole
    for each in (model, twin):
        loss_of(each(x)).backward()
    for found, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert found.grad is not None and plain.grad is not None
        assert torch.equal(found.grad, plain.grad)


def test_a_graph_that_was_not_planned_calls_numpy() -> None:
    """It is behind a break, where the step cannot be planned anew any more."""

    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.turn = nn.Linear(16, 16), nn.Linear(16, 16), 0

        def forward(self, x: Tensor) -> Tensor:
            x = broken(self.first(x)).sin()
            if self.turn:
                values = x.detach().numpy()
                x = x + torch.from_numpy(np.exp(values).mean(0) + np.linalg.norm(values, axis=0))
            return self.last(x)

    model, x = Later(), torch.randn(33, 16)
    twin = copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1MiB", loss_fn=loss_of)
    for turn in range(3):
        for each in (model, twin):
            each.turn = turn
            each.zero_grad()
            loss_of(each(x)).backward()
        for planned, plain in zip(model.parameters(), twin.parameters(), strict=True):
            assert planned.grad is not None and plain.grad is not None
            assert torch.equal(planned.grad, plain.grad)
