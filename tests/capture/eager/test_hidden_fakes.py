"""Code that asks whether its tensors are fake takes eager mode's path where the memory of a step is counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import memfit
from memfit.capture.eager.hidden_fakes import hidden_fake_tensors
from memfit.profiling.baseline_peak import counted_step
from memfit.tools.training_loop import resident_bytes, step_peak, training_step


def _is_fake(x: torch.Tensor) -> bool:
    return isinstance(x, getattr(torch, "_subclasses").FakeTensor)  # noqa: B009  as transformers asks


class Asks(nn.Module):
    """Keeps its mask unless it can see that the mask hides nothing, or has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.layer(x)
        if mask is None and not _is_fake(y):
            return y
        if mask is not None and not _is_fake(mask) and bool((mask == 1).all()):
            return y
        return y.tanh() * torch.ones_like(y) + y.exp() * y.sigmoid()


def _measured(model: nn.Module, *args: torch.Tensor) -> int:
    step = training_step(model, model, args, {}, loss_fn=_loss, hold_outputs=False)
    device = torch.device("cpu")
    return step_peak(step, device, lambda: resident_bytes(model, args, {}, None, device))


def _loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


@pytest.mark.parametrize("masked", [False, True])
def test_the_estimate_is_of_eager_modes_path(masked: bool) -> None:
    model, x = Asks(), torch.randn(256, 64)
    args = (x, torch.ones(256)) if masked else (x,)
    found = memfit.estimate(model, args, loss_fn=_loss)
    assert found.peak == pytest.approx(_measured(model, *args), rel=0.005)
    assert found.measured == masked


def test_a_step_that_reads_values_is_counted_on_the_path_of_fake_tensors_only() -> None:
    model, args = Asks(), (torch.randn(256, 64), torch.ones(256))
    assert counted_step(model, args, {}, _loss, "cpu") is None
    other = counted_step(model, args, {}, _loss, "cpu", as_eager=False)
    assert other is not None and other.step_bytes > _measured(model, *args)


def test_the_class_is_hidden_from_code_outside_of_torch_and_found_again() -> None:
    with FakeTensorMode():
        fake = torch.empty(2)
    assert _is_fake(fake)
    with pytest.raises(KeyboardInterrupt), hidden_fake_tensors(), hidden_fake_tensors():
        assert not _is_fake(fake)
        with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
            _ = torch._subclasses.Nothing  # type: ignore[attr-defined]
        raise KeyboardInterrupt
    assert _is_fake(fake) and torch._subclasses.FakeTensor is FakeTensor
    assert "__getattr__" not in vars(torch._subclasses)
