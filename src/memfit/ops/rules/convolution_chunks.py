"""Convolutions and their gradients in chunks: samples of a batch, or channels of a weight gradient.

CPU convolution kernels copy their operands and results into layouts of their own, so that an op takes twice the visible
memory. Samples of a batch do not depend on each other, nor do channels of a weight gradient: the op can run on a few of
them at a time. The copies are then small, stay in the cache and are reused by the allocator, which often makes the op
faster as well.

Known limits: CPU only; samples must be the outermost axis, then channels. Sums over the batch (weight gradients) are
cut along channels instead, since another order of the sum gives other bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from memfit.ops.kernels.convolution import convolution_input_gradient, convolution_input_slices, make_metadata_only
from memfit.ops.kernels.library import direct

__all__ = [
    "channel_counts",
    "convolution_in_chunks",
    "input_gradient_in_chunks",
    "input_slices_in_chunks",
    "sample_counts",
    "weight_gradient_in_chunks",
]

_aten = torch.ops.aten
_CHUNK_BYTES = 8 << 20
"""Approximate size of the largest operand of a chunk: it fits a cache, and malloc reuses its memory."""

_FINE_BYTES = 2 << 20
"""Approximate size of the largest operand of a chunk where memory is scarcest."""

_LARGE_IN_FINE = 4
"""Samples are cut into such fine chunks only if an operand is larger than this many ordinary chunks."""

_COARSE_PARTS = 4
"""A low number of chunks for weight gradients, because every chunk reads the smaller operand again."""

_LARGE_IN_CHUNKS = 2.5
"""The smaller operand, read once per chunk of the larger one, is cut too if it is larger than this many chunks."""

_BLOCKS = (16, 8)
"""Channels are cut at multiples of the kernels' block sizes: of the first size where it gives enough chunks."""


def convolution_in_chunks(data: torch.Tensor, weight: torch.Tensor, *rest: Any, chunks: int) -> torch.Tensor:
    """The convolution, in chunks of samples."""

    def run(here: slice) -> torch.Tensor:
        result: torch.Tensor = _aten.convolution.default(data[here], weight, *rest)
        return result

    return _by_samples(run, data.shape[0], chunks)


def input_gradient_in_chunks(
    gradient: torch.Tensor, metadata_only: torch.Tensor, *rest: Any, chunks: int
) -> torch.Tensor:
    """The input gradient, in chunks of samples."""
    return _by_samples(lambda here: _input_gradient_of(gradient[here], metadata_only, *rest), gradient.shape[0], chunks)


