"""Numbers among the arguments of a module that are others in each call, such as a weight that grows with the step.

A graph holds a number as a constant, so each number has a plan of its own, which takes about a second. Nobody would
know why training is slow, so the argument is named once it has had several numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from memfit.capture.state.input_signature import Signature, differing_number
from memfit.torch_compat.core import pytree

__all__ = ["varying_number"]

_MOST_NUMBERS = 3
"""How many numbers an argument has before it is named."""


def varying_number(key: Signature, known: Iterable[Signature], args: Any, kwargs: Any) -> str | None:
    """The name of an argument, `weight` or `argument 2`, that had many numbers; None if there is none.

    Args:
        key: signature of the call.
        known: signatures of the planned calls.
        args: positional inputs of the call.
        kwargs: keyword inputs of the call.
    """
    places = Counter(place for other in known if (place := differing_number(key, other)) is not None)
    found = next((place for place, count in places.items() if count >= _MOST_NUMBERS), None)
    if found is None:
        return None
    paths, _ = pytree.tree_flatten_with_path((tuple(args), kwargs))
    _, first, *rest = paths[found][0]
    name = f"argument {first.idx + 1}" if isinstance(first, pytree.SequenceKey) else str(getattr(first, "key", first))
    return name + str(pytree.keystr(tuple(rest)))
