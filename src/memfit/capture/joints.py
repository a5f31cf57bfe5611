"""Joint graphs that AOTAutograd has traced of a graph of Dynamo's, so that each is traced once.

A step is captured, and then compiled for each plan that is tried. Both need the joint graph of forward and backward
pass before anything of ours is done to it, and that is the same one where the graph is used in the same way: the same
outputs receive a gradient, which lies in the same way, and the same inputs are taken several times.

*Idea*: memoization. The graph as it was traced is kept with the graph of Dynamo's, under the use it was traced for, and
AOTAutograd is handed a copy where what it found out about the graph beforehand is the same too.

Known limits: the copy keeps the fake tensors of the first one, so only graphs with the same fake mode share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import graph_compile

from memfit.capture.backward_autocast import backward_in_autocast
from memfit.capture.dynamo_graph import copied
from memfit.capture.tangents import Strides

__all__ = ["Joints", "known_joints", "traced_once"]

_OURS = "_memfit_traced_once"
_TOLD = (
    *("input_info", "output_info", "num_intermediate_bases", "keep_input_mutations"),
    *("is_rng_op_functionalized", "num_outputs_rng_offset", "num_backward_tokens"),
)
"""What two descriptions of a graph are compared by where torch compares them, beside tangents."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Joint:
    """A joint graph as it was traced.

    Attributes:
        graph: nobody changes it.
        inputs: fake, and what they are.
        known: what AOTAutograd knew of the graph before, see `_known_before`.
        learned: what it noted about the graph while it traced it.
    """

    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    known: tuple[Any, ...]
    learned: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Joints:
    """Those of one graph, by how it is used."""

    by_use: dict[Any, _Joint] = field(default_factory=dict)


_KNOWN: ContextVar[Joints | None] = ContextVar("memfit_known_joints", default=None)
_USE: ContextVar[Any] = ContextVar("memfit_joint_use", default=None)


@contextmanager
def known_joints(joints: Joints) -> Iterator[None]:
    """While active, graphs that are traced are the one to which these joint graphs belong."""
    token = _KNOWN.set(joints)
    try:
        yield
    finally:
        _KNOWN.reset(token)


@contextmanager
def traced_once(
    receive: frozenset[int] | None, strides: Mapping[int, Strides], repeated: Mapping[int, int]
) -> Iterator[None]:
    """While active, AOTAutograd traces a graph only if it was not traced for the same use; see `Surroundings`.

    Args:
        receive: places of the outputs that receive a gradient; None for all.
        strides: by places of outputs how their gradients lie, where that is not as the outputs do.
        repeated: by places of inputs how often they are taken.
    """
    names = vars(graph_compile)
    plain = names["aot_dispatch_autograd_graph"]
    use = (receive, tuple(sorted(strides.items())), tuple(sorted(repeated.items())), backward_in_autocast())
    token = _USE.set(use)
    patched = not hasattr(plain, _OURS)
    if patched:

        def dispatch(flat_fn: Any, flat_args: Any, descs: Any, aot_config: Any, *, fw_metadata: Any) -> Any:
            joints, use = _KNOWN.get(), _USE.get()
            if joints is None or use is None:
                return plain(flat_fn, flat_args, descs, aot_config, fw_metadata=fw_metadata)
            known = _known_before(flat_args, fw_metadata)
            joint = joints.by_use.get(use)
            if joint is not None and joint.known == known:
                for name, value in joint.learned.items():
                    setattr(fw_metadata, name, _shallow(value))
                return copied(joint.graph), *joint.inputs, None
            before = {name: _shallow(value) for name, value in vars(fw_metadata).items()}
            outside = _KNOWN.set(None)  # tracing may trace other graphs
            try:
                made = plain(flat_fn, flat_args, descs, aot_config, fw_metadata=fw_metadata)
            finally:
                _KNOWN.reset(outside)
            graph, *inputs, subclasses = made
            if subclasses is not None:
                return made
            learned = {
                name: _shallow(value)
                for name, value in vars(fw_metadata).items()
                if name not in before or not _is_same(before[name], value)
            }
            kept = _Joint(graph=copied(graph), inputs=tuple(inputs), known=known, learned=learned)
            joints.by_use[use] = kept
            return copied(kept.graph), *inputs, None  # what is added to each copy gets the same names

        setattr(dispatch, _OURS, True)
        names["aot_dispatch_autograd_graph"] = dispatch
    try:
        yield
    finally:
        _USE.reset(token)
        if patched:
            names["aot_dispatch_autograd_graph"] = plain


def _known_before(flat_args: Any, metadata: Any) -> tuple[Any, ...]:
    """What a joint graph is traced for: operands, outputs, and how operands and tangents lie."""
    lying = (
        (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device, value.requires_grad)
        if isinstance(value, torch.Tensor)
        else (type(value), repr(value))
        for value in (*flat_args, *metadata.traced_tangents)
    )
    told = (getattr(metadata, name) for name in _TOLD)
    return (*lying, *(tuple(value) if isinstance(value, list) else value for value in told))


def _shallow(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other
