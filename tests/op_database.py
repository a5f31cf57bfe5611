"""torch's database of ops, with sample inputs of each."""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["samples_of", "torchs_ops"]


def torchs_ops() -> list[Any]:
    """The `OpInfo` of each op.

    The database imports torch's own test cases, and these import a test framework that is not needed here.
    """
    framework = types.ModuleType("expecttest")
    framework.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    missing = "expecttest" not in sys.modules
    if missing:
        sys.modules["expecttest"] = framework
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.testing._internal.common_methods_invocations import op_db
    finally:
        if missing:
            del sys.modules["expecttest"]
    return list(op_db)


def samples_of(op: Any, dtype: torch.dtype, *, requires_grad: bool = True) -> Iterator[Any]:
    """Sample inputs of an op on the CPU.

    `op.sample_inputs` gives the same, but looks through the source files of the whole stack for each of them.
    """
    torch.manual_seed(0)
    return iter(op.sample_inputs_func(op, "cpu", dtype, requires_grad))
