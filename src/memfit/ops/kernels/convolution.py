"""The input half of a convolution's backward pass, which needs the input's shape and not its values.

`aten.convolution_backward` takes the input for both gradients, so autograd saves it for both. Most backends use its
values for the weight gradient only. Here the input half takes a tensor with the input's metadata and no memory.

Known limits: a backend that unfolds the input needs memory for it; such a backend gets uninitialised memory.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.ops.kernels.library import custom_op, direct
from memfit.torch_compat.core import conv_backend, suggest_memory_format

__all__ = [
    "convolution_input_gradient",
    "convolution_input_slices",
    "input_gradient_beside_stand_in",
    "input_half",
    "make_metadata_only",
    "takes_input_shape_only",
]

_aten = torch.ops.aten


_WITHOUT_INPUT = ("Mkldnn", "Cudnn", "CudnnTranspose")
"""Convolution backends that make the input gradient without reading the input; other backends unfold the input."""


_INPUT_GRADIENT = (
    "(Tensor grad_output, Tensor metadata_only, Tensor weight, SymInt[]? bias_sizes, SymInt[] stride, "
    "SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups{}) -> Tensor{}"
)


def _as_backward(_: Any, *args: Any) -> Any:
    return _aten.convolution_backward.default, (*args[:10], [True, False, False]), (args[1], None, None)


@custom_op(f"convolution_input_gradient{_INPUT_GRADIENT.format('', '')}", flops_of=_as_backward)
def convolution_input_gradient(
    grad_output: torch.Tensor, metadata_only: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """The input half of `convolution_backward`; `metadata_only` gives shape and strides of the input, not values.

    The kernel depends on shape and layout, so a slice may get a kernel that reads the input and then needs memory for
    it.
    """
    if not takes_input_shape_only(metadata_only, weight, *rest):
        return _beside_stand_in(grad_output, metadata_only, weight, *rest)
    return input_half(grad_output, metadata_only, weight, *rest)


def input_half(grad_output: torch.Tensor, data: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The input half where the kernel is known to use only the shape of the input, as for whole operands."""
    result: torch.Tensor = _aten.convolution_backward.default(grad_output, data, weight, *rest, [True, False, False])[0]
    return result


@custom_op(f"input_gradient_beside_stand_in{_INPUT_GRADIENT.format('', '')}", flops_of=_as_backward)
def input_gradient_beside_stand_in(*args: Any) -> torch.Tensor:
    """The input half with a kernel that needs memory for the input although it does not use the values."""
    return _beside_stand_in(*args)


def _beside_stand_in(
    grad_output: torch.Tensor, metadata_only: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> torch.Tensor:
    stand_in = torch.empty_strided(
        metadata_only.shape, metadata_only.stride(), dtype=metadata_only.dtype, device=grad_output.device
    )
    return input_half(grad_output, stand_in, weight, *rest)


def make_metadata_only(like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A tensor with the metadata of `like` and no memory behind it."""
    metadata_only = torch.empty_strided(
        tuple(like.shape), like.stride(), dtype=like.dtype, device=device or like.device
    )
    metadata_only.untyped_storage().resize_(0)
    return metadata_only


def takes_input_shape_only(data: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *rest: Any) -> bool:
    """Whether the kernel that makes the input gradient uses only the input's shape."""
    # A one-dimensional convolution runs as a two-dimensional one of a view, and a view needs memory.
    if data.dim() < 4 or not _takes_metadata_only(data, weight):
        return False
    backend = conv_backend(data, weight, None, *rest, bias_sizes)
    # torch has no name in Python for the transposed kernel of oneDNN.
    return backend in _WITHOUT_INPUT or (backend == "???" and rest[3] and data.device.type == "cpu")


def _takes_metadata_only(data: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether a kernel does not touch the operand's memory: it would copy an operand of an unsuitable layout."""
    layout = suggest_memory_format(data)
    return data.is_contiguous(memory_format=layout) and all(suggest_memory_format(t) == layout for t in others)


@custom_op(f"convolution_input_slices{_INPUT_GRADIENT.format(', int[][] cuts', '[]')}", flops_of=_as_backward)
def convolution_input_slices(
    gradient: torch.Tensor, metadata_only: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> list[torch.Tensor]:
    """`convolution_input_gradient`, cut into slices of its channels; the last argument gives the slices."""
    *settings, cuts = rest
    whole = direct(convolution_input_gradient)(gradient, metadata_only, weight, *settings)
    if whole.shape[0] == 1:  # slices of one sample would be views, and all of them would hold the whole
        return [whole[:, start:stop].clone(memory_format=torch.contiguous_format) for start, stop in cuts]
    return [whole[:, start:stop].contiguous() for start, stop in cuts]
