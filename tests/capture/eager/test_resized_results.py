"""Fake results take the memory of results that kernels resize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memfit
from memfit.capture.eager.fake_strides import strides_of_kernels
from memfit.capture.eager.resized_results import elements_before_resizing
from memfit.torch_compat.core import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    disable_current_modes,
    pytree,
)
from tests.op_database import samples_of, torchs_ops


class Reduced(TorchDispatchMode):
    """Compares the memory of reduced results with that of fake results."""

    def __init__(self) -> None:
        super().__init__()
        self.larger: set[OpOverload] = set()
        self.compared: set[OpOverload] = set()
        self.wrong: dict[OpOverload, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(a.name == "reduction" for a in func._schema.arguments) and isinstance(made, Tensor) and made.numel():
            with disable_current_modes(), FakeTensorMode() as mode, strides_of_kernels():
                fakes = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs or {}))
                fake = func(*fakes[0], **fakes[1])
            sizes = made.untyped_storage().nbytes(), fake.untyped_storage().nbytes()
            self.compared.add(func)
            if sizes[0] > made.numel() * made.element_size():
                self.larger.add(func)
            if sizes[0] != sizes[1]:
                self.wrong[func] = sizes
        return made


@pytest.mark.filterwarnings("ignore")
def test_reduced_losses_of_torchs_op_database_take_the_memory_that_kernels_leave_them() -> None:
    torch.manual_seed(0)
    found = Reduced()
    for op in [op for op in torchs_ops() if "loss" in op.name or "entropy" in op.name]:
        for sample in samples_of(op, torch.float32, requires_grad=False):
            with found:
                op(sample.input, *sample.args, **sample.kwargs)
    assert len(found.compared) > 6 and torch.ops.aten.mse_loss.default in found.larger
    assert not found.wrong


def test_ops_that_resize_nothing() -> None:
    x = torch.randn(4, 5)
    assert elements_before_resizing(torch.ops.aten.mse_loss.default, (x, x, 0), {}) == 0
    assert elements_before_resizing(torch.ops.aten.mul.Tensor, (x, x), {}) == 0
    assert elements_before_resizing(torch.ops.aten.mse_loss.default, (x, x, bytearray()), {}) == 0  # no hash
    assert elements_before_resizing(torch.ops.aten.mse_loss.default, (x, x), {}) == x.numel()


def test_operands_of_several_dtypes_and_devices_that_are_not_here() -> None:
    x = torch.randn(8, 8)
    wide = x.double()
    real = torch.ops.aten.mse_loss.default(x, wide)
    with strides_of_kernels(), FakeTensorMode() as mode:
        fake = torch.ops.aten.mse_loss.default(mode.from_tensor(x), mode.from_tensor(wide))
        elsewhere = FakeTensor(mode, torch.empty(8, 8, device="meta"), torch.device("cuda:0"))
        assert torch.ops.aten.mse_loss.default(elsewhere, elsewhere).shape == ()
    assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes() == 8 * 8 * 8


class _WithLosses(nn.Module):
    """A model that returns its loss, as models of Hugging Face do."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(16, 16), loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.layer(x).sigmoid()
        return self.loss(y, target) + F.mse_loss(2 * y, target)


@pytest.mark.parametrize(
    "loss", [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss, F.huber_loss, F.l1_loss]
)
def test_the_peak_of_a_model_with_losses_inside_is_predicted(loss: Callable[..., Tensor]) -> None:
    args = torch.randn(1024, 16), torch.rand(1024, 16)
    plan = memfit.plan(_WithLosses(loss), args, budget="1GiB", loss_fn=lambda total: total, search_seconds=0.1)
    assert plan.measured_peak_bytes == plan.predicted.peak_bytes
