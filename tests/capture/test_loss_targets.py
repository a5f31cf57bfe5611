"""A loss of an output and a target: planned with the target where it is given, outside of the model where it is not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memfit
from memfit.capture.loss.reading import loss_name, loss_place
from memfit.capture.loss.targets import takes_target

MiB = 2**20


def own_loss(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return F.mse_loss(output, F.one_hot(target, 10).float()) * weight


@pytest.mark.parametrize(
    ("loss", "takes"),
    [
        (F.cross_entropy, True),
        (nn.CrossEntropyLoss(), True),
        (own_loss, True),
        (functools.partial(own_loss, weight=2.0), True),
        (lambda output: output.sum(), False),
        (lambda output, target=None: output.sum(), False),
        (torch.sum, False),
    ],
    ids=["function", "module", "own", "partial", "output", "default", "built-in"],
)
def test_a_loss_that_needs_two_arguments_takes_a_target(loss: Callable[..., Any], takes: bool) -> None:
    assert takes_target(loss) == takes


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 10))


def batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 64), torch.randint(10, (rows,))


def trained(model: nn.Module, loss: Callable[..., Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in (512, 512, 300, 1):
        x, y = batch(rows)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(), own_loss], ids=["function", "module", "own"])
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "with inputs"])
def test_batches_of_other_sizes_train_the_same_weights(loss: Callable[..., Any], lazy: bool) -> None:
    x, y = batch(512)
    plain = trained(net(), loss)
    model = net()
    if lazy:
        memfit.fit(model, budget="1.2MiB", loss_fn=loss, search_seconds=0.1)
    else:
        memfit.fit(model, (x,), budget="1.2MiB", loss_fn=loss, target=y, search_seconds=0.1)
    assert all(map(torch.equal, trained(model, loss), plain))


def test_the_loss_is_part_of_the_step_where_its_target_is_given() -> None:
    x, y = batch(512)
    plan = memfit.plan(net(), (x,), budget="1.2MiB", loss_fn=own_loss, target=y, search_seconds=0.1)
    alone = memfit.plan(net(), (x,), budget="1.2MiB", loss_fn=lambda out: own_loss(out, y), search_seconds=0.1)
    assert plan.predicted.peak_bytes == alone.predicted.peak_bytes
    assert plan.planned is not None
    loss = plan.planned.request.loss_fn
    assert loss_name(loss) == "own_loss" and "own_loss" in loss_place(loss) and "test_loss_targets" in loss_place(loss)


@pytest.mark.parametrize("loss", [None, lambda output: output.sum()], ids=["no loss", "of the output"])
def test_a_target_without_a_loss_that_takes_it_is_refused(loss: Any) -> None:
    x, y = batch(4)
    with pytest.raises(memfit.SpecError, match=r"a target is for a loss_fn that takes \(output, target\)"):
        memfit.fit(net(), (x,), budget="1GiB", loss_fn=loss, target=y)
