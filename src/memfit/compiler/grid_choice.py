"""Choice of the number of tiles for the samples of a step, or of parts for its batch, within a budget.

Fine tiles take little memory but compute their halos again and again; coarse tiles take more memory. So tiles are as
coarse as the budget allows for the slices that exist at once. The next finer grid has twice as many tiles along each
axis, since square tiles have the smallest halo for their size. A slice of the batch has as many samples as are best for
the cache, or else as few as are worth a call.

Known limits: one grid for a step, chosen by its widest op.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import torch

from memfit.capture.training_step import Capture
from memfit.fxir.signature import tensors_of
from memfit.ops.batching.slices import samples_per_slice
from memfit.ops.registry import is_pointwise
from memfit.ops.slicing_plan import batches_alike
from memfit.ops.tiling.tiled import tiling_of

__all__ = ["grids"]

_SLICES_AT_ONCE = 8
"""Approximate number of slices of the widest op that exist at once in a fused region of the backward pass."""

_LEAST_EXTENT = 16
"""Smallest extent of a tile of the widest op: smaller tiles are mostly halo."""

_LEAST_BYTES = 1 << 18
"""Smallest size of a tile of the widest op: for less, a call costs more than its work."""


def grids(capture: Capture, room_bytes: int) -> list[tuple[int, ...]]:
    """The grids to try, the likeliest first, then finer ones, then coarser ones.

    Args:
        capture: capture of the step, for any grid or none.
        room_bytes: bytes of the budget beyond static memory and gradients.

    Returns:
        At least one grid.
    """
    axes, batch, nbytes, extents = _widest(capture)
    parts = _most_parts(capture)
    samples: list[tuple[int, ...]] = [(1, 1), *([(1, 1, parts)] if parts > 1 else [])]
    ladder = [*samples] if batch > 1 else []
    count = 2
    while axes and min(extents) >= _LEAST_EXTENT * count and nbytes >= _LEAST_BYTES * count**axes:
        ladder.append((count, count if axes > 1 else 1))
        count *= 2
    if ladder in ([], samples):
        return samples
    slices = _SLICES_AT_ONCE * nbytes
    fitting = (n for n, grid in enumerate(ladder) if slices <= max(1, room_bytes) * math.prod(grid[:2]))
    first = next(fitting, len(ladder) - 1)
    return [*ladder[first:], *reversed(ladder[:first])]


def _most_parts(capture: Capture) -> int:
    """The largest number of parts of the batch, more than is best for the cache; 0 if so many are not worth it."""
    batches = batches_alike([op.node for op in capture.joint_ops if op is not None])
    common = max(Counter(batches.values()).items(), key=lambda item: item[1], default=(0, 0))[0]
    of_common = [call for call, batch in batches.items() if batch == common]
    widest = max((sum(t.numel() * t.element_size() for t in tensors_of(call)) for call in of_common), default=0)
    fewest_samples = max(1, -(-_LEAST_BYTES * common // max(1, widest)))
    if fewest_samples >= samples_per_slice(batches).get(common, 0):
        return 0
    return -(-common // fewest_samples)


def _widest(capture: Capture) -> tuple[int, int, int, tuple[int, ...]]:
    """The widest op that can run in tiles: its number of cut axes, its batch, its bytes per sample, its extents."""
    for axes in (2, 1):
        found = max(_in_tiles(capture, axes), default=None)
        if found is not None:
            nbytes, batch, extents = found
            return axes, batch, nbytes, extents
    return 0, 1, 0, ()


def _in_tiles(capture: Capture, axes: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    for op in capture.joint_ops:
        if op is None or is_pointwise(op.node):
            continue  # pointwise ops of attention could run in tiles too, but have no axis of space
        tiling = tiling_of(op.node, axes)
        if tiling is None:
            continue
        value = op.node.meta["val"]
        results = [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, torch.Tensor)]
        batch = int(tiling.operands[0].meta["val"].shape[0])
        if batch:  # an empty batch has no tiles
            yield sum(t.numel() * t.element_size() for t in results) // batch, batch, tiling.extents
