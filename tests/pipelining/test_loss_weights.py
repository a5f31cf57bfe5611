"""What the loss of a micro-batch counts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from memfit.errors import CaptureError
from memfit.pipelining.loss.scaling import LossReading, loss_shares, read_loss
from memfit.pipelining.loss.traced import TracedLosses, trace_loss
from memfit.pipelining.partition.forward_graph import capture_forward, flatten_inputs

CROSS_ENTROPY = functional.cross_entropy
LOSSES = {
    "mean": lambda o, t: CROSS_ENTROPY(o, t),
    "sum": lambda o, t: CROSS_ENTROPY(o, t, reduction="sum"),
    "smoothed": lambda o, t: CROSS_ENTROPY(o, t, label_smoothing=0.1),
    "own mean": lambda o, t: CROSS_ENTROPY(o, t, reduction="none").mean(),
    "own count": lambda o, t: CROSS_ENTROPY(o, t, reduction="sum") / (t != -100).sum(),
    "own size": lambda o, t: CROSS_ENTROPY(o, t, reduction="sum") / len(t),
    "undone mean": lambda o, t: CROSS_ENTROPY(o, t, reduction="none").mean() * o.shape[0] * 0.5,
    "soft targets": lambda o, t: CROSS_ENTROPY(o, functional.one_hot(t, 5).to(o.dtype) * 0.9 + 0.02),
    "with logits": lambda o, t: functional.binary_cross_entropy_with_logits(o, functional.one_hot(t, 5).to(o.dtype)),
    "margins": lambda o, t: (
        functional.multi_margin_loss(o, t)
        + functional.multilabel_margin_loss(o, functional.pad(t[:, None], (0, 4), value=-1))
    ),
    "scaled": lambda o, t: 0.5 * CROSS_ENTROPY(o, t) + CROSS_ENTROPY(2 * o, t) / 3,
}


def reading_of(model, loss_fn, x: torch.Tensor, target: torch.Tensor) -> LossReading:
    return read_loss(trace_loss(capture_forward(model, (x,), {}, target, loss_fn), [x, target]))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_parts_add_up_to_that_of_the_whole(name: str) -> None:
    torch.manual_seed(0)
    model, loss_fn = torch.nn.Linear(6, 5).double(), LOSSES[name]
    x, target = torch.randn(9, 6).double(), torch.randint(5, (9,))
    if name in ("mean", "sum", "own count", "scaled"):
        target[[0, 1, 5]] = -100
    parts = [(x[:6], target[:6]), (x[6:], target[6:])]
    readings = [reading_of(model, loss_fn, a, b) for a, b in parts]
    if name in ("own size", "undone mean", "soft targets", "scaled"):
        assert not all(reading.is_settled for reading in readings)
        readings = [readings[0].settled(readings[1], 0.5), readings[1].settled(readings[0], 2.0)]
    shares = loss_shares(readings, parts, [6, 3])
    whole = loss_fn(model(x), target)
    together = sum(share * loss_fn(model(a), b) for share, (a, b) in zip(shares, parts, strict=True))
    torch.testing.assert_close(together, whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("loss_fn", "told"),
    [
        (lambda o, t: CROSS_ENTROPY(o, t).sqrt(), "sqrt"),
        (lambda o, t: o.square().sum() / o.detach().abs().sum(), "div"),
    ],
)
def test_other_losses_are_refused(loss_fn, told: str) -> None:
    model, x, t = torch.nn.Linear(6, 5), torch.randn(4, 6), torch.randint(5, (4,))
    with pytest.raises(CaptureError, match=told):
        reading_of(model, loss_fn, x, t)


def test_parts_without_any_target_and_unlike_means_are_refused() -> None:
    model, x, t = torch.nn.Linear(6, 5), torch.randn(4, 6), torch.randint(5, (4,))

    def shares(loss_fn, target):
        parts = [(x[:2], target[:2]), (x[2:], target[2:])]
        readings = [reading_of(model, loss_fn, a, b) for a, b in parts]
        return loss_shares(readings, parts, [2, 2])

    ignored = t.clone()
    ignored[:2] = -100
    with pytest.raises(CaptureError, match="micro-batch 0 has no target"):
        shares(CROSS_ENTROPY, ignored)
    ignored[1] = 0
    with pytest.raises(CaptureError, match="different numbers of things"):
        shares(lambda o, t: CROSS_ENTROPY(o, t) + o.square().mean(), ignored)
    with pytest.raises(CaptureError, match="a mean and a sum"):
        shares(lambda o, t: CROSS_ENTROPY(o, t) + o.square().sum(), t)
    with pytest.raises(CaptureError, match="does not depend on the batch"):
        shares(lambda o, t: o.square().sum() + model.weight.square().sum(), t)
    assert shares(lambda o, t: CROSS_ENTROPY(o, t) + model.weight.square().sum(), t) == [0.5, 0.5]


def test_a_size_is_traced_once() -> None:
    model, x, target = torch.nn.Linear(6, 5), torch.randn(9, 6), torch.randint(5, (9,))
    leaves, spec = flatten_inputs((x,), {}, target)
    traced = TracedLosses(model=model, loss_fn=CROSS_ENTROPY, leaves=leaves, spec=spec)
    others = [x[5:], target[5:]]
    given = traced.of(4, (capture_forward(model, (x[5:],), {}, target[5:], CROSS_ENTROPY), others))
    assert traced.of(4) is given
    assert traced.of(2) is traced.of(2)
    assert list(traced.known) == [4, 2]
