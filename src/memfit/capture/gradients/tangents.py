"""Lays out gradients of outputs (tangents) as the loss makes them.

AOTAutograd traces a backward pass for gradients with the layouts of their outputs, and copies gradients of another
layout. Eager autograd continues with the gradient that the loss made. Where an output is permuted, channels last or a
slice of a larger tensor, this gradient may have another layout, and then later kernels sum in another order: bias
gradients have different bits, and the copy takes memory.

*Idea*: reading the loss tells the layout of each gradient (`memfit.capture.loss.reading.read_loss`), and AOTAutograd's
guess is corrected before the joint graph is traced. Where the graph breaks, the joint graph of each subgraph tells the
layouts of its inputs' gradients, and the autograd engine passes zeros of these layouts through the autograd graph of
the step, which exists after the capture, with one node for each subgraph (`memfit.capture.subgraph_boundaries`). At run
time, a gradient of another layout than the plan's, such as that of another loss, is copied to the plan's layout as
before, and memfit reports it.

Known limits: gradients whose elements share memory (those of a plain sum, for example) are assumed to have the layouts
of their outputs, because no other gradient could be copied to such a layout; so are gradients of outputs that are views
of each other. The proof compares the bits.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from memfit.capture.eager.backward_autocast import backward_region
from memfit.torch_compat.compiler import aot
from memfit.torch_compat.core import (
    FakeTensor,
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    functorch_config,
)

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
"""By key of a graph, for each of its runs, the strides of gradients by place of the output.

The only graph of a step has no key.
"""

_COLLECT = "run_functionalized_fw_and_collect_metadata"


def strides_without_overlap(tensor: torch.Tensor) -> Strides | None:
    """Strides of a tensor whose elements do not share memory; None for any other tensor."""
    if tensor.layout is not torch.strided:
        return None
    taken = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < taken:
            return None
        taken = stride * (size - 1) + taken
    return tuple(tensor.stride())


def layouts_between(ends: Sequence[tuple[torch.Tensor, Strides | None]], wanted: Sequence[Any]) -> list[Strides | None]:
    """The strides of gradients at some places of an autograd graph; None where no gradient arrives or they are unknown.

    Args:
        ends: tensors that receive a gradient from the loss, each with the gradient's strides, if known.
        wanted: leaves of the graph, or places in it (`torch.autograd.graph.GradientEdge`).
    """
    starts = [(t, strides) for t, strides in ends if t.requires_grad]
    if not starts or not wanted:
        return [None for _ in wanted]
    try:
        zeros = [torch.zeros_like(t) if s is None else _strided_zeros(t, s) for t, s in starts]
        with backward_region():
            gradients = torch.autograd.grad([t for t, _ in starts], wanted, zeros, retain_graph=True, allow_unused=True)
    except Exception as error:  # code between subgraphs, and hooks, may raise anything; the proof compares the bits
        log.info("gradients between subgraphs are taken to lie as their tensors do: %s", error)
        return [None for _ in wanted]
    return [None if gradient is None else strides_without_overlap(gradient) for gradient in gradients]


def _strided_zeros(like: torch.Tensor, strides: Strides) -> torch.Tensor:
    return torch.empty_strided(tuple(like.shape), strides, dtype=like.dtype, device=like.device).zero_()


def strides_of_input_gradients(joint: fx.Graph) -> dict[int, Strides | None]:
    """By place of an input of the traced function, the strides of its gradient, for inputs with a gradient."""
    (output,) = joint.find_nodes(op="output")
    found: dict[int, Strides | None] = {}
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        of = getattr(desc, "grad_of", None)
        if isinstance(value, torch.Tensor) and isinstance(desc, GradAOTOutput) and isinstance(of, PlainAOTInput):
            found[of.idx] = strides_without_overlap(value)
    return found


def strides_of_gradients(joint: fx.Graph) -> dict[int, Strides]:
    """By place of an output of the traced function, the strides that its gradient is assumed to have."""
    found: dict[int, Strides] = {}
    for node in joint.find_nodes(op="placeholder"):
        value, desc = node.meta.get("val"), node.meta.get("desc")
        of = desc.output if isinstance(desc, TangentAOTInput) else None
        if isinstance(value, torch.Tensor) and isinstance(of, PlainAOTOutput) and value.layout is torch.strided:
            found[of.idx] = tuple(value.stride())
    return found


def strides_of_outputs(joint: fx.Graph) -> dict[int, Strides]:
    """By place of an output of the traced function, its strides, for outputs that a joint graph returns."""
    (output,) = joint.find_nodes(op="output")
    found: dict[int, Strides] = {}
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.Tensor) and isinstance(desc, PlainAOTOutput):
            found[desc.idx] = tuple(value.stride())
    return found


@contextmanager
def laid_out_as_made(strides: Mapping[int, Strides]) -> Iterator[None]:
    """While active, AOTAutograd traces gradients with these strides, by place of the output; others as the outputs."""
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
    """Has AOTAutograd assume that gradients have the strides of their outputs, where torch has that option."""
    name = "guess_tangent_strides_as_outputs"
    if not hasattr(functorch_config, name):
        return nullcontext()
    made: AbstractContextManager[Any] = functorch_config.patch(name, True)
    return made


def _lay_out(found: Any, place: int, strides: Strides | None) -> None:
    """Corrects the assumed layout of one gradient, that of the traced fake tensor and that of copies at run time."""
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
