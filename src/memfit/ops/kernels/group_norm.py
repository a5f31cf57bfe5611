"""Group and instance normalisation in two halves: sums over space, then the elements computed from them.

*Source*: the formulas of PyTorch's CPU kernel, which rounds in the same order except for the sums. Each half runs on
one tile of an image after the other (`memfit.passes.group_norm_split`).

Known limits: sums over tiles round in another order than sums over the whole.
"""

from __future__ import annotations

import math

import torch

from memfit.ops.kernels.library import custom_op

__all__ = [
    "gradients_from_products",
    "input_gradient",
    "products_over_space",
    "scale_and_shift",
    "scaled_and_shifted",
    "sums_of_space",
]


@custom_op("sums_of_space(Tensor data, Tensor rows, int samples) -> Tensor")
def sums_of_space(data: torch.Tensor, rows: torch.Tensor, samples: int) -> torch.Tensor:
    """The sums of some samples' data and of its squares over space.

    Args:
        data: of shape [n, C, *].
        rows: indices of these samples, of shape [n, 1, …].
        samples: number of samples in the batch.

    Returns:
        A tensor of shape [2, samples, C], in float64, zero except in these rows.
    """
    count = math.prod(data.shape[2:])
    found = torch.var_mean(data.flatten(2), 2, correction=0)
    variance, mean = (t.to(torch.float64, copy=True) for t in found)
    return _in_rows(torch.stack((mean * count, (variance + mean * mean) * count)), rows, samples)


@custom_op(
    "scale_and_shift(Tensor sums, Tensor weight, Tensor bias, int groups, int count, float eps, ScalarType like, "
    "int axes) -> (Tensor, Tensor, Tensor)"
)
def scale_and_shift(
    sums: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    groups: int,
    count: int,
    eps: float,
    like: torch.dtype,
    axes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale and shift of each channel of each sample, and the moments from which they are computed.

    Args:
        sums: result of `sums_of_space` over all tiles.
        weight: weight per channel.
        bias: bias per channel.
        groups: number of groups of channels.
        count: number of elements of a channel of a sample.
        eps: added to the variance.
        like: dtype of scale and shift.
        axes: number of axes of space.

    Returns:
        Scale and shift, of shape [N, C, 1, …]; mean and inverse standard deviation of each group, [2, N, groups, 1] in
        float64.
    """
    _, samples, channels = sums.shape
    grouped = sums.view(2, samples, groups, -1)
    mean, square = (grouped.sum(-1, keepdim=True) / (count * channels // groups)).unbind()
    invstd = ((square - mean * mean).clamp_(min=0) + eps).rsqrt_()
    scale = invstd * weight.view(groups, -1)
    shift = bias.view(groups, -1) - mean * scale
    shape = (samples, channels, *(1,) * axes)
    made = (t.to(like, copy=True).view(shape) for t in (scale, shift))
    return (*made, torch.stack((mean, invstd)))  # type: ignore[return-value]


@custom_op("scaled_and_shifted(Tensor data, Tensor scale, Tensor shift) -> Tensor")
def scaled_and_shifted(data: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The data, normalised by scale and shift."""
    return torch.addcmul(shift, data, scale)


@custom_op("products_over_space(Tensor gradient, Tensor data, Tensor rows, int samples) -> Tensor")
def products_over_space(gradient: torch.Tensor, data: torch.Tensor, rows: torch.Tensor, samples: int) -> torch.Tensor:
    """The sums over space of some samples' gradient times data, and of the gradient; see `sums_of_space`."""
    space = tuple(range(2, data.dim()))
    found = torch.stack([t.sum(space, dtype=torch.float64) for t in (gradient * data, gradient)])
    return _in_rows(found, rows, samples)


@custom_op(
    "gradients_from_products(Tensor products, Tensor moments, Tensor weight, int count, ScalarType like, int axes) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
def gradients_from_products(
    products: torch.Tensor, moments: torch.Tensor, weight: torch.Tensor, count: int, like: torch.dtype, axes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of weight and bias, per sample, and the numbers from which the input gradient is computed.

    Args:
        products: result of `products_over_space` over all tiles.
        moments: moments from `scale_and_shift`.
        weight: weight per channel.
        count: number of elements of a channel of a sample.
        like: dtype of the results.
        axes: number of axes of space.

    Returns:
        The gradients of weight and bias, [N, C]; the slope that multiplies the data and the offset that is added, [N,
        C, 1, …].
    """
    _, samples, channels = products.shape
    groups = moments.shape[2]
    mean, invstd = moments.unbind()
    grouped = products.view(2, samples, groups, -1)
    of_data, of_gradient = grouped.unbind()
    of_weight = (of_data - of_gradient * mean) * invstd
    data_in_group, gradient_in_group = (grouped * weight.view(groups, -1)).sum(-1, keepdim=True).unbind()
    share = groups / (count * channels)
    slope = (gradient_in_group * mean - data_in_group) * invstd.pow(3) * share
    offset = slope.neg() * mean - gradient_in_group * invstd * share
    parameters = (t.to(like, copy=True).view(samples, channels) for t in (of_weight, of_gradient))
    shape = (samples, channels, *(1,) * axes)
    numbers = (
        t.expand_as(of_data).to(like, copy=True, memory_format=torch.contiguous_format).view(shape)
        for t in (slope, offset)
    )
    return (*parameters, *numbers)  # type: ignore[return-value]


@custom_op(
    "group_norm_input_gradient(Tensor gradient, Tensor data, Tensor scale, Tensor slope, Tensor offset) -> Tensor"
)
def input_gradient(
    gradient: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, slope: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """The gradient of the data that is normalised."""
    return torch.addcmul(offset, data, slope).addcmul_(gradient, scale)


def _in_rows(found: torch.Tensor, rows: torch.Tensor, samples: int) -> torch.Tensor:
    whole = found.new_zeros(2, samples, found.shape[2])
    return whole.index_add_(1, rows.flatten(), found)
