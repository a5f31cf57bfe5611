"""Gradients of outputs laid out as the loss makes them.

AOTAutograd traces a backward pass for gradients that lie as their outputs do, and copies what comes in another layout.
Eager autograd goes on with the gradient that the loss made. Where an output is permuted, channels last or cut out of
something larger that may be another layout, and then kernels downstream sum in another order: bias gradients have
other bits, and the copy takes memory.

*Idea*: reading the loss tells the layout of each gradient (`memfit.capture.loss.read_loss`), and AOTAutograd's guess is
corrected before the joint graph is traced. At run time a gradient of another layout than the plan's, of another loss
say, is copied to the plan's as before.

Known limits: gradients whose elements share memory (those of a plain sum, say) are taken to lie as the outputs do, as
no other gradient could be copied to such a layout; so are those of outputs that are views of each other, and gradients
that one piece of a broken graph hands to another. The proof compares the bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.aot_autograd as aot
from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["Strides", "laid_out_as_made", "layouts_told", "strides_of_outputs", "strides_without_overlap"]

Strides = tuple[int, ...]

_COLLECT = "run_functionalized_fw_and_collect_metadata"


def strides_without_overlap(tensor: torch.Tensor) -> Strides | None:
    """Strides of a tensor of which each element has memory of its own; None of any other."""
    if tensor.layout is not torch.strided:
        return None
    taken = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < taken:
            return None
        taken = stride * (size - 1) + taken
    return tuple(tensor.stride())


def layouts_told(
    outputs: Sequence[Any], receivers: Sequence[torch.Tensor], strides: Sequence[Strides | None]
) -> dict[int, Strides]:
    """By places among outputs the strides of their gradients, where those are not the outputs' own.

    Args:
        outputs: of a graph.
        receivers: tensors that receive gradients, some of them among the outputs.
        strides: of those gradients; None where it is not known or receives none.
    """
    told = {id(t): s for t, s in zip(receivers, strides, strict=False) if s is not None and s != tuple(t.stride())}
    return {place: told[id(t)] for place, t in enumerate(outputs) if id(t) in told}


def strides_of_outputs(joint: fx.Graph) -> dict[int, Strides]:
    """By places among the outputs of the traced function how they lie, of those that a joint graph returns."""
    (output,) = joint.find_nodes(op="output")
    found: dict[int, Strides] = {}
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.Tensor) and isinstance(desc, PlainAOTOutput):
            found[desc.idx] = tuple(value.stride())
    return found


@contextmanager
def laid_out_as_made(strides: Mapping[int, Strides]) -> Iterator[None]:
    """While active, AOTAutograd traces gradients of outputs with these strides, by the outputs' places."""
    plain = getattr(aot, _COLLECT, None)
    if plain is None or not strides:
        yield
        return

    def collect(*args: Any, **kwargs: Any) -> Any:
        told = plain(*args, **kwargs)

        def metadata(*inputs: Any) -> Any:
            found = told(*inputs)
            for place, desc in enumerate(found.traced_tangents_descs):
                output = getattr(desc, "output", None)
                if isinstance(output, PlainAOTOutput):
                    _lay_out(found, place, strides.get(output.idx))
            return found

        return metadata

    setattr(aot, _COLLECT, collect)
    try:
        yield
    finally:
        setattr(aot, _COLLECT, plain)


def _lay_out(found: Any, place: int, strides: Strides | None) -> None:
    """Corrects the guess of one gradient, the fake one that is traced and what the one at run time is copied to."""
    tangent, expected = found.traced_tangents[place], found.subclass_tangent_meta[place]
    layout = getattr(expected, "memory_format", None)
    if strides is None or layout is None or type(tangent) is not FakeTensor or len(strides) != tangent.dim():
        return
    if any(isinstance(n, torch.SymInt) for n in (*tangent.shape, *tangent.stride())):
        return
    with tangent.fake_mode:
        made = torch.empty_strided(tuple(tangent.shape), strides, dtype=tangent.dtype, device=tangent.device)
    found.traced_tangents[place] = made
    found.subclass_tangent_meta[place] = dataclasses.replace(
        expected, memory_format=dataclasses.replace(layout, size=made.size(), stride=made.stride(), memory_format=None)
    )
