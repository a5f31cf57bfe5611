"""Batch normalisation in less memory, with the same bits.

The backward pass has three tensors of equal size in memory: gradient-in, input, gradient-out; the CPU kernel allocates
a hidden fourth. Channels do not depend on each other, so the kernel can run on a few of them at a time and write its
result over the incoming gradient: two tensors and a chunk. The smaller chunks also stay in the cache. The forward
kernel computes its statistics before it writes, so it can write over its input.

The profiler compares chunks of each shape with the whole kernel before a plan relies on them (`memfit.ops.chunking`).

With the lever `tile`, the results can also be computed separately. In the forward pass, sums over the batch
(`sums_of_data`) give the statistics (`statistics_from_sums`), with which the data is normalised sample by sample
(`normalise`). In the backward pass, the sums are the gradients of weight and bias, and the
gradient of the input is computed from them sample by sample (`input_gradient_from_sums`).

On CUDA, eager PyTorch uses cuDNN's kernels for most inputs (`memfit.passes.cudnn_batch_norm` puts them into the graph).

Known limits: chunks are for contiguous float32 tensors on CPU, in training mode; variances from sums lose precision
where means are many thousand times as large as standard deviations.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.ops.kernels.library import custom_op
from memfit.torch_compat.core import suggest_memory_format

__all__ = [
    "backward_in_chunks",
    "backward_over_data",
    "backward_over_gradient",
    "cudnn_batch_norm",
    "cudnn_batch_norm_backward",
    "cudnn_batch_norm_updating",
    "forward_over_input",
    "input_gradient_from_sums",
    "input_gradient_over_data",
    "normalise",
    "normalise_over_data",
    "chunks_of",
    "statistics_from_sums",
    "sums_of_data",
    "takes_channels",
]

_aten = torch.ops.aten
_LEAST_CHUNKS = 4
_CHUNK_BYTES = 2 << 20
"""Size of each of the four tensors of a chunk, so that they stay in the cache."""

_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def takes_channels(args: tuple[Any, ...], gradient: object, data: object) -> bool:
    """Whether `native_batch_norm_backward(*args)` can run in chunks of channels, given the metadata of its operands."""
    if not isinstance(gradient, torch.Tensor) or not isinstance(data, torch.Tensor):
        return False
    return (
        args[7] is True
        and list(args[9]) == [True, True, True]
        and data.dim() >= 3
        and data.shape[1] >= _LEAST_CHUNKS
        and all(t.device.type == "cpu" and t.dtype is torch.float32 and t.is_contiguous() for t in (gradient, data))
    )


def chunks_of(data: torch.Tensor) -> int:
    """The number of chunks in which the backward kernel should run."""
    chunks = max(_LEAST_CHUNKS, data.numel() * data.element_size() // _CHUNK_BYTES)
    size = -(-data.shape[1] // min(chunks, data.shape[1]))
    return -(-data.shape[1] // size)


def backward_in_chunks(gradient: torch.Tensor, data: torch.Tensor, *rest: Any, chunks: int) -> _Gradients:
    """Runs `native_batch_norm_backward` on a few channels at a time."""
    return _backward(chunks, gradient, data, torch.empty_like(data), *rest)


def backward_over_gradient(gradient: torch.Tensor, data: torch.Tensor, *rest: Any, chunks: int) -> _Gradients:
    """Runs the backward kernel in chunks, and writes the input gradient over the output gradient."""
    return _backward(chunks, gradient, data, gradient, *rest)


def backward_over_data(gradient: torch.Tensor, data: torch.Tensor, *rest: Any, chunks: int) -> _Gradients:
    """Runs the backward kernel in chunks, and writes the input gradient over the input."""
    return _backward(chunks, gradient, data, data, *rest)


def _backward(
    chunks: int,
    gradient: torch.Tensor,
    data: torch.Tensor,
    result: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    training: bool,
    eps: float,
    mask: list[bool],
) -> _Gradients:
    channels = data.shape[1]
    of_weight, of_bias = torch.empty_like(mean), torch.empty_like(mean)
    step = -(-channels // chunks)
    for start in range(0, channels, step):
        here = slice(start, start + step)
        chunk = _aten.native_batch_norm_backward.default(
            gradient[:, here].contiguous(),
            data[:, here].contiguous(),
            None if weight is None else weight[here],
            *(None, None, mean[here], invstd[here], training, eps, mask),
        )
        result[:, here], of_weight[here], of_bias[here] = chunk
        del chunk
    return result, of_weight, of_bias


def forward_over_input(
    data: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor | None, ...]:
    """Runs `_native_batch_norm_legit_functional` over its input; without running statistics, it returns none."""
    mean, invstd = data.new_empty(data.shape[1]), data.new_empty(data.shape[1])
    new_mean = None if running_mean is None else running_mean.clone()
    new_var = None if running_var is None else running_var.clone()
    _aten.native_batch_norm.out(
        *(data, weight, bias, new_mean, new_var, training, momentum, eps), out=data, save_mean=mean, save_invstd=invstd
    )
    return data, mean, invstd, new_mean, new_var


_CUDNN = (
    "(Tensor data, Tensor weight, Tensor bias, Tensor{} running_mean, Tensor{} running_var, bool training, "
    "float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor{}, Tensor{}, Tensor)"
)


@custom_op(f"cudnn_batch_norm{_CUDNN.format('?', '?', '?', '?')}")
def cudnn_batch_norm(
    data: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor | None, ...]:
    """Runs the cuDNN kernel and leaves the running statistics unchanged.

    Returns:
        Result, mean, inverse standard deviation, the new running statistics if training makes any, and the reserve.
    """
    if not training:
        result, mean, invstd, _, _, reserve = _cudnn_batch_norm(
            data, weight, bias, running_mean, running_var, training, momentum, eps
        )
        return result, mean, invstd, None, None, reserve
    new_mean = None if running_mean is None else running_mean.clone()
    new_var = None if running_var is None else running_var.clone()
    return _cudnn_batch_norm(data, weight, bias, new_mean, new_var, training, momentum, eps)


@custom_op(f"cudnn_batch_norm_updating{_CUDNN.format('(a!)?', '(b!)?', '(a!)?', '(b!)?')}")
def cudnn_batch_norm_updating(data: torch.Tensor, *rest: Any) -> tuple[torch.Tensor | None, ...]:
    """Runs the cuDNN kernel and writes the new running statistics over the old ones."""
    return _cudnn_batch_norm(data, *rest)


def _cudnn_batch_norm(
    data: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor | None, ...]:
    result, mean, invstd, reserve = _aten.cudnn_batch_norm.default(
        data.contiguous(memory_format=suggest_memory_format(data)), weight, bias, running_mean, running_var, *rest
    )
    return result, mean, invstd, running_mean, running_var, reserve


@custom_op(
    "cudnn_batch_norm_backward(Tensor gradient, Tensor data, Tensor weight, Tensor mean, Tensor invstd, float eps, "
    "Tensor reserve) -> (Tensor, Tensor, Tensor)"
)
def cudnn_batch_norm_backward(
    gradient: torch.Tensor,
    data: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
    reserve: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The gradients of data, weight and bias, in training mode."""
    layout = suggest_memory_format(data)
    operands = data.contiguous(memory_format=layout), gradient.contiguous(memory_format=layout)
    found: tuple[torch.Tensor, ...] = _aten.cudnn_batch_norm_backward.default(
        *operands, weight, None, None, mean, invstd, eps, reserve
    )
    return found


