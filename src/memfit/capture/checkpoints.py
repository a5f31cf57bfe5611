"""Models that checkpoint themselves: named, or with `checkpointing="replace"` run as if they did not.

`torch.utils.checkpoint` recomputes the forward results of a region in the backward pass. A plan decides that for the
whole step, so the two do not go together: a region that is always recomputed is a choice taken from the planner.
Checkpointing changes no bit, so to leave it out does not either. Within a graph Dynamo marks the region's ops, and the
marks can be passed over. Where the graph breaks, `checkpoint` runs as Python code; then the function is called in its
place.

Known limits: the functions put in place are the process's, so another thread that checkpoints meanwhile keeps what it
would recompute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint

from memfit.capture.unplanned_parts import place_of
from memfit.fxir.refused import checkpoint_error

__all__ = ["CHECKPOINTING", "refusing_checkpoints", "without_checkpoints"]

CHECKPOINTING = ("refuse", "replace")


@contextlib.contextmanager
def refusing_checkpoints() -> Iterator[None]:
    """While active, a checkpoint that runs as Python code is an error that names the user's line."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise checkpoint_error(place_of() or "torch.utils.checkpoint")

    with _in_place({"CheckpointFunction": _Applied(refuse), "_checkpoint_without_reentrant_generator": refuse}):
        yield


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """While active, a checkpoint that runs as Python code is a call of its function."""
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
    """Stands for an autograd function."""

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
