"""Losses that look at values, that keep state, or that are bound to another batch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from benchmarks.notices import notices
from memfit.capture.loss.reading import loss_place
from memfit.errors import CaptureError, SpecError


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))


_X = torch.linspace(-2, 2, 96).view(12, 8).sin()
_Y = torch.arange(12) % 6
_SEEN: list[float] = []


def _item(o: Tensor) -> Tensor:
    loss = functional.cross_entropy(o, _Y)
    _SEEN.append(loss.item())
    assert not torch.isnan(loss)
    return loss


def _ctc(o: Tensor) -> Tensor:
    return functional.ctc_loss(
        o.view(6, 2, 6).log_softmax(-1), torch.tensor([[1, 2], [3, 4]]), torch.tensor([6, 6]), torch.tensor([2, 2])
    )


_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "item": _item,
    "ctc": _ctc,
    "mask": lambda o: functional.cross_entropy(o[_Y > 2], _Y[_Y > 2]),
    "mined": lambda o: o[o > o.detach().median()].mean(),
    "numpy": lambda o: o.pow(2).sum() * float(o.detach().numpy().max()),
    "branch": lambda o: o.exp().mean() if o.sum() > 0 else o.pow(2).mean(),
    "complex": lambda o: torch.fft.fft(o).abs()[: int(o.detach().abs().max() * 0) + 5].sum(),
}


@pytest.mark.parametrize("name", _LOSSES)
def test_a_loss_that_looks_at_values_trains_with_the_same_bits(name: str) -> None:
    loss_fn, seen = _LOSSES[name], list(_SEEN)
    plain, fitted = _model(), _model()
    memfit.fit(fitted, (_X,), budget="1GiB", loss_fn=loss_fn)
    assert seen == _SEEN
    for model in (plain, fitted):
        loss_fn(model(_X)).backward()
    for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_target_of_another_batch_size_does_not_stop_training() -> None:
    told: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    bound = _Y
    plain, fitted = _model(), _model()
    memfit.fit(fitted, (_X,), budget="1GiB", loss_fn=lambda o: functional.cross_entropy(o, bound))
    logging.getLogger("memfit").addHandler(listener)
    try:
        for model in (plain, fitted):
            functional.cross_entropy(model(_X[:5]), _Y[:5]).backward()
    finally:
        logging.getLogger("memfit").removeHandler(listener)
    assert "functional.cross_entropy(o, bound)" in "".join(told)
    for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize(
    ("loss_fn", "told"),
    [
        (lambda o: functional.cross_entropy(o, _Y[:3]), r"test_on_values.py:\d+"),
        (lambda o: (o.sum(), o), "return the tensor that backward is called on"),
        (
            lambda o: o.sum().detach(),
            r"does not depend on the model's output.*<lambda> at .*test_on_values.py:\d+",
        ),
        (lambda o: o, r"<lambda> at .*test_on_values.py:\d+ returned: \(.*reduce it"),
        (
            lambda o: o.detach().sum().requires_grad_(),
            "no gradient reaches a parameter.*detached, in the model or in loss",
        ),
        (lambda o: 1.5, "Python number has no gradient"),
    ],
)
def test_a_loss_that_cannot_be_used_is_told(loss_fn: Callable[[Tensor], Tensor], told: str) -> None:
    with pytest.raises(CaptureError, match=told):
        memfit.fit(_model(), (_X,), budget="1GiB", loss_fn=loss_fn)


@pytest.mark.parametrize(
    ("loss_fn", "place"),
    [
        (None, "the model's own loss"),
        (functional.mse_loss, "mse_loss"),
        (functools.partial(functional.mse_loss, reduction="sum"), "mse_loss"),
        (nn.MSELoss(), "MSELoss"),
    ],
)
def test_a_loss_of_torchs_own_is_named_without_a_line(loss_fn: object, place: str) -> None:
    assert loss_place(loss_fn) == place


def test_inputs_that_the_model_does_not_take_are_told() -> None:
    with pytest.raises(SpecError, match=r"pass \(x,\)"):
        memfit.fit(_model(), _X, budget="1GiB")  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="does not take these inputs"):
        memfit.fit(_model(), (), budget="1GiB")


def test_a_loss_on_values_over_a_module_that_assigns_its_buffers() -> None:
    """Capturing leaves fake buffers on the module; the loss is read on what the module makes with its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), torch.nn.utils.parametrizations.spectral_norm(nn.Linear(16, 5)))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def hard_examples(output: Tensor) -> Tensor:
        each = functional.cross_entropy(output, output.argmin(1), reduction="none")
        return each[each > each.mean()].mean()

    with notices() as told:
        memfit.fit(model, (torch.randn(8, 6),), budget="1GiB", loss_fn=hard_examples)
    assert not told
    for name, buffer in model.named_buffers():
        assert type(buffer) is Tensor and torch.equal(buffer, before[name])
