"""Small real tensors with the layouts of a call's tensors, and the layouts of a kernel's results for them.

A kernel lays out its results by rules that look at the memory order of its operands' axes, at repeated axes and at
gaps, hardly ever at sizes. So a call on a few elements shows the layouts of a large call.

The smaller sizes keep the relations that formulas use: close sizes keep their difference (a padded image and its
image), and all sizes keep their remainder modulo eight (groups of channels). Numbers among the arguments that equal a
size, or a product of sizes, are replaced accordingly. Where a kernel refuses such a call, other sizes are tried, up to
the call itself if it is not large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch

from memfit.torch_compat.core import (
    AutoDispatchBelowAutograd,
    OpOverload,
    disable_current_modes,
    no_dispatch,
    no_python_dispatcher,
    pytree,
)

__all__ = [
    "is_dense_layout",
    "kernels_only",
    "made_by_kernel",
    "real_like",
    "sizes_to_try",
    "smaller_numbers",
    "strides_alike",
]

_LARGEST_KEPT = 8
_NEAR = 8
_MOST_ELEMENTS = 1 << 20


def sizes_to_try(tensors: Sequence[torch.Tensor]) -> Iterator[dict[int, int]]:
    """Maps from sizes to smaller ones, the best first: all smaller, channels kept, only the batch smaller, all kept."""
    shapes = [tuple(t.shape) for t in tensors]
    channels = {shape[1] for shape in shapes if len(shape) > 1} | {shape[0] for shape in shapes if len(shape) == 1}
    inner = {size for shape in shapes for size in shape[1:]}
    tried: list[dict[int, int]] = []
    for kept in (set[int](), channels, inner, {size for shape in shapes for size in shape}):
        found = _smaller_sizes({size for shape in shapes for size in shape}, kept)
        elements = sum(_elements(tuple(found.get(n, n) for n in shape)) for shape in shapes)
        if found not in tried and elements <= _MOST_ELEMENTS:
            tried.append(found)
            yield found


def _elements(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _smaller_sizes(sizes: set[int], kept: set[int]) -> dict[int, int]:
    """A smaller size for each large one; the order of sizes stays, and so do small differences."""
    large = sorted(size for size in sizes - kept if size > _LARGEST_KEPT)
    if not large:
        return {}
    runs = [[large[0]]]
    for one, other in pairwise(large):
        if other - one <= _NEAR:
            runs[-1].append(other)
        else:
            runs.append([other])
    found: dict[int, int] = {}
    last = _LARGEST_KEPT - 1
    for run in runs:
        lowest = last + 1 + (run[0] - last - 1) % 8
        found |= {size: size - run[0] + lowest for size in run}
        last = found[run[-1]]
    return {size: smaller for size, smaller in found.items() if size != smaller}


def smaller_numbers(arguments: Sequence[Any], sizes: Mapping[int, int]) -> list[Any]:
    """The arguments of a smaller call: numbers that equal a size, or a product of sizes, are replaced, tensors are not.

    Args:
        arguments: the arguments of a call, in a flat list.
        sizes: one of the maps of `sizes_to_try`.
    """
    numbers: dict[int, int] = {}
    for shape in [tuple(a.shape) for a in arguments if isinstance(a, torch.Tensor)]:
        for first in range(len(shape) - 1):
            ours = [sizes.get(n, n) for n in shape[first:]]
            numbers.setdefault(_elements(shape[first:]), _elements(ours))
    numbers |= sizes
    return [numbers.get(a, a) if type(a) is int else a for a in arguments]


def strides_alike(shape: Sequence[int], strides: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of a tensor of other sizes in the same layout: the same order of axes, repetitions and gaps.

    Args:
        shape: the shape of a tensor.
        strides: the strides of that tensor.
        sizes: the shape of the other tensor.

    Returns:
        None if elements of the tensor share memory in another way than along a repeated axis.
    """
    order = sorted(range(len(shape)), key=lambda axis: (strides[axis], shape[axis] > 1))
    found = [0] * len(shape)
    expected, ours = 1, 1
    for axis in order:
        stride, size = strides[axis], shape[axis]
        if size > 1 and stride == 0:
            continue
        if size > 1 and stride < expected:
            return None
        gap = 1 if stride <= expected else max(2, round(stride / expected)) if expected < stride else 1
        found[axis] = ours * gap
        if size > 1:
            expected, ours = stride * size, found[axis] * sizes[axis]
        elif stride == 0:
            found[axis] = 0
    return tuple(found)


def is_dense_layout(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their memory without gaps, in any order of the axes."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def real_like(tensor: torch.Tensor, sizes: Mapping[int, int], number: int) -> torch.Tensor:
    """A real tensor with the device and layout of a fake one; all elements are equal, those of integers to `number`.

    Raises:
        ValueError: if no tensor of these sizes can have that layout.
    """
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    ours = tuple(sizes.get(n, n) for n in shape)
    alike = strides if ours == shape else strides_alike(shape, strides, ours)
    if alike is None:
        raise ValueError("a tensor whose elements share memory")
    made = torch.empty_strided(ours, alike, dtype=tensor.dtype, device=tensor.device)
    number = number if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex else 1
    return made.fill_(number / 2 if made.dtype.is_floating_point else number)


@contextmanager
def kernels_only(*, random: bool = False, cuda: Sequence[int] = ()) -> Iterator[None]:
    """While active, calls on real tensors go directly to their kernels, even if modes are active outside.

    Args:
        random: whether the states of random generators are restored afterwards.
        cuda: GPUs whose generators are restored too.
    """
    with ExitStack() as aside:
        aside.enter_context(disable_current_modes())
        for context in (no_dispatch(), no_python_dispatcher(), AutoDispatchBelowAutograd()):
            aside.enter_context(context)
        if random:
            aside.enter_context(torch.random.fork_rng(devices=list(cuda)))
        yield


def made_by_kernel(
    func: OpOverload, arguments: Sequence[Any], spec: pytree.TreeSpec, sizes: Mapping[int, int], number: int
) -> Any:
    """Calls the kernel with real operands that look like those of a fake call.

    Args:
        func: the op.
        arguments: all arguments of the call, in a flat list.
        spec: how the arguments are nested.
        sizes: one of the maps of `sizes_to_try`.
        number: the value of the elements of integer operands.

    Returns:
        The kernel's results; random generators are left as before.

    Raises:
        Exception: any error of a kernel that refuses such a call.
    """
    random = torch.Tag.nondeterministic_seeded in func.tags
    devices = {a.device.index or 0 for a in arguments if isinstance(a, torch.Tensor) and a.device.type == "cuda"}
    with kernels_only(random=random, cuda=sorted(devices)):
        ours = [_real_argument(a, sizes, number) for a in smaller_numbers(arguments, sizes)]
        args, kwargs = pytree.tree_unflatten(ours, spec)
        return func(*args, **kwargs)


def _real_argument(argument: Any, sizes: Mapping[int, int], number: int) -> Any:
    if isinstance(argument, torch.Tensor):
        return real_like(argument, sizes, number)
    return None if isinstance(argument, torch.Generator) else argument
