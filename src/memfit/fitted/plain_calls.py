"""Detects calls of a fitted module that its plan does not cover, so that they run the module's own code.

A plan is one forward and one backward pass of autograd on real tensors. Transforms of `torch.func` differentiate or map
over the call itself, forward-mode differentiation carries tangents through the call, tracers record the call on
tensors without memory, and a dispatch mode is given each op of the call and may change it; all of them need the
module's own ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from memfit.capture.state.module_state import ModuleState
from memfit.torch_compat.core import in_func_transform, op_calls_traced, pytree

__all__ = ["nothing_to_train", "transformed"]


def transformed() -> str | None:
    """Name of the transform or tracer that acts on the current call; None for a call of an ordinary step."""
    if in_func_transform():
        return "a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    return op_calls_traced()


def nothing_to_train(state: ModuleState, args: Any, kwargs: Any) -> bool:
    """Whether the call can produce no gradient: the whole module and its inputs are frozen."""
    if state.trains:
        return False
    return not any(isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves((args, kwargs)))
