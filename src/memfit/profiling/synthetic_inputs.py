"""Made-up operands to run one op of a graph by itself: the layouts of the real operands, numbers that the op accepts.

Most ops accept any numbers; they get normally distributed ones. A kernel that does not accept its operands raises on a
CPU, but on a CUDA device it ends all work of the process on that device. So ops that draw random numbers get numbers
between zero and one, which are valid as probabilities, rates and deviations alike, and indices, pivots and marks are
values that the op could have got.

Known limits: integer operands are zeros unless the op is known to need others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.marks import METADATA_ONLY_PREFIX
from memfit.ops.kernels.convolution import make_metadata_only
from memfit.torch_compat.core import OpOverload

__all__ = ["operand_values", "operands_of"]

_aten = torch.ops.aten
_TILE = 1 << 16
_STARTS = 16
_STRIDE = 4099
"""Operands repeat the same numbers, each from a different start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Special:
    """The operand that holds indices, pivots or marks, and the function that fills it, given it and all arguments."""

    operand: int
    fill: Callable[[torch.Tensor, tuple[Any, ...]], object]


def _places_of_maxima(places: torch.Tensor, args: tuple[Any, ...]) -> None:
    """Fills in the places of maxima, each in its own window, as in the result of a pooling."""
    _, pooled, *settings, _ = args
    data = torch.randn(pooled.shape, dtype=pooled.dtype, device=pooled.device)
    places.copy_(_aten.max_pool2d_with_indices.default(data, *settings)[1])


_SPECIAL: dict[Any, _Special] = {
    _aten.embedding.default: _Special(
        operand=1, fill=lambda indices, args: indices.random_(0, max(1, int(args[0].shape[0])))
    ),
    _aten.embedding_dense_backward.default: _Special(
        operand=1, fill=lambda indices, args: indices.random_(0, max(1, int(args[2])))
    ),
    _aten.max_pool2d_with_indices_backward.default: _Special(operand=7, fill=_places_of_maxima),
    _aten.multilabel_margin_loss_backward.default: _Special(operand=4, fill=lambda marks, args: marks.zero_()),
    _aten.linalg_lu_solve.default: _Special(operand=1, fill=lambda pivots, args: pivots.fill_(1)),
    _aten.linalg_ldl_solve.default: _Special(operand=1, fill=lambda pivots, args: pivots.fill_(1)),
    _aten.lu_unpack.default: _Special(operand=1, fill=lambda pivots, args: pivots.fill_(1)),
}

_SHARES = (_aten.binary_cross_entropy.default, _aten.binary_cross_entropy_backward.default)
"""Ops that draw no random numbers but accept only numbers between zero and one."""


_SEEDS_ON_HOST = (
    _aten._scaled_dot_product_efficient_attention_backward.default,
    _aten._efficient_attention_backward.default,
)


def operands_of(node: fx.Node | Call, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position and by name, with made-up tensors for the operands."""
    values = operand_values(node, device)
    return fx.map_arg(node.args, values.__getitem__), fx.map_arg(node.kwargs, values.__getitem__)


def operand_values(node: fx.Node | Call, device: torch.device) -> dict[fx.Node, torch.Tensor]:
    """Made-up tensors for the operands."""
    made: dict[fx.Node, torch.Tensor] = {}
    special = _SPECIAL.get(node.target)
    special_node = None if special is None or special.operand >= len(node.args) else node.args[special.operand]
    shares = node.target in _SHARES or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    on_host = _on_host(node)

    def make(argument: fx.Node) -> None:
        value = argument.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"operand {argument.name} is not a tensor")
        metadata_only = str(argument.target).startswith(METADATA_ONLY_PREFIX)
        if argument not in made:
            here = torch.device("cpu") if argument in on_host else device
            made[argument] = (
                make_metadata_only(value, here) if metadata_only else _like(value, here, len(made), shares=shares)
            )

    fx.map_arg((node.args, node.kwargs), make)
    if special is not None and isinstance(special_node, fx.Node):
        args = fx.map_arg(node.args, made.__getitem__)
        special.fill(made[special_node], args)
    return made


def _on_host(node: fx.Node | Call) -> set[object]:
    """Operands that are on the CPU although tracing places them on the device: the seeds of efficient attention."""
    if node.target not in _SEEDS_ON_HOST:
        return set()
    names = [argument.name for argument in cast(OpOverload, node.target)._schema.arguments]
    return {node.args[names.index(name)] for name in ("philox_seed", "philox_offset")}


@lru_cache(maxsize=4)
def _numbers(device: torch.device) -> torch.Tensor:
    return torch.randn(_TILE + _STARTS * _STRIDE, generator=torch.Generator(device).manual_seed(0), device=device)


def _like(value: torch.Tensor, device: torch.device, number: int, *, shares: bool) -> torch.Tensor:
    """A real tensor with the layout of a fake one, filled with normal numbers that depend on `number`.

    With `shares` the numbers are between zero and one.
    """
    tensor = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device=device)
    flat = torch.empty(0, dtype=value.dtype, device=device).set_(tensor.untyped_storage())
    if not value.dtype.is_floating_point and not value.dtype.is_complex:
        flat.fill_(value.dtype is torch.bool)
        return tensor
    start = number % _STARTS * _STRIDE
    tile = _numbers(device)[start : start + _TILE]
    tile = (tile.sigmoid() if shares else tile).to(value.dtype)
    whole = flat.numel() // _TILE
    flat[: whole * _TILE].view(whole, _TILE).copy_(tile)
    flat[whole * _TILE :].copy_(tile[: flat.numel() - whole * _TILE])
    return tensor
