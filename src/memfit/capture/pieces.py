"""The captured graphs of a step, in the order of the forward pass: one, or several where the graph breaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memfit.capture.loss import LossReading
from memfit.capture.plain_parts import NOTHING_PLAIN, PlainParts
from memfit.capture.reading import JointReading
from memfit.capture.sharded import Gathered
from memfit.capture.shared_inputs import SharedInputs, shared_inputs
from memfit.capture.tangents import GradientStrides, Strides, layouts_between

__all__ = ["Piece", "Pieces", "gradient_strides_of", "inputs_shared_in", "tensors_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One captured graph.

    Attributes:
        reading: its joint graph.
        inputs: the real tensors it takes, in the order of its placeholders.
        outputs: what it returned while capturing, fake or real.
        gathered: the units of a sharded module that were gathered while it ran.
        key: of the graph it was made from (`memfit.capture.dynamo_graph.graph_key`); empty for the only one.
        input_strides: by inputs how their gradients lie.
        terms: by inputs of how many terms their gradients are sums, where these are several.
    """

    reading: JointReading
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    gathered: tuple[Gathered, ...] = ()
    key: str = ""
    input_strides: Mapping[int, Strides] = field(default_factory=dict)
    terms: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """All graphs of a step, in forward order, and what the module returned.

    Attributes:
        pieces: one for each captured graph.
        output: the module's output, fake or real.
        breaks: why the graph breaks, if it does.
        between_bytes: what plain autograd saves for the code between pieces.
        staying: the units of a sharded module that were gathered when it had run.
        plain: what is left to plain code.
        replaced: whether the model's own checkpoints are left out.
        loss: what the loss does with the output and with what left by a side door, if it was read.
        gradient_strides: how gradients of outputs of the graphs lie, where that is not as the outputs do.
        shared: which inputs of the graphs have several uses and are used by later code too, if that was asked.
    """

    pieces: tuple[Piece, ...]
    output: Any
    breaks: tuple[str, ...] = ()
    between_bytes: int = 0
    staying: tuple[Gathered, ...] = ()
    plain: PlainParts = NOTHING_PLAIN
    replaced: bool = False

    @property
    def last_key(self) -> str | None:
        """The key of the last piece's graph, None if an earlier piece has the same."""
        keys = [piece.key for piece in self.pieces]
        return keys[-1] if keys.count(keys[-1]) == 1 else None

    loss: LossReading | None = None
    gradient_strides: GradientStrides = field(default_factory=dict)
    shared: SharedInputs = field(default_factory=dict)

    def receivers(self) -> list[torch.Tensor]:
        """The tensors of the output, then those that left the last piece by a side door and need a gradient.

        Hooks collect features, and a forward pass leaves an auxiliary loss on `self`.
        """
        returned = tensors_in(self.output)
        known = {id(t) for t in returned}
        beside = [t for t in tensors_in(self.pieces[-1].outputs) if t.requires_grad and id(t) not in known]
        return [*returned, *beside]


def gradient_strides_of(pieces: Pieces, loss: LossReading) -> GradientStrides:
    """By graphs how gradients of their outputs lie, where that is not as the outputs do and always the same."""
    if any(piece.gathered for piece in pieces.pieces):
        return {}  # hooks of a sharded module would communicate
    received = zip(pieces.receivers(), loss.receives_gradient, loss.gradient_strides, strict=False)
    ends = [(tensor, strides) for tensor, receives, strides in received if receives]
    for piece in reversed(pieces.pieces):  # gradients are summed in the order of the backward pass
        inputs = ((piece.inputs[place], strides) for place, strides in piece.input_strides.items())
        ends += [(t, strides) for t, strides in inputs if not isinstance(t, nn.Parameter)]
    found: dict[str, dict[int, Strides]] = {}
    several: set[str] = set()
    for piece, strides in zip(pieces.pieces, layouts_between(ends, [p.outputs for p in pieces.pieces]), strict=True):
        if found.setdefault(piece.key, strides) != strides:
            several.add(piece.key)
    return {key: strides for key, strides in found.items() if strides and key not in several}


def inputs_shared_in(pieces: Pieces) -> SharedInputs:
    """Which inputs of the graphs have several uses and are used by later code as well."""
    if any(piece.gathered for piece in pieces.pieces) or not any(piece.terms for piece in pieces.pieces):
        return {}
    return shared_inputs([(p.key, p.inputs, p.outputs, p.terms) for p in pieces.pieces], pieces.receivers())


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested output."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
