"""Models that checkpoint themselves: refused by name, or with `checkpointing="replace"` run without checkpoints.

`torch.utils.checkpoint` recomputes the forward results of a region in the backward pass. A plan decides about
recomputation for the whole step, so the two do not go together: a region that is always recomputed takes that choice
from the planner. Checkpointing changes no bit of the results, so leaving it out changes none either. Within a graph,
Dynamo marks the region's ops, and the marks can be ignored. Where the graph breaks, `checkpoint` runs as Python code;
then the checkpointed function is called directly.

Known limits: the functions are replaced for the whole process, so another thread that checkpoints meanwhile saves the
activations that it would recompute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint
from torch import nn

from memfit.capture.unplanned_parts import place_of
from memfit.fxir.refused import checkpoint_error

__all__ = ["CHECKPOINTING", "checkpoints_itself", "refusing_checkpoints", "without_checkpoints"]

CHECKPOINTING = ("refuse", "replace")


def checkpoints_itself(module: nn.Module) -> bool:
    """Whether the switch of transformers, timm and diffusers is on: this module checkpoints its children."""
    return any(getattr(module, switch, False) is True for switch in ("gradient_checkpointing", "grad_checkpointing"))


@contextlib.contextmanager
def refusing_checkpoints() -> Iterator[None]:
    """While active, a checkpoint that runs as Python code raises an error that names the user's line."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise checkpoint_error(place_of() or "torch.utils.checkpoint")

    with _in_place({"CheckpointFunction": _Applied(refuse), "_checkpoint_without_reentrant_generator": refuse}):
        yield


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """While active, a checkpoint that runs as Python code only calls its function."""
    with _in_place(
        {
            "checkpoint": _call,
            "CheckpointFunction": _Applied(_call_reentrant),
            "_checkpoint_without_reentrant_generator": _nothing_around,
        }
    ):
        yield


def _call(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Any = None,
    determinism_check: Any = None,
    debug: Any = None,
    early_stop: Any = None,
    preserve_rng_state: Any = None,
    **kwargs: Any,
) -> Any:
    return function(*args, **kwargs)


def _call_reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    return function(*args)


def _nothing_around(*_: Any, **__: Any) -> Iterator[None]:
    yield


class _Applied:
    """A stand-in for an autograd function."""

    def __init__(self, apply: Callable[..., Any]) -> None:
        self.apply = apply


@contextlib.contextmanager
def _in_place(others: dict[str, Any]) -> Iterator[None]:
    here = vars(torch.utils.checkpoint)
    before = {name: here[name] for name in others if name in here}
    here.update({name: others[name] for name in before})
    try:
        yield
    finally:
        here.update(before)
