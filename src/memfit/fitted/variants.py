"""Selects the plan of a call whose branches on inputs may take several paths.

A graph is made for one path (`memfit.capture.values.branches`). Calls of one signature may take another path, for
example when a mask that was all ones now contains padding. So each path has a signature of its own, and its plan is
kept. A buffer that was treated as a constant and then changed may change with each step; from then on, the graph breaks
where this buffer is read.

Known limits: a condition is computed here to select the plan, and once more by Dynamo's guard. A module whose branches
take a new path in each call would be planned in each call; after `_MOST_PATHS` paths the graph breaks at the branches
instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from memfit.capture.state.input_signature import Signature
from memfit.capture.values.decisions import Decision
from memfit.runtime.executable import PlannedCall
from memfit.torch_compat.core import pytree

__all__ = ["Variants", "decides"]

_MOST_PATHS = 8
_UNDECIDED = "branches on inputs are not decided"


@dataclass(slots=True)
class Variants:
    """The paths that calls took.

    Attributes:
        known: by signature of the inputs, a signature for each path.
    """

    known: dict[Signature, list[Signature]] = field(default_factory=dict)

    def signature(
        self, key: Signature, calls: Mapping[Signature, PlannedCall], model: nn.Module, args: Any, kwargs: Any
    ) -> Signature:
        """The signature of the path that branches on these inputs take.

        Args:
            key: the signature of the inputs.
            calls: the planned calls, by signature of the path.
            model: the module.
            args: positional inputs.
            kwargs: keyword inputs.
        """
        first = calls.get(key)
        if first is None or not first.decisions:
            return key
        leaves = pytree.tree_leaves((args, kwargs))
        paths = self.known.setdefault(key, [key])
        constant = True
        for path in paths:
            call = calls.get(path)
            missed = None if call is None else _missed(call.decisions, model, leaves)
            if missed is None:
                return path  # the last path may not be planned yet
            constant &= isinstance(missed.place, int)
        paths.append((*key, len(paths)) if constant and len(paths) < _MOST_PATHS else (*key, _UNDECIDED))
        return paths[-1]


def _missed(decisions: Sequence[Decision], model: nn.Module, leaves: Sequence[Any]) -> Decision | None:
    """The first decision that does not hold any more."""
    for decision in decisions:
        place = decision.place
        if not decision.holds(leaves[place] if isinstance(place, int) else _buffer(model, place or "")):
            return decision
    return None


def _buffer(model: nn.Module, name: str) -> Any:
    """The present value of a buffer; None if the buffer no longer exists."""
    path, _, last = name.rpartition(".")
    try:
        return model.get_submodule(path)._buffers.get(last)
    except AttributeError:
        return None


def decides(key: Signature) -> bool:
    """Whether a plan for this signature is made for one path of branches on inputs."""
    return not key or key[-1] != _UNDECIDED
