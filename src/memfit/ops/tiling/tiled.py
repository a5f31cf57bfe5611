"""Which calls can run on a tile of an image; a convolution needs a few more rows and columns than it makes.

Tiles are cut along one or both of the first two axes after batch and channels, the height and width of images. For a
tile of its result, a call needs the part of each operand that its windows cover; it pads at the real border and nowhere
else. The input gradient of a convolution or a pooling is made the same way, from the part of the output gradient whose
windows touch the tile, so that every element is made once and nothing is added up across tiles. The weight gradient is
a sum over tiles of the output gradient.

An op that reads a whole image (global pooling, flattening, attention) has no rule for tiles and ends a fused region;
group and instance normalisation are split (`memfit.passes.group_norm_split`).
"""

from __future__ import annotations

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.layout import is_alone
from memfit.ir.slicing import Reach
from memfit.ops.registry import rule_of
from memfit.ops.tiling.tile import Tiling
from memfit.ops.tiling.window import SPACE

__all__ = ["reaches_of", "tiling_of"]

_POINTS = 16
"""The reach of a call is measured on bands at about this many positions."""


def tiling_of(call: fx.Node | Call, axes: int) -> Tiling | None:
    """How a call runs on tiles along `axes` axes of space; None if it cannot."""
    rule = rule_of(call.target).tile
    found = rule(call, axes) if rule is not None else None
    if found is None:
        return None
    values = [node.meta["val"] for node in found.operands]
    results = call.meta["val"] if isinstance(call.meta["val"], list | tuple) else [call.meta["val"]]
    fits = all(v.dim() >= SPACE + axes and v.shape[0] == values[0].shape[0] for v in values)
    # Results are put together in their own layout, so they must be dense; operands may be any view.
    dense = all(is_alone(result) for result in results if isinstance(result, torch.Tensor))
    return found if fits and dense else None


def reaches_of(tiling: Tiling, place: int) -> tuple[Reach, ...]:
    """The range of an operand that a call reads along each axis, as planners estimate it."""
    found: list[Reach] = []
    shape = tiling.operands[place].meta["val"].shape
    whole = tuple((0, extent) for extent in tiling.extents)
    for axis, extent in enumerate(tiling.extents):
        scale = shape[SPACE + axis] / extent
        before = after = 0.0
        for start in {point * (extent - 1) // _POINTS for point in range(_POINTS + 1)}:
            tile = (*whole[:axis], (start, start + 1), *whole[axis + 1 :])
            first, last = tiling.needs(tile)[place][axis]
            before, after = max(before, start * scale - first), max(after, last - (start + 1) * scale)
        found.append(Reach(scale=scale, before=before, after=after))
    return tuple(found)
