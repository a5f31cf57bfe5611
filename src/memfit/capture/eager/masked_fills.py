"""The gradient of a learned fill value of `masked_fill`, by eager's own formula, while a graph is made.

Eager PyTorch selects the masked elements of the output gradient and adds them up. Fake tensors do not know the number
of masked elements, so for them PyTorch sets all other elements to zero and sums the whole tensor, in another order. So
here the gradient is a separate op, whose kernel looks at the mask.

*Idea*: that of `memfit.capture.eager.gradients_on_values`.

Known limits: second derivatives are not available. In-place fills keep the formula of fake tensors; the proof compares
the bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from memfit.capture.eager.python_kernels import kernels_in_place
from memfit.ops.kernels.library import custom_op
from memfit.torch_compat.core import AutoDispatchBelowAutograd, DispatchKey

__all__ = ["masked_fills_of_eager"]

_aten = torch.ops.aten


def _fake(gradient: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return gradient.new_empty(())


@custom_op("masked_fill_gradient(Tensor gradient, Tensor mask) -> Tensor", fake=_fake)
def _gradient(gradient: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return gradient.masked_select(mask).sum()


class _Filled(torch.autograd.Function):
    """A masked fill that autograd records with `masked_fill_gradient`."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Any:
        with AutoDispatchBelowAutograd():
            result = _aten.masked_fill.Tensor(data, mask, value)
        ctx.save_for_backward(mask)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (mask,) = gradients, ctx.saved_tensors
        of_data = gradient.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        of_value = _gradient(gradient, mask) if ctx.needs_input_grad[2] else None
        return of_data, None, of_value


def masked_fills_of_eager() -> AbstractContextManager[None]:
    """While active, fills with a learned number are recorded with the gradient that this number has in eager mode."""
    return kernels_in_place({_aten.masked_fill.Tensor: _Filled.apply}, DispatchKey.Autograd)
