"""Made-up operands to run one op of a graph by itself: the layouts of the real operands, numbers that the op accepts.

Most ops accept any numbers; they get normally distributed ones. A kernel that does not accept its operands raises on a
CPU, but on a CUDA device it ends all work of the process on that device. So ops that draw random numbers get numbers
between zero and one, which are valid as probabilities, rates and deviations alike, and indices, pivots and marks are
values that the op could have got.

Known limits: integer operands are zeros unless the op is known to need others.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.marks import METADATA_ONLY_PREFIX
from memfit.ops.kernels.convolution import make_metadata_only
from memfit.ops.registry import rule_of
from memfit.torch_compat.core import OpOverload

__all__ = ["operand_values", "operands_of"]

_TILE = 1 << 16
_STARTS = 16
_STRIDE = 4099
"""Operands repeat the same numbers, each from a different start."""


def operands_of(node: fx.Node | Call, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position and by name, with made-up tensors for the operands."""
    values = operand_values(node, device)
    return fx.map_arg(node.args, values.__getitem__), fx.map_arg(node.kwargs, values.__getitem__)


def operand_values(node: fx.Node | Call, device: torch.device) -> dict[fx.Node, torch.Tensor]:
    """Made-up tensors for the operands."""
    made: dict[fx.Node, torch.Tensor] = {}
    rule = rule_of(node.target)
    special = rule.fill
    special_node = None if special is None or special.operand >= len(node.args) else node.args[special.operand]
    shares = rule.takes_shares or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
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
    if not rule_of(node.target).seeds_on_host:
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
