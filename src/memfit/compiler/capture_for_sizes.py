"""Captures a step by a call of the module for many sizes, so that other sizes need no tracing.

A training loop rarely has one size: texts have many lengths, and the last batch of an epoch is smaller. So the first
capture of a step already has symbols for the sizes that may differ in a later call, which takes up to twice as
long as a capture without symbols, and the next size takes its graph from it (`memfit.capture.dynamo.symbolic_call`).

*Idea*: which sizes may differ is guessed. Texts are integers, and all their sizes may; of other inputs the first size
may, and the second one of sequences (three dimensions). Every size equal to one of these may differ with it, such as
those of a mask. A size that the code of the module fixes is a number in the graph, whatever the guess.

Known limits: a call that is no single graph, steps of sharded modules, steps in tiles and strategies other than `auto`
are captured size by size. Height and width of images are symbols from the second size of them on, since graphs of
images with symbols take several times as long to trace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memfit.capture.call_settings import CallSettings
from memfit.capture.distributed.fsdp import is_sharded
from memfit.capture.dynamo.graph_at_sizes import NotOfSizesError
from memfit.capture.dynamo.symbolic_call import SymbolicCall, symbolic_call
from memfit.capture.state.input_signature import Signature, differ_in_sizes, signature
from memfit.capture.training_step import Capture
from memfit.compiler.request import Request
from memfit.errors import MemfitError
from memfit.torch_compat.core import pytree

__all__ = ["SymbolicCalls", "Varying", "captured_for_sizes", "guessed_to_vary", "is_for_sizes", "varied_since"]

log = logging.getLogger(__name__)

Varying = Mapping[int, Sequence[int]]
"""By place of an input among the leaves of the arguments, the dimensions whose sizes are symbols."""

_MOST_FAILURES = 2
"""How often a call for many sizes is tried that cannot be made."""

_MOST_SYMBOLIC = 6
"""Most calls for many sizes: code that branches on sizes has one for each way it takes, later ways have none."""

_SEQUENCE = 3
"""Dimensions of an input that is a batch of sequences of vectors."""


@dataclass(slots=True, kw_only=True)
class SymbolicCalls:
    """The calls of a module that were compiled for many sizes.

    Attributes:
        made: the calls.
        failed: how often a call could not be made, or serves no more sizes than another one.
        is_noted: whether it is noted for later runs that the module has inputs of several sizes.
    """

    made: list[SymbolicCall] = field(default_factory=list)
    failed: int = 0
    is_noted: bool = False


def is_for_sizes(model: nn.Module, request: Request) -> bool:
    """Whether steps of this request may be made from those of other sizes."""
    return not (request.tiles or request.strategy != "auto" or is_sharded(model))


def captured_for_sizes(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    calls: SymbolicCalls,
    request: Request,
    *,
    varying: Callable[[Signature, Sequence[Any]], Varying],
    captured: Callable[[SymbolicCall], Capture],
) -> tuple[Capture, SymbolicCall | None] | None:
    """The step of a call, made from a call for many sizes.

    Args:
        model: the module.
        args: positional inputs.
        kwargs: keyword inputs.
        calls: the known calls for many sizes; a new one is added.
        request: budget and other requirements.
        varying: returns the sizes that are symbols in a new call, for a signature and the leaves of the arguments.
        captured: captures the step by a call for many sizes.

    Returns:
        The step, and the call for many sizes if this is its first step; None if no such call serves these inputs.
    """
    if not request.capture.decide:
        return None
    calls.failed += sum(call.is_broken for call in calls.made)
    calls.made[:] = [call for call in calls.made if not call.is_broken]
    now, leaves = signature(model, args, kwargs), pytree.tree_leaves((args, kwargs))
    for call in [call for call in calls.made if call.serves(now, leaves)]:
        try:
            return captured(call), None
        except NotOfSizesError as error:
            log.debug("a call for many sizes does not serve these: %s", error)
    if calls.failed >= _MOST_FAILURES or len(calls.made) >= _MOST_SYMBOLIC or not (found := varying(now, leaves)):
        return None
    settings = CallSettings(replaced=request.capture.reader().replaced, as_compiled=request.capture.as_compiled)
    call = symbolic_call(model, now, found, settings)
    try:
        capture = captured(call)
    except MemfitError as error:  # if it is no matter of sizes, the capture without symbols raises it again
        calls.failed += 1
        log.info("each size is captured by itself: %s", error)
        return None
    calls.failed += any(call.fixes(other.signature) for other in calls.made if differ_in_sizes(now, other.signature))
    calls.made.insert(0, call)
    return capture, call


def guessed_to_vary(leaves: Sequence[Any]) -> Varying:
    """The sizes above 1 that may differ in later calls."""
    tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    sizes: set[int] = set()
    for tensor in tensors.values():
        is_number = tensor.is_floating_point() or tensor.is_complex()
        vary = (2 if tensor.dim() == _SEQUENCE else 1) if is_number else tensor.dim()
        sizes.update(tensor.shape[:vary])
    found = {place: [d for d, size in enumerate(t.shape) if size > 1 and size in sizes] for place, t in tensors.items()}
    return {place: dimensions for place, dimensions in found.items() if dimensions}


def varied_since(
    now: Signature, leaves: Sequence[Any], known: Sequence[Signature], made: Sequence[SymbolicCall]
) -> Varying:
    """The sizes that differ from those of a known call, or were symbols before; empty if one of them is below 2.

    Args:
        now: signature of the call.
        leaves: leaves of its arguments.
        known: signatures of the known calls.
        made: calls for many sizes that do not serve this one.
    """
    other = next((one for one in known if differ_in_sizes(now, one)), None)
    if other is None:
        return {}
    varying: dict[int, set[int]] = {}
    for call in [call for call in made if differ_in_sizes(now, call.signature)]:
        for place, dimensions in call.varying.items():
            varying.setdefault(place, set()).update(dimensions)
    for place, (value, theirs) in enumerate(zip(leaves, other, strict=False)):
        if isinstance(value, torch.Tensor):
            for dimension, (size, known_size) in enumerate(zip(value.shape, theirs[0], strict=True)):
                if size != known_size:
                    varying.setdefault(place, set()).add(dimension)
                    if min(size, known_size) < 2:
                        return {}
    return {place: sorted(dimensions) for place, dimensions in varying.items()}
