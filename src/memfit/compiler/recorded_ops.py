"""Records the ops of a step as they run: their names, their modules, and fingerprints of their results.

A dispatch mode sees every op of the forward and the backward pass. The module of an op is known from hooks that run
around every module's forward pass, and in the backward pass from the sequence number that autograd gives to the node of
a forward op. A fingerprint is a hash of a tensor's bits in logical order: equal for equal contents, whatever their
layout in memory. The recorder stores hashes, not tensors, so recording a step takes little more memory than the step.

Known limits: tensor subclasses, sparse tensors and fake tensors have no fingerprint. Ops of a backward node that a
higher derivative made belong to the nearest op before it.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from memfit.fxir.op_family import op_family
from memfit.torch_compat.core import (
    OpOverload,
    TorchDispatchMode,
    autograd_node_number,
    current_autograd_node,
    is_functional_tensor,
    pytree,
)

__all__ = ["Place", "RecordedOp", "RecordedOps", "RecordedTensor", "fingerprint", "modules_known"]

_NOT_THE_USERS = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep, "<")
"""Path prefixes of the files of torch and of memfit."""

_CHUNK_BYTES = 64 << 20
_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize", "set")
"""Ops whose result has no contents yet."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place in the user's program that runs an op.

    Attributes:
        module: path and class of the module, as far as it is known.
        line: file, line and function of the innermost code that is neither torch's nor memfit's.
    """

    module: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """A tensor as an op made or read it.

    Attributes:
        fingerprint: hash of its bits in logical order; None if it has none.
        shape: sizes.
        strides: its layout in memory.
        dtype: dtype of its elements.
    """

    fingerprint: bytes | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOp:
    """One recorded call.

    Attributes:
        name: name of the op, such as `aten.relu.default`.
        backward: whether it ran in a backward pass.
        place: place in the user's program; in the backward pass, that of the forward op.
        results: tensors that it made.
        sources: tensors that it read, each as the number of the op that made it and its place among the results.
        is_view: whether its results are views of its operands.
        is_random: whether it draws random numbers.
    """

    name: str
    backward: bool
    place: Place
    results: tuple[RecordedTensor, ...]
    sources: frozenset[tuple[int, int]]
    is_view: bool = False
    is_random: bool = False


@dataclass(slots=True)
class Watched:
    """A call that is recorded in more detail.

    Attributes:
        operands: tensors that it read, recorded before it ran.
        results: copies of the tensors that it made.
    """

    operands: tuple[RecordedTensor, ...] = ()
    results: tuple[torch.Tensor, ...] = ()


class RecordedOps(TorchDispatchMode):
    """While active, records every call.

    Args:
        operands: whether fingerprints of operands are stored as well, in `contents`.
        watch: number of a call whose operands and results are stored.
        hashes: whether calls other than the watched call are hashed.
    """

    # Dynamo refuses to run compiled code under other modes, and replayed random ops are higher-order ops.
    is_infra_mode = classmethod(lambda cls: True)
    supports_higher_order_operators = True

    def __init__(self, *, operands: bool = False, watch: int | None = None, hashes: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[RecordedOp] = []
        self.contents: set[bytes] = set()
        self.returned: set[int] = set()
        self.watched = Watched()
        self.modules = _Modules()
        self._operands, self._watch, self._hashes = operands, watch, hashes
        self._writer: dict[int, tuple[int, int]] = {}
        self._numbers: list[int] = []  # of autograd's nodes, ascending; `_places` has their forward ops
        self._places: list[Place] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        number = len(self.ops)
        read = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if self._operands:
            self._see(read)
        if number == self._watch:
            self.watched.operands = tuple(recorded(t) for t in read)
        sources = frozenset(self._writer[key] for t in read if (key := _memory(t)) in self._writer)
        result = func(*args, **kwargs)
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        inner = next((a for a in args if isinstance(a, OpOverload)), func)
        is_view = _is_view(inner)
        name = str(inner)
        hashes = self._hashes and not is_view and op_family(name) not in _UNWRITTEN
        if not is_view:
            self._writer.update((_memory(t), (number, 0)) for t in _written(inner, args, kwargs))
            self._writer.update((_memory(t), (number, place)) for place, t in enumerate(made))
        place, backward = self._place()
        self.ops.append(
            RecordedOp(
                name=name,
                backward=backward,
                place=place,
                results=tuple(recorded(t, hashes=hashes and not _is_workspace(t, read)) for t in made),
                sources=sources,
                is_view=is_view,
                is_random=torch.Tag.nondeterministic_seeded in getattr(inner, "tags", ()),
            )
        )
        if self._operands:
            self.contents.update(r.fingerprint for r in self.ops[-1].results if r.fingerprint is not None)
        if number == self._watch:
            self.watched.results = tuple(t.detach().clone() for t in made)
        return result

    def end(self, returned: object) -> None:
        """Records the returned tensors: the ops that made them (`returned`) and their contents (`contents`)."""
        tensors = [t for t in pytree.tree_leaves(returned) if isinstance(t, torch.Tensor)]
        self.returned.update(self._writer[key][0] for t in tensors if (key := _memory(t)) in self._writer)
        if self._operands:
            self._see(tensors)

    def _see(self, tensors: Iterable[torch.Tensor]) -> None:
        self.contents.update(seen for t in tensors if (seen := fingerprint(t)) is not None)

    def _place(self) -> tuple[Place, bool]:
        """The place of the op that runs now, and whether it runs in a backward pass."""
        node: Any = current_autograd_node()
        if node is not None:
            found = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
            return self._places[found] if found >= 0 else Place(), True
        place = Place(self.modules.innermost, _line(sys._getframe(2)))
        number = autograd_node_number()
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._places.append(place)
        elif number == self._numbers[-1] and place.module:
            self._places[-1] = place
        return place, False


@dataclass(slots=True)
class _Modules:
    """The modules whose forward passes are running, outermost first."""

    running: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: dict[nn.Module, dict[nn.Module, str]] = field(default_factory=dict)

    @property
    def innermost(self) -> str:
        if not self.running:
            return ""
        module, path = self.running[-1]
        return f"{path} ({type(module).__name__})" if path else type(module).__name__

    def enter(self, module: nn.Module) -> None:
        path = ""
        for around, prefix in reversed(self.running):
            if around not in self.names:
                self.names[around] = {m: name for name, m in around.named_modules()}
            name = self.names[around].get(module)
            if name is not None:
                path = ".".join(part for part in (prefix, name) if part)
                break
        self.running.append((module, path))

    def leave(self, module: nn.Module) -> None:
        while self.running:
            if self.running.pop()[0] is module:
                return


@contextlib.contextmanager
def modules_known(recorder: RecordedOps) -> Iterator[None]:
    """Tells a recorder which module runs, by hooks around every module's forward pass."""
    hooks = (
        torch_module.register_module_forward_pre_hook(lambda module, _: recorder.modules.enter(module)),
        torch_module.register_module_forward_hook(
            lambda module, _, __: recorder.modules.leave(module), always_call=True
        ),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def recorded(tensor: torch.Tensor, *, hashes: bool = True) -> RecordedTensor:
    """Record of a tensor: its fingerprint (None without `hashes`), shape, strides and dtype."""
    strides = tuple(tensor.stride()) if tensor.layout is torch.strided else ()
    return RecordedTensor(fingerprint(tensor) if hashes else None, tuple(tensor.shape), strides, tensor.dtype)


def fingerprint(tensor: torch.Tensor) -> bytes | None:
    """A hash of a tensor's dtype, size and bits in logical order; None for a tensor without bits of its own."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if tensor.is_meta or tensor.is_quantized or is_functional_tensor(tensor):
        return None
    if tensor.numel() and not tensor.untyped_storage().nbytes():  # it is metadata-only, or is freed
        return None
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    flat = flat.as_strided(flat.shape, (1,))  # a single element has any stride, also when contiguous
    found = hashlib.blake2b(f"{tensor.dtype} {tensor.numel()} ".encode(), digest_size=16)
    step = max(1, _CHUNK_BYTES // max(1, tensor.element_size()))
    for start in range(0, tensor.numel(), step):
        found.update(flat[start : start + step].view(torch.uint8).cpu().numpy().data)
    return found.digest()


def _memory(tensor: torch.Tensor) -> int:
    """Number that identifies the memory of a tensor while it lives."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # sparse, or a subclass without memory
        return id(tensor)


def _is_workspace(made: torch.Tensor, read: Sequence[torch.Tensor]) -> bool:
    """Whether a result is bytes that a library keeps for the backward pass, some of which it never writes."""
    return made.dtype is torch.uint8 and bool(read) and all(t.is_floating_point() for t in read)


def _is_view(op: Any) -> bool:
    schema = getattr(op, "_schema", None)
    aliases = [] if schema is None else [r.alias_info for r in schema.returns if r.alias_info is not None]
    return bool(aliases) and not any(a.is_write for a in aliases)


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The operands that a call writes over."""
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return found


def _line(frame: FrameType | None) -> str:
    """File, line and function of the innermost frame that is neither torch's nor memfit's."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_NOT_THE_USERS):
            return f"{path}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
