"""The facts about an op: the axes of its samples, its tiles and chunks, where it may write, what it adds up.

One `OpRule` holds all facts about one op, and one file of `memfit.ops.rules` holds the rules of one family of ops.
An op without a rule runs whole and writes new memory, which is always right. `memfit.ops.registry` finds the rule of
an op.

Idea: as DTensor registers a sharding rule for each op (`torch.distributed.tensor._ops`), a rule registers how an op may
be cut. The profiler checks bits for each shape, so a rule says what may be tried, not what is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.ops.tiling.tile import Tiling

__all__ = ["Accumulation", "Axes", "Chunks", "Fill", "OpRule", "View"]


@dataclass(frozen=True, slots=True)
class Axes:
    """Where a call has the samples of a batch.

    Attributes:
        operands: operands of which the call takes samples, with the axis of each.
        of_results: axis of samples of each result that is no sum over the batch.
        run: function to call in place of the target, if another one.
    """

    operands: Mapping[fx.Node, int]
    of_results: int
    run: Callable[..., Any] | None = field(default=None)


@dataclass(frozen=True, slots=True)
class Chunks:
    """How an op runs in chunks.

    Attributes:
        call: takes the arguments of the op, and the number of chunks as `chunks`.
        candidates: numbers of chunks above 1 that the profiler tries for a call.
    """

    call: Callable[..., Any]
    candidates: Callable[[Any], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How an op adds its result to a gradient directly.

    Attributes:
        add: adds the result to its first argument, after which the arguments of the op follow; with `beta=0` it writes
            the result over the first argument.
        can_add: whether it can for a call.
    """

    add: Callable[..., None]
    can_add: Callable[[fx.Node], bool]


@dataclass(frozen=True, slots=True)
class Fill:
    """How the profiler makes up an operand that normal numbers would make invalid.

    Attributes:
        operand: position of the operand.
        fill: writes into the operand, given all arguments.
    """

    operand: int
    fill: Callable[[torch.Tensor, tuple[Any, ...]], object]


class View(StrEnum):
    """What an op that makes a view changes."""

    NOTHING = "nothing"
    """The view has the shape and the strides of its operand."""

    AXES = "axes"
    """Axes change their order or number, or repeat; for any strides of the operand, the same elements are seen."""

    TWO_AXES = "two axes"
    """Two axes change places, so that the same call, applied to the view, gives the operand."""

    SHAPE = "shape"
    """Elements are seen in another shape, which not all strides of the operand allow."""

    STRIDES = "strides"
    """Shape, strides and offset in memory are given, so the elements depend on the operand's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """The facts about an op.

    Attributes:
        batch: finds the axes of samples of a call, for a number of samples; None runs it whole.
        tile: finds how a call runs on tiles along the first axes of space; None runs it whole.
        chunks: how it runs in chunks.
        sums: positions of the results that are sums over the batch.
        sums_if: whether these results are sums for a call; None if they always are.
        is_pointwise: whether each element of the result depends only on the elements of the broadcast operands at its
            position.
        slices_keep_bits: whether slices may have the bits of the whole in the forward pass; the profiler finds whether
            they do. Pointwise ops say so only if they round once: for some elements, `exp` and similar ops give other
            bits in a vector than in the remainder at the end of a slice, and a comparison of some slices may miss these
            elements.
        shape_only: positions of operands that are used for their shape only.
        reads_values: whether results depend on the numbers in the operands, not only on their shapes and layouts.
        view: for an op that makes a view, what it changes.
        binding: the Python binding of the op, which takes the same positional arguments and costs less to call.
        in_place: by position of an operand, the function that computes the same result in that operand's storage.
        in_place_if: whether it may for a call and a position; None if it always may.
        recompute_as: the op that recomputes it where a second run of the op would change the state of the model: a
            batch normalisation without running statistics (operands 3 and 4; operand 5 is the training flag).
        accumulation: how it adds its result to a gradient.
        fill: how the profiler makes up an operand.
        takes_shares: whether it accepts only numbers between zero and one.
        seeds_on_host: whether its seeds are on the CPU, although tracing places them on the device.
        reads_matrix: whether each slice reads a whole matrix again, or adds to one.
        tile_calls: families of the ops that each tile calls in addition, by the number of axes that are cut.
    """

    batch: Callable[[fx.Node | Call, int], Axes | None] | None = None
    tile: Callable[[fx.Node | Call, int], Tiling | None] | None = None
    chunks: Chunks | None = None
    sums: frozenset[int] = frozenset()
    sums_if: Callable[[fx.Node | Call], bool] | None = None
    is_pointwise: bool = False
    slices_keep_bits: bool = False
    shape_only: tuple[int, ...] = ()
    reads_values: bool = True
    view: View | None = None
    binding: Callable[..., Any] | None = None
    in_place: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    in_place_if: Callable[[fx.Node, int], bool] | None = None
    recompute_as: Callable[..., Any] | None = None
    accumulation: Accumulation | None = None
    fill: Fill | None = None
    takes_shares: bool = False
    seeds_on_host: bool = False
    reads_matrix: bool = False
    tile_calls: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
