"""memfit's own kernels as ops of torch, so that whatever reads a graph knows them as it knows torch's.

A kernel that stands in a graph is a custom op of the namespace `memfit` (`torch.library`): it has a schema, an
implementation for fake tensors, tags, and a FLOP formula where it multiplies matrices. So a dispatch mode counts one
call and not the calls inside it, and any runner can take the graph.

A call through torch's dispatcher takes some microseconds more than a call of the Python function. So lowered graphs
call `direct(op)`: the function itself, unless a dispatch mode watches calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from memfit.torch_compat.core import OpOverload, count_of_dispatch_modes

__all__ = ["OPS", "custom_op", "direct"]

_LIBRARY = torch.library.Library("memfit", "FRAGMENT")
OPS: dict[Any, Callable[..., Any]] = {}
"""The ops of memfit, and for each the function that lowered graphs call."""


def custom_op(
    schema: str,
    *,
    fake: Callable[..., Any] | None = None,
    tags: Sequence[torch.Tag] = (),
    flops_of: Callable[..., tuple[OpOverload, tuple[Any, ...], Any]] | None = None,
) -> Callable[[Callable[..., Any]], OpOverload]:
    """Decorator that makes a kernel an op of the namespace `memfit`.

    Args:
        schema: name, arguments and results of the op, in torch's notation.
        fake: the implementation for fake tensors; None if the kernel itself runs on them.
        tags: of the op.
        flops_of: maps the result and the arguments of a call to a call of torch that takes as many FLOPs: an op, its
            arguments and its result.
    """
    name = schema.partition("(")[0]

    def register(kernel: Callable[..., Any]) -> OpOverload:
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"memfit::{name}", fake or kernel, lib=_LIBRARY)
        op: OpOverload = getattr(torch.ops.memfit, name).default
        OPS[op] = _unwatched(op, kernel)
        if flops_of is not None:
            _count(op, flops_of)
        return op

    return register


def direct(target: Any) -> Any:
    """The function to call for an op: for memfit's own ops their kernel, for other targets the target itself."""
    return OPS.get(target, target)


def _unwatched(op: OpOverload, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs) if count_of_dispatch_modes() else kernel(*args, **kwargs)

    run.__name__ = run.__qualname__ = op._opname
    run.__wrapped__ = kernel  # type: ignore[attr-defined]
    return run


def _count(op: OpOverload, flops_of: Callable[..., tuple[OpOverload, tuple[Any, ...], Any]]) -> None:
    def flops(*args: Any, out_val: Any = None, **_: Any) -> int:
        alike, given, result = flops_of(out_val, *args)
        found: int = flop_registry[alike.overloadpacket](*given, out_val=result)
        return found

    register_flop_formula(op.overloadpacket, get_raw=True)(flops)
