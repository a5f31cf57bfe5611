"""Gradients of outputs laid out as the loss makes them.

AOTAutograd traces a backward pass for gradients that lie as their outputs do, and copies what comes in another layout.
Eager autograd goes on with the gradient that the loss made. Where an output is permuted, channels last or cut out of
something larger that may be another layout, and then kernels downstream sum in another order: bias gradients have
other bits, and the copy takes memory.

*Idea*: reading the loss tells the layout of each gradient (`memfit.capture.loss.reading.read_loss`), and AOTAutograd's
guess is corrected before the joint graph is traced. Where the graph breaks, the joint graph of each subgraph tells how
the gradients of its inputs lie, and the engine takes zeros of these layouts through the autograd graph of the step,
which is there after capturing, with one node for each subgraph (`memfit.capture.subgraph_boundaries`). At run time a
gradient of another layout than the plan's, of another loss say, is copied to the plan's as before, which is told.

Known limits: gradients whose elements share memory (those of a plain sum, say) are taken to lie as the outputs do, as
no other gradient could be copied to such a layout; so are those of outputs that are views of each other. The proof
compares the bits.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch._functorch.aot_autograd as aot
import torch._functorch.config
from torch import fx
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch._subclasses.fake_tensor import FakeTensor

from memfit.capture.eager.backward_autocast import backward_region

__all__ = [
    "GradientStrides",
    "Strides",
    "laid_out_as_made",
    "layouts_between",
    "strides_of_gradients",
    "strides_of_input_gradients",
    "strides_of_outputs",
    "strides_without_overlap",
]

log = logging.getLogger(__name__)

Strides = tuple[int, ...]

GradientStrides = Mapping[str, Sequence[Mapping[int, Strides]]]
"""By the keys of graphs how gradients lie in each of its runs, by places among the outputs.

The only graph of a step has no key.
"""

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


def layouts_between(ends: Sequence[tuple[torch.Tensor, Strides | None]], wanted: Sequence[Any]) -> list[Strides | None]:
    """The strides of gradients at some places of an autograd graph; None where none comes or they are not known.

    Args:
        ends: tensors that receive a gradient from the loss, and how it lies, if that is known.
        wanted: leaves of the graph, or places in it (`torch.autograd.graph.GradientEdge`).
    """
    starts = [(t, strides) for t, strides in ends if t.requires_grad]
    if not starts or not wanted:
        return [None for _ in wanted]
    try:
        zeros = [torch.zeros_like(t) if s is None else _strided_zeros(t, s) for t, s in starts]
        with backward_region():
            gradients = torch.autograd.grad([t for t, _ in starts], wanted, zeros, retain_graph=True, allow_unused=True)
    except Exception as error:  # code between subgraphs, and hooks, are anyone's; the proof compares the bits
        log.info("gradients between subgraphs are taken to lie as their tensors do: %s", error)
        return [None for _ in wanted]
    return [None if gradient is None else strides_without_overlap(gradient) for gradient in gradients]


def _strided_zeros(like: torch.Tensor, strides: Strides) -> torch.Tensor:
    return torch.empty_strided(tuple(like.shape), strides, dtype=like.dtype, device=like.device).zero_()


def strides_of_input_gradients(joint: fx.Graph) -> dict[int, Strides | None]:
    """By places among the inputs of the traced function how their gradients lie, of those with one."""
    (output,) = joint.find_nodes(op="output")
    found: dict[int, Strides | None] = {}
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        of = getattr(desc, "grad_of", None)
        if isinstance(value, torch.Tensor) and isinstance(desc, GradAOTOutput) and isinstance(of, PlainAOTInput):
            found[of.idx] = strides_without_overlap(value)
    return found


def strides_of_gradients(joint: fx.Graph) -> dict[int, Strides]:
    """By places among the outputs of the traced function how their gradients are taken to lie."""
    found: dict[int, Strides] = {}
    for node in joint.find_nodes(op="placeholder"):
        value, desc = node.meta.get("val"), node.meta.get("desc")
        of = desc.output if isinstance(desc, TangentAOTInput) else None
        if isinstance(value, torch.Tensor) and isinstance(of, PlainAOTOutput) and value.layout is torch.strided:
            found[of.idx] = tuple(value.stride())
    return found


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
    """While active, AOTAutograd traces gradients with these strides, by places of outputs; others as the outputs."""
    plain = getattr(aot, _COLLECT, None)
    if plain is None or not strides:
        with _as_the_outputs():
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
        with _as_the_outputs():
            yield
    finally:
        setattr(aot, _COLLECT, plain)


def _as_the_outputs() -> AbstractContextManager[Any]:
    """Has AOTAutograd take gradients to lie as their outputs do, which older versions of torch do not by themselves."""
    name = "guess_tangent_strides_as_outputs"
    if not hasattr(torch._functorch.config, name):
        return nullcontext()
    made: AbstractContextManager[Any] = torch._functorch.config.patch(name, True)
    return made


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