def input_slices_in_chunks(
    gradient: torch.Tensor, metadata_only: torch.Tensor, weight: torch.Tensor, *rest: Any, chunks: int
) -> tuple[torch.Tensor, ...]:
    """The slices of the input gradient, in chunks of samples."""
    *settings, cuts = rest
    slices = tuple(
        metadata_only.new_empty((metadata_only.shape[0], stop - start, *metadata_only.shape[2:]))
        for start, stop in cuts
    )
    size = -(-gradient.shape[0] // chunks)
    for start in range(0, gradient.shape[0], size):
        here = slice(start, start + size)
        chunk = _input_gradient_of(gradient[here], metadata_only, weight, *settings)
        for result, (first, stop) in zip(slices, cuts, strict=True):
            result[here] = chunk[:, first:stop]
        del chunk
    return slices


def _input_gradient_of(samples: torch.Tensor, metadata_only: torch.Tensor, *rest: Any) -> torch.Tensor:
    shape = (samples.shape[0], *metadata_only.shape[1:])
    chunk_of_metadata_only = make_metadata_only(
        torch.empty(shape, dtype=metadata_only.dtype, device="meta"), samples.device
    )
    found: torch.Tensor = direct(convolution_input_gradient)(samples, chunk_of_metadata_only, *rest)
    return found


def _by_samples(run: Callable[[slice], torch.Tensor], samples: int, chunks: int) -> torch.Tensor:
    size = -(-samples // chunks)
    result: torch.Tensor | None = None
    for start in range(0, samples, size):
        here = slice(start, start + size)
        chunk = run(here)
        if result is None:
            result = chunk.new_empty((samples, *chunk.shape[1:]))
        result[here] = chunk
        del chunk
    assert result is not None
    return result


def weight_gradient_in_chunks(
    gradient: torch.Tensor,
    data: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    mask: list[bool],
    *,
    chunks: int,
) -> tuple[None, torch.Tensor, torch.Tensor | None]:
    """The weight half of `convolution_backward`, in chunks of the channels of both operands, or of the groups."""
    result = torch.empty_like(weight)
    of_bias = gradient.new_empty(gradient.shape[1]) if mask[2] else None
    last, chunk_of_data = slice(0, 0), data
    for of_data, of_gradient, chunk_groups in _cuts(data, gradient, groups, chunks):
        if of_data != last:
            last, chunk_of_data = of_data, data[:, of_data].contiguous()
        chunk_of_gradient = gradient[:, of_gradient].contiguous()
        # A weight has output channels first; that of a transposed convolution has input channels first.
        rows, columns = (of_data, of_gradient) if transposed else (of_gradient, of_data)
        here = (rows,) if groups > 1 else (rows, columns)
        chunk = _aten.convolution_backward.default(
            *(chunk_of_gradient, chunk_of_data, weight[here].contiguous()),
            None if bias_sizes is None else [chunk_of_gradient.shape[1]],
            *(stride, padding, dilation, transposed, output_padding, chunk_groups, mask),
        )
        result[here] = chunk[1]
        if of_bias is not None:
            of_bias[of_gradient] = chunk[2]
        del chunk, chunk_of_gradient
    return None, result, of_bias


def _cuts(data: torch.Tensor, gradient: torch.Tensor, groups: int, chunks: int) -> Iterator[tuple[slice, slice, int]]:
    """Yields for each call the channels of the input, the channels of the gradient and the number of groups.

    The larger operand is cut in `chunks`, the smaller one in chunks of about the same size if it is large too.
    """
    if groups > 1:
        for here in _slices(groups, chunks, (1,)):
            of_data, of_gradient = (
                slice(here.start * t.shape[1] // groups, here.stop * t.shape[1] // groups) for t in (data, gradient)
            )
            yield of_data, of_gradient, here.stop - here.start
        return
    chunk_bytes = max(_nbytes(data), _nbytes(gradient)) / chunks
    counts = [
        chunks
        if t is _larger(data, gradient)
        else math.ceil(_nbytes(t) / chunk_bytes)
        if _nbytes(t) > _LARGE_IN_CHUNKS * chunk_bytes
        else 1
        for t in (data, gradient)
    ]
    for of_data in _slices(data.shape[1], counts[0]):
        for of_gradient in _slices(gradient.shape[1], counts[1]):
            yield of_data, of_gradient, 1


def _slices(channels: int, chunks: int, blocks: tuple[int, ...] = _BLOCKS) -> list[slice]:
    block = next((b for b in blocks if chunks * b <= channels), blocks[-1])
    size = -(-channels // (chunks * block)) * block
    return [slice(start, min(start + size, channels)) for start in range(0, channels, size)]


def _larger(data: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return data if data.numel() >= gradient.numel() else gradient


def sample_counts(node: fx.Node) -> tuple[int, ...]:
    """Numbers of chunks of samples for a convolution or an input gradient."""
    operand, weight = _values(node)[0], _values(node)[1 if node.target is _aten.convolution.default else 2]
    other: torch.Tensor = _values(node)[1] if node.target is convolution_input_slices else node.meta["val"]
    if not _can_be_chunked(operand, other, weight) or operand.dim() != weight.dim():
        return ()
    samples, nbytes = operand.shape[0], max(_nbytes(operand), _nbytes(other))
    if samples < 2 or nbytes < 2 * _CHUNK_BYTES:
        return ()
    chunk_bytes = (_CHUNK_BYTES, _FINE_BYTES) if nbytes > _LARGE_IN_FINE * _CHUNK_BYTES else (_CHUNK_BYTES,)
    sizes = {-(-samples // min(samples, -(-nbytes // wanted))) for wanted in chunk_bytes}
    return tuple(sorted(-(-samples // size) for size in sizes))


def channel_counts(node: fx.Node) -> tuple[int, ...]:
    """Numbers of chunks of channels, or of groups, for a weight gradient."""
    arguments: tuple[Any, ...] = node.args
    *_, groups, mask = arguments
    gradient, data, weight = _values(node)[:3]
    if mask[0] or not mask[1] or not _can_be_chunked(gradient, data, weight) or data.dim() != weight.dim():
        return ()
    larger = _larger(data, gradient)
    nbytes = _nbytes(larger)
    channels, blocks = (groups, (1,)) if groups > 1 else (larger.shape[1], _BLOCKS)
    wanted = {_COARSE_PARTS, math.ceil(nbytes / _CHUNK_BYTES)} if nbytes > _CHUNK_BYTES else set()
    if nbytes > 2 * _CHUNK_BYTES and groups == 1:
        wanted.add(math.ceil(nbytes / _FINE_BYTES))
    return tuple(sorted({len(_slices(channels, chunks, blocks)) for chunks in wanted} - {1}))


def _values(node: fx.Node) -> list[Any]:
    """The fake tensors that stand for the operands."""
    return [a.meta.get("val") if isinstance(a, fx.Node) else None for a in node.args]


def _can_be_chunked(*tensors: torch.Tensor) -> bool:
    # A slice of channels, such as half the gradient of a concatenation, has a suitable layout.
    return all(t.device.type == "cpu" and _channels_outside(t) for t in tensors)


def _channels_outside(tensor: torch.Tensor) -> bool:
    """Whether samples are the outermost axis, then channels, then contiguous space."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return tensor.dim() > 1 and tensor.stride(0) >= tensor.stride(1) * tensor.shape[1]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
