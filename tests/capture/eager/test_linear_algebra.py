"""Matrix algebra and reductions of several results: marks of partitioners, views of copied slices, unread results."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

import memfit
from memfit.bits import same_bits


class LeastOnly(nn.Module):
    """Of the two results of one op only one is read."""

    def forward(self, x: Tensor) -> Tensor:
        return x - torch.aminmax(x.detach(), dim=-1, keepdim=True).min


MIDDLES = {
    "views of a slice that is copied": lambda: orthogonal(nn.Linear(8, 8), orthogonal_map="householder"),
    "a call that a partitioner marks as saved": lambda: orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"),
    "a result that nothing reads": LeastOnly,
}


@pytest.mark.parametrize("name", MIDDLES)
def test_gradients_are_those_of_the_baseline_step(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), MIDDLES[name](), nn.Tanh(), nn.Linear(8, 8))
    plain, x = copy.deepcopy(model), torch.randn(64, 8)
    memfit.fit(model, (x,), budget="1MiB", loss_fn=_loss, search_seconds=0.3)
    for each in (plain, model):
        _loss(each(x)).backward()
    for (path, found), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        assert same_bits(found.grad, expected.grad), path


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()
