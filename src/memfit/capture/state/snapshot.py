"""Planning leaves no trace: a snapshot of all state that a training step can reach and change, and its restoration.

Planning runs the user's code: Dynamo follows it with fake tensors, and a plan is proved by steps on real tensors. A
forward pass may write parameters (momentum encoders, `nn.Embedding(max_norm=...)`), tensors in plain attributes, lists,
counters, its own generators; a loss may keep a running centre; hooks append, count and step optimizers; a backward pass
adds to `.grad` of all leaves that it reaches.

The technique is that of a debugger's checkpoint: walk the object graph from a few roots (module, inputs, loss,
optimizer), note every container's entries, every tensor's memory, metadata, gradient and version, and every random
generator's state; later write back only the differences. Containers keep their identity. A tensor that did not change
is not written, so graphs that the caller has in flight stay valid.

Copies lie in host memory. Where host memory has no room for a copy, only the version of the tensor is watched, and a
change that cannot be undone is reported.

Known limits: these are not restored: files, sockets, printed output, Python's iterators and generators, memory behind
NumPy views of other objects, and state that extensions hide from Python. Module globals are followed only for code
outside installed packages.
"""

from __future__ import annotations

import dis
import functools
import logging
import random
import sys
import sysconfig
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as _nn_module

from memfit.capture.distributed.fsdp import resharded
from memfit.capture.state.tensor import TensorState, bytes_of, differs, noted, restore_tensor
from memfit.device_memory import free_bytes

__all__ = ["Snapshot", "preserved", "snapshot"]

log = logging.getLogger(__name__)

