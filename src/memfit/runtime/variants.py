"""Which plan a call takes, where branches on its inputs go several ways.

A graph is made for one way (`memfit.capture.branches`). Calls of one signature may go another way, when a mask that was
all ones has padding in it. So each way has a signature of its own, and its plan is kept.

Known limits: a condition is computed here to choose the plan, and once more by Dynamo's guard. A module whose branches
go a new way in each call would be planned in each call; after `_MOST_WAYS` the graph breaks at them instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils import _pytree as pytree

from memfit.runtime.apply import PlannedCall
from memfit.runtime.signature import Signature

__all__ = ["Variants", "decides"]

_MOST_WAYS = 8
_UNDECIDED = "branches on inputs are not decided"


@dataclass(slots=True)
class Variants:
    """The ways that calls went.

    Attributes:
        known: by signature of the inputs, a signature for each way.
    """

    known: dict[Signature, list[Signature]] = field(default_factory=dict)

    def signature(self, key: Signature, calls: Mapping[Signature, PlannedCall], args: Any, kwargs: Any) -> Signature:
        """The signature of the way that branches on these inputs go.

        Args:
            key: the signature of the inputs.
            calls: what runs, by signature of the way.
            args: positional inputs.
            kwargs: keyword inputs.
        """
        first = calls.get(key)
        if first is None or not first.decisions:
            return key
        leaves = pytree.tree_leaves((args, kwargs))
        ways = self.known.setdefault(key, [key])
        for way in ways:
            call = calls.get(way)
            if call is None or all(decision.holds(leaves[decision.place]) for decision in call.decisions):
                return way  # the last one may not be planned yet
        ways.append((*key, len(ways)) if len(ways) < _MOST_WAYS else (*key, _UNDECIDED))
        return ways[-1]


def decides(key: Signature) -> bool:
    """Whether a plan for this signature is made for one way of branches on inputs."""
    return not key or key[-1] != _UNDECIDED
