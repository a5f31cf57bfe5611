"""Values of small integers and masks in a step that runs on fake tensors.

Models look at values that their inputs decide: whether an attention mask is all ones, how long the longest sequence is,
which labels are ignored. A fake tensor has no values, so such a step would not run.

Idea: an integer or a mask that is computed from the inputs alone is computed really, beside the fake one, and its value
is given where code asks for it. Torch knows this as constants of fake tensors, for tensors of one element; Dynamo's
`propagate_real_tensors` does it for all tensors of a step, which then needs the time and the memory of the step.

Known limits: values that depend on parameters or on floating inputs stay unknown, as do large tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memfit.capture.allocation_tracker import tensors_in
from memfit.torch_compat.core import (
    VALUE_ERRORS,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    pytree,
    unset_fake_temporarily,
)

__all__ = ["KnownValues"]

_aten = torch.ops.aten

_MOST_ELEMENTS = 1 << 20
_WITHOUT_VALUES = frozenset(
    (_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, _aten.empty_strided.default)
)
"""Ops whose result has no values yet."""


class KnownValues(TorchDispatchMode):
    """Computes small tensors that depend on known ones only; to be entered after the mode of the fake tensors.

    Attributes:
        mode: the mode of the fake tensors.
        asked: whether code has asked for a value.
    """

    # As the modes around it: without these flags, Dynamo refuses to trace under it, and some ops refuse to run.
    is_infra_mode = classmethod(lambda cls: True)
    supports_higher_order_operators = True

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.asked = False
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor of a real one, whose value is known if it is small and neither floating nor complex."""
        made = self.mode.from_tensor(tensor)
        if not _is_inexact(tensor) and _is_small(tensor) and not tensor.is_meta and not isinstance(tensor, FakeTensor):
            with unset_fake_temporarily():
                self._known[made] = tensor.clone()  # code of the step may write over it
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op on fake tensors, and on values where all operands have one."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):  # an op of higher order
            return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        known = all(self._value(t) is not None for t in tensors)
        if not known or func in _WITHOUT_VALUES or torch.Tag.nondeterministic_seeded in func.tags:
            self._forget(func, args, kwargs)
            return func(*self._by_places(func, args), **kwargs)
        try:
            made = func(*args, **kwargs)
        except VALUE_ERRORS:
            self.asked = True
            return pytree.tree_map_only(torch.Tensor, self.fake, self._computed(func, args, kwargs))
        fakes = [t for t in tensors_in((made,)) if isinstance(t, FakeTensor)]
        if fakes and all(_is_small(t) for t in fakes) and (tensors or not any(map(_is_inexact, fakes))):
            for fake, real in zip(fakes, tensors_in((self._computed(func, args, kwargs),)), strict=True):
                self._known[fake] = real
        return made

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        value: torch.Tensor | None = self._known.get(tensor)
        return tensor.constant if value is None and isinstance(tensor, FakeTensor) else value

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        with unset_fake_temporarily(), torch.no_grad():
            given, named = pytree.tree_map_only(torch.Tensor, self._value, (args, kwargs))
            return func(*given, **named)

    def _by_places(self, func: Any, args: Any) -> Any:
        """The arguments, with the places of ones, whose number is known, for an index by a known mask."""
        if func is not _aten.index.Tensor:
            return args
        indices: list[Any] = []
        for index in args[1]:
            mask = None if index is None else self._value(index)
            if mask is None or mask.dtype is not torch.bool:
                indices.append(index)
                continue
            with unset_fake_temporarily():
                places = mask.nonzero().unbind(1)
            self.asked = True
            indices += [self.fake(place) for place in places]
        return args[0], indices

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forgets the values of tensors whose memory an op writes over with unknown ones."""
        if not func._schema.is_mutable:
            return
        named = zip(func._schema.arguments, args, strict=False)
        given = [value for argument, value in named if argument.is_write]
        given += [kwargs[a.name] for a in func._schema.arguments if a.is_write and a.name in kwargs]
        written = {t.untyped_storage()._cdata for t in tensors_in(given)}
        for known in [k for k in self._known if k.untyped_storage()._cdata in written]:
            del self._known[known]


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() <= _MOST_ELEMENTS


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