_MOST_OBJECTS = 500_000
_SHARE_OF_FREE = 0.5
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(Ellipsis))
_OPAQUE = (types.ModuleType, types.GeneratorType, types.CodeType, types.FrameType, logging.Logger, logging.Handler)
_OPAQUE_PACKAGES = ("torch", "threading", "logging", "memfit", "pytest", "_pytest")
_OPEN_PACKAGES = ("torch.nn", "torch.optim", "torch.ao", "torch.amp")
"""Of torch only these packages are followed: the rest keeps caches and communicators, which belong to torch."""
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The noted state of everything reachable from some roots.

    Attributes:
        tensors: states of the tensors, in the order they were found.
        undo: writes back containers, attributes and generators that differ.
    """

    tensors: tuple[TensorState, ...]
    undo: tuple[Callable[[], None], ...] = field(repr=False)

    def changed(self) -> dict[str, torch.Tensor]:
        """By name, the tensors whose values have changed, without the tensors whose memory is only watched."""
        return {state.name: state.tensor for state in self.tensors if state.copy is not None and differs(state)}

    def leaves(self) -> list[torch.Tensor]:
        """The tensors that can receive a gradient of their own."""
        return [s.tensor for s in self.tensors if s.requires_grad and s.tensor.is_leaf]

    def restore(self) -> None:
        """Writes back all differences; can be called any number of times."""
        for write_back in self.undo:
            write_back()
        for state in self.tensors:
            restore_tensor(state)


@contextmanager
def preserved(*roots: object, values: bool = True) -> Iterator[Snapshot]:
    """Restores everything reachable from `roots` on exit, whether the body succeeds, fails or is interrupted.

    On exit, a sharded module among the roots is in shards, as between two steps.

    Args:
        roots: modules, inputs, losses, optimizers, any objects; None is ignored.
        values: whether tensors' memory is copied; otherwise only objects that hold tensors, and tensor metadata, are
            restored.

    Yields:
        The snapshot, which can be restored in between.
    """
    state = snapshot(*roots, values=values)
    try:
        with ExitStack() as shards:
            for root in roots:
                if isinstance(root, nn.Module):
                    shards.enter_context(resharded(root))
            yield state
    finally:
        state.restore()


def snapshot(*roots: object, values: bool = True) -> Snapshot:
    """Notes everything that is reachable from `roots`, the global random generators and global module hooks.

    Args:
        roots: see `preserved`.
        values: see `preserved`.
    """
    walk = _Walk(values)
    walk.global_generators()
    for name in _GLOBAL_HOOKS:
        walk.visit(getattr(_nn_module, name, None), name)
    for root in roots:
        walk.visit(root, "")
        walk.drain()
    return Snapshot(tensors=tuple(walk.tensors), undo=tuple(walk.undo))


class _Walk:
    """The walk over the object graph, breadth first: the shortest name wins."""

    def __init__(self, values: bool) -> None:
        self.values = values
        self.tensors: list[TensorState] = []
        self.undo: list[Callable[[], None]] = []
        self.seen: dict[int, object] = {}  # holds the objects, so that no id is used twice
        self.waiting: deque[tuple[object, str]] = deque()
        self.copies: dict[tuple[int, int, int], torch.Tensor | None] = {}
        self.room = int(free_bytes(torch.device("cpu")) * _SHARE_OF_FREE)

    def visit(self, thing: object, name: str) -> None:
        """Puts an object in the queue if it can hold state and is new."""
        if isinstance(thing, _ATOMS) or isinstance(thing, _OPAQUE) or id(thing) in self.seen:
            return
        if len(self.seen) == _MOST_OBJECTS:
            log.warning("planning restores no more than %d objects; further ones keep changes", _MOST_OBJECTS)
        if len(self.seen) >= _MOST_OBJECTS:
            return
        self.seen[id(thing)] = thing
        self.waiting.append((thing, name))

    def drain(self) -> None:
        """Notes all objects in the queue and all objects that these lead to."""
        while self.waiting:
            self._note(*self.waiting.popleft())

    def global_generators(self) -> None:
        """Notes the global random generators."""
        self.undo.append(_again(torch.get_rng_state, torch.set_rng_state))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.undo.append(_again(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
        self.undo.append(_again(random.getstate, random.setstate))
        self.undo.append(_again(np.random.get_state, np.random.set_state))

    def _note(self, thing: object, name: str) -> None:
        if isinstance(thing, torch.Tensor):
            self._tensor(thing, name)
        elif isinstance(thing, torch.Generator):
            self.undo.append(_again(thing.get_state, thing.set_state))
        elif isinstance(thing, random.Random):
            self.undo.append(_again(thing.getstate, thing.setstate))
        elif isinstance(thing, np.random.RandomState):
            self.undo.append(_again(thing.get_state, thing.set_state))
        elif isinstance(thing, np.random.Generator):
            self.visit(thing.bit_generator, name)
        elif isinstance(thing, np.random.BitGenerator):
            self.undo.append(_again(lambda: thing.state, lambda state: setattr(thing, "state", state)))
        elif isinstance(thing, np.ndarray):
            self._array(thing, name)
        elif isinstance(thing, dict):
            self._mapping(thing, name)
        elif isinstance(thing, list | deque | bytearray):
            self._sequence(thing, name)
        elif isinstance(thing, set):
            self._set(thing, name)
        elif isinstance(thing, tuple | frozenset):
            self._children(enumerate(thing), name)
        elif isinstance(thing, functools.partial):
            self._children({"func": thing.func, "args": thing.args, "keywords": thing.keywords}.items(), name)
        elif isinstance(thing, types.MethodType):
            self._children((("", thing.__self__), ("", thing.__func__)), name)
        elif isinstance(thing, types.FunctionType):
            self._function(thing, name)
        elif isinstance(thing, types.CellType):
            self._cell(thing, name)
        elif isinstance(thing, type):
            self._class(thing, name)
        else:
            self._instance(thing, name)

    def _children(self, items: Any, name: str) -> None:
        for key, value in items:
            self.visit(value, _joined(name, key))

    def _tensor(self, tensor: torch.Tensor, name: str) -> None:
        self.tensors.append(noted(tensor, name, copied=self._copy if self.values else None))
        if tensor.is_leaf or tensor.retains_grad:
            self.visit(tensor.grad, _joined(name, "grad"))
        self.visit(tensor._backward_hooks, name)
        self.visit(getattr(tensor, "_post_accumulate_grad_hooks", None), name)
        self._vars(tensor, name)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The bytes of a tensor's memory, on the host; None if the tensor has no memory or the host has no room."""
        span = bytes_of(tensor)
        if span is None:
            return None
        key = (span.data_ptr(), span.numel(), span.device.index or 0)
        if key not in self.copies:
            room = span.numel() <= self.room
            self.room -= span.numel() if room else 0
            self.copies[key] = torch.empty(span.shape, dtype=torch.uint8, device="cpu").copy_(span) if room else None
        return self.copies[key]

    def _array(self, array: np.ndarray[Any, Any], name: str) -> None:
        if array.dtype.hasobject:
            self._children(enumerate(array.flat), name)
        elif array.flags.writeable and array.nbytes <= self.room:
            self.room -= array.nbytes
            saved = array.copy()

            def restore() -> None:
                if array.tobytes() != saved.tobytes():
                    array[...] = saved

            self.undo.append(restore)

    def _mapping(self, mapping: dict[Any, Any], name: str) -> None:
        # Uses the base class's methods: some subclasses make a new object at each read of an entry.
        base = OrderedDict if isinstance(mapping, OrderedDict) else dict
        saved = _items(mapping)
        self._children(saved.items(), name)

        def restore() -> None:
            if _same_items(_items(mapping), saved):
                return
            base.clear(mapping)
            for key, value in saved.items():
                base.__setitem__(mapping, key, value)

        self.undo.append(restore)

    def _sequence(self, sequence: Any, name: str) -> None:
        base: Any = next(kind for kind in (list, deque, bytearray) if isinstance(sequence, kind))
        saved = list(base.__iter__(sequence))
        if not isinstance(sequence, bytearray):
            self._children(enumerate(saved), name)

        def restore() -> None:
            now = list(base.__iter__(sequence))
            if len(now) == len(saved) and all(a is b for a, b in zip(now, saved, strict=True)):
                return
            base.clear(sequence)
            base.extend(sequence, saved)

        self.undo.append(restore)

    def _set(self, members: set[Any], name: str) -> None:
        saved = set(set.__iter__(members))
        self._children(enumerate(saved), name)

        def restore() -> None:
            if set(set.__iter__(members)) != saved:
                set.clear(members)
                set.update(members, saved)

        self.undo.append(restore)

    def _function(self, function: types.FunctionType, name: str) -> None:
        if _is_opaque(function.__module__):
            return
        self._children(enumerate(function.__closure__ or ()), name)
        self._children(enumerate(function.__defaults__ or ()), name)
        self._children((function.__kwdefaults__ or {}).items(), name)
        self._vars(function, name)
        if _is_users(function.__code__.co_filename):
            self._globals(function, name)

    def _globals(self, function: types.FunctionType, name: str) -> None:
        """Notes the module globals that a user's function refers to, and the objects that they are bound to."""
        everything = function.__globals__
        bound = {n: everything[n] for n in _names(function.__code__) if n in everything}
        self._children(bound.items(), name)
        held = {n: v for n, v in bound.items() if not isinstance(v, types.ModuleType | types.FunctionType | type)}

        def restore() -> None:
            for key, value in held.items():
                if everything.get(key) is not value:
                    everything[key] = value

        if held:
            self.undo.append(restore)

    def _cell(self, cell: types.CellType, name: str) -> None:
        try:
            saved = cell.cell_contents
        except ValueError:  # not filled yet
            return
        self.visit(saved, name)

        def restore() -> None:
            if cell.cell_contents is not saved:
                cell.cell_contents = saved

        self.undo.append(restore)

    def _class(self, cls: type, name: str) -> None:
        """Notes the attributes of a user's class, and the objects that its methods lead to."""
        module = sys.modules.get(cls.__module__)
        if module is None or not _is_users(getattr(module, "__file__", None) or ""):
            return
        saved = dict(vars(cls))
        self._children(saved.items(), _joined(name, cls.__name__))
        plain = {k: v for k, v in saved.items() if not k.startswith("__") and not hasattr(type(v), "__get__")}

        def restore() -> None:
            for key, value in plain.items():
                if vars(cls).get(key) is not value:
                    setattr(cls, key, value)

        if plain:
            self.undo.append(restore)

    def _instance(self, thing: object, name: str) -> None:
        cls = type(thing)
        if _is_opaque(cls.__module__) and not isinstance(thing, nn.Module | torch.optim.Optimizer):
            return
        self._vars(thing, name)
        for base in cls.__mro__:
            slots = vars(base).get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                self._slot(thing, slot, name)
        self.visit(cls, "")
        for base in cls.__mro__[1:]:
            self.visit(base, "")

    def _slot(self, thing: object, slot: str, name: str) -> None:
        missing = object()
        saved = getattr(thing, slot, missing)
        if saved is missing or slot in ("__dict__", "__weakref__"):
            return
        self.visit(saved, _joined(name, slot))

        def restore() -> None:
            if getattr(thing, slot, missing) is not saved:
                object.__setattr__(thing, slot, saved)

        self.undo.append(restore)

    def _vars(self, thing: object, name: str) -> None:
        attributes = getattr(thing, "__dict__", None)
        if isinstance(attributes, dict) and id(attributes) not in self.seen:
            self.seen[id(attributes)] = attributes
            self._mapping(attributes, name)