@custom_op("sums_of_data(Tensor data) -> Tensor")
def sums_of_data(data: torch.Tensor) -> torch.Tensor:
    """Sums of the data and of its squares, per channel, in float64; sums of slices add up to the sums of the whole.

    Args:
        data: of shape [N, C, *].

    Returns:
        A tensor of shape [2, C].
    """
    mean, variance = (t.double() for t in _aten.batch_norm_update_stats.default(data, None, None, 0.0))
    count = data.numel() // data.shape[1]
    return torch.stack((mean * count, (variance + mean * mean) * count))


@custom_op(
    "statistics_from_sums(Tensor sums, Tensor? running_mean, Tensor? running_var, int count, float momentum, float eps,"
    " ScalarType dtype) -> (Tensor, Tensor, Tensor?, Tensor?)"
)
def statistics_from_sums(
    sums: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    count: int,
    momentum: float,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, ...]:
    """Mean and inverse standard deviation per channel, and the new running statistics if there are any.

    Args:
        sums: result of `sums_of_data` over all samples.
        running_mean: running mean per channel.
        running_var: running variance per channel.
        count: number of elements per channel in all samples.
        momentum: share of the new statistics in the running ones.
        eps: added to the variance.
        dtype: dtype of mean and inverse standard deviation.
    """
    mean, square = (sums / count).unbind()
    variance = (square - mean * mean).clamp_(min=0)
    invstd = (variance + eps).rsqrt_()
    new_mean = new_var = None
    if running_mean is not None:
        new_mean = (running_mean * (1 - momentum) + mean * momentum).to(running_mean.dtype)
    if running_var is not None:
        unbiased = momentum * count / (count - 1)
        new_var = (running_var * (1 - momentum) + variance * unbiased).to(running_var.dtype)
    return mean.to(dtype), invstd.to(dtype), new_mean, new_var


