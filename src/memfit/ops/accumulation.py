"""Ops that can add their result to an existing gradient directly, so that it needs no memory of its own.

Between micro-batches, gradients of weights are added up. The weight gradient of a linear layer is a matrix product, and
BLAS multiplies and adds in one call; the gradient of an embedding is zero except for the rows that were looked up; the
weight gradient of a convolution is a product too (`memfit.ops.kernels.conv_weight_gemm`). A gradient that is made first
and added then is written and read once more, which in a wide output layer takes more time than the product itself.

A direct sum is rounded differently, so it is for gradients that are sums of several micro-batches anyway. Which ops can
add directly is part of their rules (`memfit.ops.op_rule`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import StrEnum
from typing import Any, cast

from torch import fx

from memfit.ops.registry import rule_of

__all__ = ["Accumulate", "adding", "can_add"]


class Accumulate(StrEnum):
    """How gradients of parameters are added to `.grad` inside the step (`memfit.runtime.grad_accumulation`)."""

    WHOLE = "whole"
    """Each gradient is made and then added, as autograd does, with the bits of autograd."""

    AS_MADE = "as made"
    """The op that makes the gradient adds it directly, if it can."""


def can_add(made: fx.Node) -> bool:
    """Whether the call that makes this gradient can add it to an existing gradient."""
    call = cast(fx.Node, made.args[0]) if made.target is operator.getitem else made
    accumulation = rule_of(call.target).accumulation
    return accumulation is not None and accumulation.can_add(call)


def adding(target: Any) -> Callable[..., None]:
    """The function that adds the result of an op to its first argument; see `Accumulation`."""
    accumulation = rule_of(target).accumulation
    assert accumulation is not None
    return accumulation.add
