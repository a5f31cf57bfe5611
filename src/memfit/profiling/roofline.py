"""Time of an op from its FLOPs and bytes, for estimates that run nothing.

The time is the larger of the times of arithmetic and memory traffic on a nominal machine. Only ratios between ops
matter to a plan; `estimate` says that its times are nominal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch.utils.flop_counter import flop_registry

from memfit.fxir.call import Call
from memfit.fxir.signature import tensors_of
from memfit.torch_compat.core import OpOverload

__all__ = ["flops_of", "flops_of_values", "roofline_seconds"]

_RATES = {"cpu": (2e11, 2e10), "cuda": (2e13, 1.5e12)}
"""FLOP/s and byte/s of a nominal device."""

_LAUNCH_SECONDS = 2e-6


def roofline_seconds(node: fx.Node | Call) -> float:
    """The time of a launch, and the larger of FLOPs over rate and bytes over bandwidth."""
    results = tensors_of(node)
    operands = [t for a in node.all_input_nodes for t in tensors_of(a)]
    device = next((t.device.type for t in (*results, *operands)), "cpu")
    flop_rate, byte_rate = _RATES.get(device, _RATES["cpu"])
    nbytes = sum(t.numel() * t.element_size() for t in (*results, *operands))
    return max(flops_of(node) / flop_rate, nbytes / byte_rate) + _LAUNCH_SECONDS


def flops_of(node: fx.Node | Call) -> float:
    """FLOPs of a call, as torch counts them; 0 where it does not."""
    args: tuple[Any, ...] = fx.map_arg(node.args, lambda n: n.meta.get("val"))
    kwargs = fx.map_arg(node.kwargs, lambda n: n.meta.get("val"))
    return flops_of_values(node.target, args, kwargs, node.meta.get("val"))


def flops_of_values(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """FLOPs of a call with fake tensors, as torch counts them; 0 where it does not."""
    count = flop_registry.get(target.overloadpacket) if isinstance(target, OpOverload) else None
    if count is None:
        return 0.0
    try:
        return float(count(*args, **kwargs, out_val=result))
    except (TypeError, ValueError, AssertionError, AttributeError, IndexError):
        return 0.0
