"""Parts of a model that stay plain code: where shapes depend on data, numbers are read from tensors, or data is sparse.

A plan is for one graph with static shapes. Code that routes tokens to experts, selects boxes or applies boolean masks
has different shapes at each step, so its graph would differ at each step. Dynamo breaks the graph at the op, but the
graphs after the break still have different shapes. *Idea*: watch the ops of one plain forward pass; torch tags the ops
whose result sizes are known only after they have run. The modules in which such tensors appear run as plain code
between planned subgraphs; the code around them has static shapes. A module that takes gradients in its forward pass
(`torch.autograd.grad`) runs as plain code, too: a planned subgraph is one node of the autograd graph, and has no
gradients of its inner tensors. Transforms of `torch.func` are part of a graph.

Known limits: the watch follows sizes, not tensors, so a static size that happens to equal a dynamic size may leave one
more module to plain code. Where the root module itself looks at data, the graphs after that code are planned for the
shapes seen; with other shapes they run as plain code, and a message says so. A forward pass that takes gradients is
watched with all tensors that autograd saves.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.capture.failures import left_to_plain_code
from memfit.capture.values.decisions import MOST_OF_A_BUFFER
from memfit.torch_compat.core import OpOverload, TorchDispatchMode, in_func_transform, pytree

__all__ = ["GradientsTakenError", "NOTHING_PLAIN", "PlainParts", "VARYING", "find_plain_parts", "place_of"]

_aten = torch.ops.aten
_HERE = str(Path(__file__).resolve().parent.parent) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
_SHAPING = torch.Tag.dynamic_output_shape
_BY_MASK = (torch.bool, torch.uint8)
_SPARSE_GRADIENT = ("sparse",)
_TAKING_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
_TAKEN = "gradients are taken"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainParts:
    """Parts of a model that are left to plain code.

    Attributes:
        modules: names of modules whose forward passes Dynamo skips.
        loose: whether graphs that were not planned run as plain code, since shapes between subgraphs depend on data.
        only_children: whether only code that the model's forward pass calls is captured, not the forward pass's own
            code.
        numpy: whether Dynamo skips NumPy code (`memfit.capture.values.numpy_code`).
        reasons: the reasons, for people, with the user's lines.
    """

    modules: frozenset[str] = frozenset()
    loose: bool = False
    only_children: bool = False
    numpy: bool = False
    reasons: tuple[str, ...] = ()


_SHAPED_BY_DATA, _READS_NUMBERS = "shapes depend on data", "a number is read from a tensor"
VARYING = (_SHAPED_BY_DATA, _READS_NUMBERS)
"""The beginnings of reasons of parts whose memory changes with the data, or with random numbers."""

NOTHING_PLAIN = PlainParts()


class GradientsTakenError(Exception):
    """A forward pass that takes gradients itself cannot run while autograd records nothing."""


def find_plain_parts(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, decide: bool = True, gradients: bool = False
) -> PlainParts:
    """Runs the plain forward pass once, without gradients or with them, and watches its ops.

    The caller restores all state that the pass changes; an exception of the pass is the user's own error.

    Raises:
        GradientsTakenError: if the pass fails where it takes gradients itself and autograd records none.
        CaptureError: if the model's own code takes gradients.
    """
    watch = _Watch(model, decide=decide)
    taken = _GradientsTaken(watch)
    try:
        with torch.set_grad_enabled(gradients), watch, taken:
            model._call_impl(*args, **kwargs)
    except RuntimeError as error:
        if taken.by and not gradients:
            raise GradientsTakenError from error
        raise
    if "" in taken.by:
        raise left_to_plain_code(model, [taken.by[""]])
    for name, module in model.named_modules():
        if name and isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            watch.found.setdefault(name, (f"the gradient of {name} is sparse", name))
    modules = {name for name in watch.found if name and not _inside(name, watch.found)}
    # One line of the user's code is reported once, with the first of the modules that run it.
    reasons = {place: told for name, (told, place) in reversed(watch.found.items()) if not name or name in modules}
    return PlainParts(modules=frozenset(modules), loose=watch.dynamic, reasons=tuple(reversed(reasons.values())))


def place_of(frames: Iterator[types.FrameType] | None = None) -> str:
    """The innermost line of code outside torch and memfit, as `file:line`."""
    for frame in _frames() if frames is None else frames:
        file = frame.f_code.co_filename
        if not file.startswith((_HERE, _TORCH, "<")):
            return f"{file}:{frame.f_lineno}"
    return ""


def _inside(name: str, others: Iterable[str]) -> bool:
    return any(other and name.startswith(other + ".") for other in others)


def _frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class _Watch(TorchDispatchMode):
    """Finds the modules in which sizes depend on data, or tensors have no storage of their own."""

    def __init__(self, model: nn.Module, *, decide: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.decide = decide
        self.settled: Any = WeakTensorKeyDictionary()  # tensors whose numbers cause no graph break
        for buffer in model.buffers():
            if buffer.numel() <= MOST_OF_A_BUFFER:
                self.settled[buffer] = True
        self.names = {id(module): name for name, module in model.named_modules()}
        self.found: dict[str, tuple[str, str]] = {}
        self.dynamic = False
        self.sizes: Any = WeakTensorKeyDictionary()  # frozenset[int] by tensor
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        operands = [t for t in leaves if isinstance(t, torch.Tensor)]
        results = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        self._settle(func, operands, results)
        if func is _aten._local_scalar_dense.default:
            self._number_read(operands[0], result)
        elif any(t.layout is not torch.strided for t in (*operands, *results)):
            self.mark("a tensor is sparse")
        elif _sparse_gradient(func, args, kwargs or {}):
            self.mark("a gradient is sparse")
        elif _shaped_by_data(func, operands):
            self.dynamic = True
            for tensor in results:
                self.sizes[tensor] = frozenset(tensor.shape)
            self.mark(_SHAPED_BY_DATA)
        else:
            self._follow(leaves, operands, results)
        return result

    def _settle(self, func: Any, operands: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Follows tensors made from constants and small buffers alone (`memfit.capture.values.decisions`)."""
        certain = all(t in self.settled for t in operands) and torch.Tag.nondeterministic_seeded not in func.tags
        for tensor in results:
            if any(tensor is t for t in operands) or not certain:
                self.settled.pop(tensor, None)
            else:
                self.settled[tensor] = True

    def _number_read(self, tensor: torch.Tensor, number: Any) -> None:
        if tensor.dtype is torch.bool:
            return  # a branch; the graph breaks there
        if self.decide and tensor in self.settled:
            return
        if not tensor.dtype.is_floating_point and isinstance(number, int):
            self.read.add(number)
        self.dynamic = True
        self.mark(_READS_NUMBERS)

    def _follow(self, leaves: list[Any], operands: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        sizes = frozenset[int]().union(*(self.sizes.get(t, frozenset()) for t in operands))
        sizes |= {n for n in leaves if isinstance(n, int) and not isinstance(n, bool) and n in self.read and n > 1}
        if not sizes:
            return
        of_data = [t for t in operands if t in self.sizes]
        for tensor in results:
            if any(tensor is t for t in operands):
                continue
            here = sizes.intersection(tensor.shape)
            if not here and any(tensor.dim() and tensor.numel() == t.numel() for t in of_data):
                here = frozenset(tensor.shape)
            if here:
                self.sizes[tensor] = here
        if of_data:
            self.mark(_SHAPED_BY_DATA)

    def mark(self, reason: str) -> str | None:
        """Notes the module whose code runs, and returns its name; None if the code is in no module."""
        for frame in _frames():
            if frame.f_code.co_filename.startswith(_HERE):
                continue
            first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
            name: str | None = self.names.get(id(frame.f_locals.get(*first))) if first else None
            if name is not None:
                if name not in self.found:
                    self.found[name] = (f"{reason} in {name or 'the model itself'} ({place_of()})", place_of())
                return name
        return None


class _GradientsTaken(TorchFunctionMode):
    """Finds the modules whose code takes gradients.

    Gradients that a transform of `torch.func` takes do not count: the transform is captured as part of a graph.
    """

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch
        self.by: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TAKING_GRADIENTS and not in_func_transform():
            name = self.watch.mark(_TAKEN)
            if name is not None:
                self.by.setdefault(name, f"{_TAKEN} in {name or 'the forward pass of the model itself'} ({place_of()})")
        return func(*args, **(kwargs or {}))


def _shaped_by_data(func: Any, operands: list[torch.Tensor]) -> bool:
    if not isinstance(func, OpOverload) or _SHAPING not in func.tags:
        return False
    if func in (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default):
        return any(t.dtype in _BY_MASK for t in operands[1:])
    return True


def _sparse_gradient(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if not isinstance(func, OpOverload):
        return False
    names = [argument.name for argument in func._schema.arguments]
    for name in _SPARSE_GRADIENT:
        if name in names and "embedding" in func._schema.name:
            place = names.index(name)
            return bool(args[place] if place < len(args) else kwargs.get(name, False))
    return False
