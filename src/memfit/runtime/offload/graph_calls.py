"""Emits the calls of a `Swapper` into a graph that is being lowered (`memfit.runtime.emitter`).

A ticket represents a step in flight: the first call makes the ticket, in the forward or the backward graph, and all
other calls take it. Most of these calls return nothing, and FX drops a call whose result nobody reads unless the called
function is in a global set of functions to keep. `forget_side_effects` removes the functions from that set when the
graph is compiled, since the set would keep the tiers open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memfit.fxir.layout import outer_axis
from memfit.ir.slicing import BySlices
from memfit.runtime.offload.engine import Swapper
from memfit.runtime.offload.slice_stream import MovingSlices, SliceLayout
from memfit.torch_compat.core import detect_fake_mode, impure_functions, unset_fake_temporarily

__all__ = ["SwapCalls", "forget_side_effects", "keep_unread"]

_PREFIX = "memfit_swap_"


class SwapCalls:
    """Emits the moves of one graph.

    Attributes:
        ticket: the ticket of the step, once there is one.
    """

    def __init__(self, graph: fx.Graph, swapper: Swapper, ticket: fx.Node | None = None) -> None:
        """Begins without a step, or with the step of a ticket."""
        self.ticket = ticket
        self._graph = graph
        self._swapper = swapper

    def out(self, storage: int, tensor: fx.Node) -> None:
        """Emits the start of swapping out a storage."""
        self._call(self._swapper.out, self._begun(tensor), tensor, storage)

    def gone(self, storage: int) -> None:
        """Emits the wait until a storage is swapped out."""
        self._call(self._swapper.out_done, self.ticket, storage)

    def start_in(self, storage: int, base: fx.Node) -> fx.Node:
        """Emits the start of swapping in a storage."""
        made = self._call(self._swapper.start_in, self.ticket, storage, base.meta["val"].device)
        made.meta = dict(base.meta)
        return made

    def wait_in(self, storage: int, started: fx.Node) -> fx.Node:
        """Emits the wait until a storage is swapped in."""
        made = self._call(self._swapper.in_done, self.ticket, started, storage)
        made.meta = dict(started.meta)
        return made

    def slices(self, storage: int, base: fx.Node, cut: BySlices) -> fx.Node:
        """Emits the call that moves the slices of a tier-resident storage."""
        layout, swapper = _layout(base.meta["val"], cut), self._swapper

        def slices(ticket: torch.Tensor) -> MovingSlices:
            return swapper.slices(ticket, storage, layout)

        return self._call(slices, self._begun(base))

    def end(self) -> None:
        """Emits the end of all swaps of the step, if there were any."""
        if self.ticket is not None:
            self._call(self._swapper.end, self.ticket)

    def _begun(self, like: fx.Node) -> fx.Node:
        """The ticket, made if there is none; its value is a fake tensor if that of `like` is one."""
        if self.ticket is None:
            mode = detect_fake_mode(like.meta["val"])
            with unset_fake_temporarily():
                real = torch.zeros((), dtype=torch.int64, device="cpu")
            self.ticket = self._call(self._swapper.begin)
            self.ticket.meta = {"val": real if mode is None else mode.from_tensor(real)}
        return self.ticket

    def _call(self, method: Callable[..., object], *args: Any) -> fx.Node:
        """Emits a call of a bound method, wrapped in a function, since FX needs functions."""

        def swap(*operands: Any) -> object:
            return method(*operands)

        swap.__name__ = method.__name__
        keep_unread(swap)
        return self._graph.call_function(swap, args)


def keep_unread(target: Callable[..., object]) -> None:
    """Makes FX keep calls of a function whose results nobody reads, until `forget_side_effects`."""
    target.__name__ = f"{_PREFIX}{target.__name__}"
    fx.node.has_side_effect(target)


def forget_side_effects(graph: fx.Graph) -> None:
    """Removes the functions of a compiled graph from FX's global set of functions to keep."""
    for node in graph.nodes:
        if getattr(node.target, "__name__", "").startswith(_PREFIX):
            impure_functions().discard(node.target)


def _layout(value: torch.Tensor, cut: BySlices) -> SliceLayout:
    axis = 0 if cut.grid else outer_axis(value, cut.batch)
    assert axis is not None, "what runs on samples has them outermost"
    return SliceLayout(
        shape=tuple(value.shape),
        stride=value.stride(),
        dtype=value.dtype,
        device=value.device,
        axis=axis,
        batch=cut.batch,
        samples=cut.samples,
    )