_FROM_SUMS = (
    "(Tensor gradient, Tensor{} data, Tensor? weight, Tensor mean, Tensor invstd, Tensor of_weight, Tensor of_bias, "
    "int count) -> Tensor{}"
)


@custom_op(f"input_gradient_from_sums{_FROM_SUMS.format('', '')}")
def input_gradient_from_sums(
    gradient: torch.Tensor,
    data: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    of_weight: torch.Tensor,
    of_bias: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """The input gradient of batch normalisation, given the gradients of weight and bias.

    Args:
        gradient: samples of the output gradient.
        data: the same samples of the input.
        weight: weight per channel, None for ones.
        mean: mean per channel.
        invstd: inverse standard deviation per channel.
        of_weight: gradient of the weight, over all samples.
        of_bias: gradient of the bias, over all samples.
        count: number of elements per channel in all samples.
    """
    return _from_sums(torch.sub(data, _over(mean, data)), gradient, weight, invstd, of_weight, of_bias, count)


@custom_op(f"input_gradient_from_sums_{_FROM_SUMS.format('(a!)', '(a!)')}")
def input_gradient_over_data(
    gradient: torch.Tensor, data: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """Computes the gradient as `input_gradient_from_sums` does, in place over the input."""
    return _from_sums(data.sub_(_over(mean, data)), gradient, weight, *rest)


def _from_sums(
    centred: torch.Tensor,
    gradient: torch.Tensor,
    weight: torch.Tensor | None,
    invstd: torch.Tensor,
    of_weight: torch.Tensor,
    of_bias: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """Computes the input gradient in place over the centred data."""
    slope = _over(of_weight * invstd / count, centred)
    torch.addcmul(_over(of_bias / count, centred), centred, slope, out=centred)
    torch.sub(gradient, centred, out=centred)
    return centred.mul_(_over(invstd if weight is None else invstd * weight, centred))


def _over(per_channel: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return per_channel.view(1, -1, *(1,) * (like.dim() - 2))


_NORMALISE = "(Tensor{} data, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias) -> Tensor{}"


@custom_op(f"normalise{_NORMALISE.format('', '')}")
def normalise(data: torch.Tensor, *statistics: Any) -> torch.Tensor:
    """Normalises data with saved statistics: mean and inverse standard deviation, then weight and bias."""
    shift, scale = _shift_and_scale(data, *statistics)
    return torch.addcmul(shift, data, scale)


@custom_op(f"normalise_{_NORMALISE.format('(a!)', '(a!)')}")
def normalise_over_data(data: torch.Tensor, *statistics: Any) -> torch.Tensor:
    """Normalises as `normalise` does, in place over the data."""
    shift, scale = _shift_and_scale(data, *statistics)
    return torch.addcmul(shift, data, scale, out=data)


def _shift_and_scale(
    data: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shift that the kernel adds to the data and the scale that it multiplies by, rounded as the kernel rounds."""
    scale = invstd if weight is None else invstd * weight
    shift = torch.addcmul(torch.zeros_like(mean) if bias is None else bias, mean, scale, value=-1)
    shape = (1, -1, *(1,) * (data.dim() - 2))
    return shift.view(shape), scale.view(shape)