def _is_opaque(module: str | None) -> bool:
    """Whether the walk does not follow the state of a module's code."""
    within = [package for package in (*_OPAQUE_PACKAGES, *_OPEN_PACKAGES) if f"{module}.".startswith(f"{package}.")]
    return bool(within) and max(within, key=len) in _OPAQUE_PACKAGES


def _again(get: Callable[[], Any], put: Callable[[Any], Any]) -> Callable[[], None]:
    """A function that restores a state that is read and written by calls."""
    state = get()
    return lambda: put(state)


def _items(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Items of a dictionary, in its order, read without methods that its class may override."""
    keys = OrderedDict.__iter__(mapping) if isinstance(mapping, OrderedDict) else dict.__iter__(mapping)
    return {key: dict.__getitem__(mapping, key) for key in keys}


def _same_items(mapping: dict[Any, Any], saved: dict[Any, Any]) -> bool:
    if len(mapping) != len(saved):
        return False
    return all(a is b and v is w for (a, v), (b, w) in zip(mapping.items(), saved.items(), strict=True))


def _joined(name: str, key: object) -> str:
    key = str(key) if isinstance(key, str | int) else type(key).__name__
    if key in ("_parameters", "_buffers", "_modules"):
        return name
    return f"{name}.{key}" if name and key else name or key


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of globals that code and the functions in it use, and not those of the attributes that it uses."""
    for instruction in dis.get_instructions(code):
        if "GLOBAL" in instruction.opname or instruction.opname == "LOAD_NAME":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_users(filename: str) -> bool:
    """Whether code lies outside Python and installed packages."""
    return bool(filename) and not filename.startswith("<frozen") and not filename.startswith(_INSTALLED)
