"""Integers and masks that inputs decide have values in a step on fake tensors; all other tensors have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memfit.capture.eager.known_values import KnownValues
from memfit.profiling.baseline_peak import counted_step
from memfit.profiling.memory import allocation_peak
from memfit.torch_compat.core import VALUE_ERRORS, FakeTensorMode

IDS = torch.tensor([[5, 3, 0, 0], [7, 2, 9, 0]])


def asked(question: Callable[..., Any], *tensors: Tensor) -> Any:
    """The answer of code that runs on the fakes of tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known = KnownValues(mode)
    fakes = [known.fake(t) for t in tensors]
    with mode, known:
        return question(*fakes)


def marked(ids: Tensor) -> int:
    """Writes a known number over a copy of known ones."""
    copy = ids.clone()
    copy[:, 0] = 1
    copy.masked_fill_(copy == 0, 4)
    return int(copy.sum())


@pytest.mark.parametrize(
    "question",
    [
        lambda ids: bool((ids != 0).all()),
        lambda ids: int((ids != 0).sum(1).max()),
        lambda ids: (ids != 0).sum(1).tolist(),
        lambda ids: tuple(ids.nonzero().shape),
        lambda ids: int(torch.arange(4)[ids[0] != 0].sum()),
        lambda ids: torch.equal(ids, ids + 0),
        lambda ids: int(F.one_hot(ids, 10).sum()),
        lambda ids: float((ids != 0).float().mean()),
        lambda ids: tuple(torch.unique(ids).shape),
        lambda ids: int(ids.cumsum(1)[0, -1]) + int(torch.tensor(3)),
        marked,
    ],
)
def test_what_inputs_decide_is_known(question: Callable[[Tensor], Any]) -> None:
    before = IDS.clone()
    assert asked(question, IDS) == question(IDS)
    assert torch.equal(IDS, before)


def overwritten(ids: Tensor, data: Tensor) -> int:
    copy = ids.clone()
    row = copy[0]
    copy.copy_(data)
    return int(row.sum())


@pytest.mark.parametrize(
    "question",
    [
        lambda ids, data: bool((data > 0).any()),
        lambda ids, data: int(torch.randint(0, 9, (3,)).sum()),
        lambda ids, data: int(torch.empty(3, dtype=torch.int64).sum()),
        lambda ids, data: float(torch.ones(3).sum()),  # a floating number that no input decides is no mask
        overwritten,
    ],
)
def test_other_values_are_unknown(question: Callable[[Tensor, Tensor], Any]) -> None:
    with pytest.raises(VALUE_ERRORS):
        asked(question, IDS, torch.randn(2, 4))


def test_large_tensors_are_unknown() -> None:
    with pytest.raises(VALUE_ERRORS):
        asked(lambda ids: bool((ids == 0).all()), torch.zeros(1 << 21, dtype=torch.int64))


class Looking(nn.Module):
    """Looks at its ids as language models do: is anything masked, how long is the longest row, which labels count?"""

    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.head = nn.Embedding(50, 256), nn.Linear(256, 50)

    def forward(self, ids: Tensor) -> Tensor:
        real = ids != 0
        longest = int(real.sum(1).max())
        hidden = self.embedded(ids[:, :longest])
        if not real.all():
            hidden = hidden * real[:, :longest, None]
        return F.cross_entropy(self.head(hidden.tanh()[real[:, :longest]]), ids[real])


@pytest.mark.parametrize("padded", [False, True])
def test_the_step_of_a_model_that_looks_at_its_inputs_is_counted(padded: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(1, 50, (64, 32))
    if padded:
        ids[:, 20:] = 0
        ids[::3, 7:] = 0
    model = Looking()
    model(ids).backward()
    for parameter in model.parameters():
        parameter.grad = None
    counted = counted_step(model, (ids,), {}, None, "cpu")
    assert counted is not None
    assert counted.step_bytes == pytest.approx(allocation_peak(lambda: model(ids).backward()), rel=0.02)
