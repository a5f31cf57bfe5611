"""How results of kernels are laid out in memory, where fake tensors tell otherwise.

Fake tensors stand in for a few kernels with Python code that computes the same numbers another way, and lays them out
in another order where operands differ in theirs. A graph made so would write a result over an operand of another
layout, or view what cannot be viewed so. The kernels lay an element-wise result out as their first operand is, and the
gradient of a loss in the order of its axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._prims_common import compute_elementwise_output_strides
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["strides_of_kernels"]

_aten = torch.ops.aten

_LIKE_FIRST = (
    *(_aten.hardtanh_backward.default, _aten.elu_backward.default, _aten.softplus_backward.default),
    *(_aten.hardswish_backward.default, _aten.hardsigmoid_backward.default, _aten.logit_backward.default),
    *(_aten.xlogy.Tensor, _aten.copysign.Tensor),
)
_CONTIGUOUS = (
    *(_aten.mse_loss_backward.default, _aten.smooth_l1_loss_backward.default, _aten.huber_loss_backward.default),
)


@contextmanager
def strides_of_kernels() -> Iterator[None]:
    """While active, fake results are laid out as those of kernels are."""
    ours = dict.fromkeys(_LIKE_FIRST, _like_first) | dict.fromkeys(_CONTIGUOUS, _contiguous)
    added = {op: made for op, made in ours.items() if op not in op_implementations_dict}
    op_implementations_dict.update(added)
    aside = {op: decomposition_table.pop(op) for op in added if op in decomposition_table}  # asked first
    for key in [key for key in FakeTensorMode.cache if key.key[0] in added]:
        del FakeTensorMode.cache[key]  # told before
    try:
        yield
    finally:
        decomposition_table.update(aside)
        for op in added:
            del op_implementations_dict[op]


def _like_first(mode: FakeTensorMode, _: Any, *args: Any, **kwargs: Any) -> Any:
    operands = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
    with mode:
        whole = torch.broadcast_tensors(*operands)
        strides = compute_elementwise_output_strides(*whole)
        return whole[0].new_empty_strided(whole[0].shape, strides, dtype=torch.result_type(*operands))


def _contiguous(mode: FakeTensorMode, _: Any, gradient: Any, result: Any, target: Any, *rest: Any, **more: Any) -> Any:
    with mode:
        shape = torch.broadcast_shapes(result.shape, target.shape)
        return result.new_empty(shape, dtype=torch.result_type(result, target))
