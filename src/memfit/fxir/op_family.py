"""The family of an op: its name without namespace, overload and marks of in-place calls."""

from __future__ import annotations

__all__ = ["op_family"]


def op_family(target: str) -> str:
    """`relu` of `aten.relu_.default`: the op without namespace, overload and the mark of in-place calls."""
    parts = target.split(".")
    name = (parts[1] if len(parts) > 2 else parts[0]).strip("_")
    return "batch_norm" if "batch_norm" in name and "backward" not in name else name
