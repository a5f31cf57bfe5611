"""memfit's own kernels are ops of torch: their schemas are true, and modes, fake tensors and direct calls agree."""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import memfit.capture.eager.gradients_on_values
import memfit.capture.eager.masked_fills
import memfit.capture.eager.quantiles
import memfit.passes.pass_list  # noqa: F401
from memfit.ops.kernels import batch_norm, convolution, dropout, group_norm, row_products
from memfit.ops.kernels.handed_on import handed_on
from memfit.ops.kernels.library import OPS, direct
from memfit.tools.executed_ops import ExecutedOps
from memfit.torch_compat.core import OpOverload

_memfit = torch.ops.memfit


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _positive(*shape: int) -> torch.Tensor:
    return _numbers(*shape).square() + 1


def _convolved() -> tuple[Any, ...]:
    settings = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return _numbers(*DATA), _numbers(3, 2, 6, 5), _numbers(4, 2, 3, 3), *settings


DATA = (3, 4, 6, 5)
CHANNEL, SAMPLE = (4,), (3, 4, 1, 1)
FROM_SUMS = (DATA, DATA, CHANNEL, CHANNEL, CHANNEL, CHANNEL, CHANNEL)

SAMPLES: dict[Any, Callable[[], tuple[Any, ...]]] = {
    convolution.convolution_input_gradient: _convolved,
    convolution.input_gradient_beside_stand_in: _convolved,
    convolution.convolution_input_slices: lambda: (
        *_convolved(),
        [[0, 1], [1, 2]],
    ),
    batch_norm.sums_of_data: lambda: (_numbers(*DATA),),
    batch_norm.statistics_from_sums: lambda: (_positive(2, 4), _numbers(4), _positive(4), 90, 0.1, 1e-5, torch.float32),
    batch_norm.input_gradient_from_sums: lambda: (*starmap(_positive, FROM_SUMS), 90),
    batch_norm.input_gradient_over_data: lambda: (*starmap(_positive, FROM_SUMS), 90),
    batch_norm.normalise: lambda: (_numbers(*DATA), *(_positive(4) for _ in range(4))),
    batch_norm.normalise_over_data: lambda: (_numbers(*DATA), *(_positive(4) for _ in range(4))),
    group_norm.sums_of_space: lambda: (_numbers(*DATA), torch.arange(3).view(3, 1), 5),
    group_norm.scale_and_shift: lambda: (_positive(2, 3, 4), _numbers(4), _numbers(4), 2, 30, 1e-5, torch.float32, 2),
    group_norm.scaled_and_shifted: lambda: tuple(starmap(_positive, (DATA, SAMPLE, SAMPLE))),
    group_norm.products_over_space: lambda: (_numbers(*DATA), _numbers(*DATA), torch.arange(3).view(3, 1), 5),
    group_norm.gradients_from_products: lambda: (
        *(_numbers(2, 3, 4), _positive(2, 3, 2, 1), _numbers(4)),
        *(30, torch.float32, 2),
    ),
    group_norm.input_gradient: lambda: tuple(starmap(_positive, (DATA, DATA, SAMPLE, SAMPLE, SAMPLE))),
    row_products.product_over_rows: lambda: (_numbers(7, 3), _numbers(7, 5)),
    row_products.share_of_mean: lambda: (_numbers(), _positive()),
    dropout.masked: lambda: (_numbers(*DATA), torch.ones(DATA, dtype=torch.bool), 1.25),
    dropout.masked_over_data: lambda: (_numbers(*DATA), torch.ones(DATA, dtype=torch.bool), 1.25),
    _memfit.masked_fill_gradient.default: lambda: (_numbers(*DATA), _numbers(*DATA) > 0),
    _memfit.quantile_gradient.default: lambda: (
        *(_numbers(3, 6), _numbers(3, 5, 6), _numbers().sigmoid()),
        *(1, False, "linear", False),
    ),
}
"""Arguments of each op."""

ELSEWHERE = {
    batch_norm.cudnn_batch_norm,  # on CUDA; tests/passes/test_cudnn_batch_norm.py
    batch_norm.cudnn_batch_norm_updating,
    batch_norm.cudnn_batch_norm_backward,
    dropout.drawn,  # random; tests/capture/eager/test_dropout.py
    handed_on,  # a view on purpose, which its schema hides from AOTAutograd; tests/capture/gradients
}


def _cloned(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def test_each_op_has_arguments() -> None:
    of_values = {op for op in OPS if op._schema.arguments[2:] and op._schema.arguments[2].name == "result"}
    assert set(OPS) == {*SAMPLES, *ELSEWHERE, *of_values}  # gradients on values: test_gradients_on_values.py


@pytest.mark.smoke
@pytest.mark.parametrize("op", SAMPLES, ids=lambda op: str(op._opname))
def test_the_schema_is_true_and_fake_tensors_know_the_results(op: OpOverload) -> None:
    torch.manual_seed(0)
    torch.library.opcheck(op, SAMPLES[op](), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("op", SAMPLES, ids=lambda op: str(op._opname))
def test_a_direct_call_is_the_call_and_a_mode_counts_it_once(op: OpOverload) -> None:
    torch.manual_seed(0)
    args = SAMPLES[op]()
    whole, at_once = op(*_cloned(args)), direct(op)(*_cloned(args))
    for one, other in zip(*((r if isinstance(r, tuple | list) else (r,)) for r in (whole, at_once)), strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride() and one.dtype is other.dtype
    again = _cloned(args)
    with ExecutedOps() as counted:
        direct(op)(*again)
    assert sum(counted.counts.values()) == 1


def test_calls_in_lowered_graphs_do_not_pass_the_dispatcher() -> None:
    torch.manual_seed(0)
    args = SAMPLES[batch_norm.normalise]()
    with torch.profiler.profile() as profile:
        direct(batch_norm.normalise)(*args)
    assert not any(event.name.startswith("memfit::") for event in profile.events())


def test_products_have_flops() -> None:
    counted = FlopCounterMode(display=False)
    with counted:
        row_products.product_over_rows(_numbers(7, 3), _numbers(7, 5))
        convolution.convolution_input_gradient(*SAMPLES[convolution.convolution_input_gradient]())
    assert counted.get_total_flops() == 2 * 7 * 3 * 5 + 2 * 3 * 4 * 6 * 5 * 2 * 9


def test_slices_of_one_sample_have_memory_of_their_own() -> None:
    gradient, data, *rest = _convolved()
    slices = convolution.convolution_input_slices(gradient[:1], data[:1], *rest, [[0, 1], [1, 2]])
    assert len({part.untyped_storage().data_ptr() for part in slices}) == 2


def test_the_gradient_of_one_number_has_memory_of_its_own() -> None:
    gradient = torch.ones(1)  # torch's formula of `cumprod` returns it
    found = _memfit.cumprod_gradient.default(gradient, torch.ones(1), torch.ones(1), 0, None)
    assert torch.equal(found, gradient) and found.data_ptr() != gradient.data_ptr()
