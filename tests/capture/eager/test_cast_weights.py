"""Under autocast the gradients of a weight that is used several times are summed as in eager mode."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.bits import same_bits


class Looped(nn.Module):
    """A layer that is used in a loop, and a scale in float32 that meets one of its weights."""

    def __init__(self, times: int = 3, regions: tuple[torch.dtype, ...] = ()) -> None:
        super().__init__()
        self.layer, self.head, self.scale = nn.Linear(16, 16), nn.Linear(16, 4), nn.Parameter(torch.rand(16))
        self.times, self.regions = times, regions

    def forward(self, x: Tensor) -> Tensor:
        for region in self.regions:
            with torch.autocast("cpu", region):
                x = self.looped(x)
        return self.head(x) if self.regions else self.head(self.looped(x))

    def looped(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x * self.scale).relu()
        return x + self.layer.bias


class Tied(nn.Module):
    """A weight that is cast twice and looked up in float32 twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Embedding(30, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x) + self.tokens(x.flip(0))
        return self.head(self.layer(self.layer(y))) + self.head(y)


class Asked(nn.Module):
    """A cast that the user asks for, of a sum in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layer(x).float()
            return (y @ self.layer.weight) + (y @ self.layer.weight.t()) + self.layer(y)


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.dtype | None]] = {
    "around": (Looped, torch.bfloat16),
    "half": (Looped, torch.float16),
    "a region": (lambda: Looped(2, (torch.bfloat16,)), None),
    "a region in another": (lambda: Looped(2, (torch.bfloat16,)), torch.bfloat16),
    "tied": (Tied, torch.bfloat16),
    "asked": (Asked, None),
}


def _around(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def _loss(output: Tensor) -> Tensor:
    return output.float().square().mean()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_under_autocast_are_the_baseline_steps(name: str) -> None:
    torch.manual_seed(0)
    make, dtype = MODELS[name]
    model = make()
    x = torch.randint(30, (6, 9)) if name == "tied" else torch.randn(40, 16)
    plain = copy.deepcopy(model)
    with _around(dtype):
        memfit.fit(model, (x,), budget="1GiB", loss_fn=_loss)
    for _ in range(2):
        for one in (model, plain):
            with _around(dtype):
                loss = _loss(one(x))
            loss.backward()
        for (name_of, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert found.grad is not None, name_of
            assert expected.grad is not None, name_of
            assert same_bits(found.grad, expected.grad), name_of
