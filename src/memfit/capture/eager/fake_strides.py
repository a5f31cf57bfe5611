"""How kernels lay out their results in memory, where fake tensors report another layout.

Fake tensors stand in for kernels with other code: decompositions that compute the same numbers in another way, and
shape functions that were written for contiguous data. Where operands have another layout (channels last, transposed,
repeated), such code lays out results in another order than the kernel does, for dozens of ops. A graph made with these
layouts would write a result over an operand of another layout, make views that the real layout does not allow, sum in
another order, or draw random numbers in another order.

*Idea*: ask the kernel. While a graph is made, a call whose tensors are not all contiguous is made a second time, on a
few real elements of the same layout (`memfit.capture.eager.kernel_samples`), once with the kernel and once with fake
tensors; where the two layouts differ, the fake result of the call itself gets the layout of the kernel's result. A
process asks about each call of tensors and plain values once, because the layout of a kernel's result is a fixed
property of torch. Strides along
axes of one element count too, since kernels use them to tell whether an image is channels last; views get these strides
by torch's own rule, on the meta device. The kernel is also asked where floating-point operands have several dtypes, and
then the dtypes of its results count: in mixed precision, statistics of batch normalisation have the dtype of the
weights. `aten.copy`, which stands for an in-place write to a view, takes as much memory as the viewed tensor: its
kernel clones the whole tensor. Other kernels resize their result (`memfit.capture.eager.resized_results`).

Known limits: the fake layouts of ops of other libraries are trusted, and so are those of calls whose kernels refuse
every sample, and of most calls that have integer operands and are not element-wise: kernels are not given made-up
indices.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.capture.eager.kernel_samples import made_by_kernel, real_like, sizes_to_try, smaller_numbers, strides_alike
from memfit.capture.eager.resized_results import elements_before_resizing
from memfit.ops.kernels.settings import kernel_settings
from memfit.torch_compat.core import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    disable_current_modes,
    make_contiguous_strides_for,
    no_dispatch,
    no_python_dispatcher,
    pytree,
)

__all__ = ["TAKING_INDICES", "reads_by_index", "strides_of_kernels"]

log = logging.getLogger(__name__)

_OURS = "_memfit_strides_of_kernels"

_PLAIN = (
    *(torch.Tensor, bool, int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

_Layout = tuple[tuple[int, ...], torch.dtype]
"""Strides and dtype."""

_Layouts = tuple[_Layout | None, ...]


@contextmanager
def strides_of_kernels() -> Iterator[None]:
    """While active, fake results have the layouts of the kernels' results."""
    plain = FakeTensorMode.dispatch
    if hasattr(plain, _OURS):
        yield
        return
    asked = _Asked(plain=plain, lasting=_known_layouts(_settings()))

    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return asked.result(mode, func, types, args, kwargs or {})

    setattr(dispatch, _OURS, True)
    FakeTensorMode.dispatch = dispatch  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        FakeTensorMode.dispatch = plain  # type: ignore[method-assign]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps fake tensors from logging the calls that they refuse, since they may refuse a sample."""
    theirs = logging.getLogger(FakeTensorMode.__module__)
    before, theirs.disabled = theirs.disabled, True
    try:
        yield
    finally:
        theirs.disabled = before


def _settings() -> tuple[object, ...]:
    """Settings that choose kernels, in addition to the calls themselves."""
    chosen = torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled, torch.get_default_dtype()
    casts = (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
    return (*chosen, *casts, *kernel_settings("cpu"), *(kernel_settings("cuda") if torch.cuda.is_initialized() else ()))


@functools.cache
def _known_layouts(settings: tuple[object, ...]) -> dict[Any, _Layouts]:
    """The kernels' answers so far, under the same settings."""
    return {}


class _Within(threading.local):
    """Whether this thread is inside a call of the graph; calls that such a call makes are not calls of the graph."""

    call = False


@dataclass(slots=True, kw_only=True)
class _Asked:
    """The kernels' answers, and torch's own dispatch of fake tensors.

    Attributes:
        plain: torch's own dispatch.
        lasting: answers about calls with tensors and plain values only, which outlive the graph.
        within: whether this thread is inside a call of the graph.
        kinds: which ops make tensors.
        layouts: other answers; their keys may hold the user's objects.
    """

    plain: Any
    lasting: dict[Any, _Layouts]
    within: _Within = field(default_factory=_Within)
    kinds: dict[Any, bool] = field(default_factory=dict)
    layouts: dict[Any, _Layouts] = field(default_factory=dict)

    def result(self, mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not self.within.call and func in _RESHAPES:
            return _viewed(mode, self.plain(mode, func, types, args, kwargs), func, *args)
        if not self.within.call and func is _COPY and _is_known(args[0]) and not _overlaps(args[0]):
            viewed = args[0]
            made = self.plain(mode, func, types, args, kwargs)
            count = viewed.untyped_storage().nbytes() // made.element_size()
            return _in_memory_of(mode, made, count, viewed.storage_offset())
        if self.within.call or not self._makes_tensors(func):
            return self.plain(mode, func, types, args, kwargs)
        self.within.call = True
        try:
            made = self.plain(mode, func, types, args, kwargs)
            laid_out = self._as_kernel_lays_out(mode, func, args, kwargs, made)
            count = elements_before_resizing(func, args, kwargs)
            return _in_memory_of(mode, laid_out, count, 0) if count else laid_out
        finally:
            self.within.call = False

    def _makes_tensors(self, func: Any) -> bool:
        known = self.kinds.get(func)
        if known is None:
            known = self.kinds[func] = _makes_tensors(func)
        return known

    def _as_kernel_lays_out(self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, made: Any) -> Any:
        arguments, spec = pytree.tree_flatten((args, kwargs))
        results, nesting = pytree.tree_flatten(made)
        operands = [a for a in arguments if isinstance(a, torch.Tensor)]
        tensors = [*operands, *(r for r in results if isinstance(r, torch.Tensor))]
        if not all(_is_known(t) for t in tensors):
            return made
        if all(_is_upright(t) for t in tensors) and len({t.dtype for t in operands if t.is_floating_point()}) < 2:
            return made
        memory = {t.untyped_storage()._cdata for t in operands}
        if any(r.untyped_storage()._cdata in memory for r in results if isinstance(r, torch.Tensor)):
            return made
        key = (func, spec, *map(_key, arguments), *map(_key, results))
        known = self.lasting if all(isinstance(a, _PLAIN) for a in arguments) else self.layouts
        layouts = known.get(key)
        if layouts is None:
            layouts = known[key] = self._ask(mode, func, arguments, spec, results)
        if not any(layouts):
            return made
        return pytree.tree_unflatten(
            [r if lies is None else _laid_out(mode, r, *lies) for r, lies in zip(results, layouts, strict=True)],
            nesting,
        )

    def _ask(
        self,
        mode: FakeTensorMode,
        func: OpOverload,
        arguments: Sequence[Any],
        spec: pytree.TreeSpec,
        results: Sequence[Any],
    ) -> _Layouts:
        """The layouts of the results that differ from the fake layouts; None for each result without a difference."""
        operands = [a for a in arguments if isinstance(a, torch.Tensor)]
        by_index = reads_by_index(func, operands)
        if by_index and func.overloadpacket not in TAKING_INDICES:
            return (None,) * len(results)
        for sizes in sizes_to_try(operands):
            for number in (0,) if by_index else (0, 1):
                try:
                    fake = pytree.tree_leaves(self._faked(mode, func, arguments, spec, sizes))  # looks at shapes first
                    real = pytree.tree_leaves(made_by_kernel(func, arguments, spec, sizes, number))
                except Exception as error:  # kernels raise any kind of error for a call that they refuse
                    log.debug("%s refuses a sample of sizes %s: %s", func, sizes, error)
                    continue
                layouts = _layouts_of_results(results, fake, real)
                if layouts is not None:
                    return layouts
        log.debug("%s is laid out as faked, its kernel takes no sample", func)
        return (None,) * len(results)

    def _faked(
        self,
        mode: FakeTensorMode,
        func: OpOverload,
        arguments: Sequence[Any],
        spec: pytree.TreeSpec,
        sizes: Mapping[int, int],
    ) -> Any:
        with mode, _quiet():
            ours = [
                real_like(a, sizes, 1) if isinstance(a, torch.Tensor) else a for a in smaller_numbers(arguments, sizes)
            ]
            args, kwargs = pytree.tree_unflatten(ours, spec)
            return func(*args, **kwargs)


TAKING_INDICES = {
    getattr(torch.ops.aten, name)
    for name in (
        *("gather", "index_add", "index_copy", "index_fill", "index_put", "index_select"),
        *("scatter", "scatter_add", "scatter_reduce"),
    )
}
"""Ops whose integer operands are indices along an axis, so that zero is a valid index for any sizes."""

_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


_COPY = torch.ops.aten.copy.default


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _in_memory_of(mode: FakeTensorMode, made: Any, count: object, offset: int) -> Any:
    """A fake result in a storage of that many elements if its own is smaller, at an offset."""
    if not _is_known(made) or type(count) is not int:
        return made
    if count * made.element_size() <= made.untyped_storage().nbytes():
        return made
    with mode:
        whole = torch.empty(count, dtype=made.dtype, device=made.device)
        return whole.as_strided(tuple(made.shape), made.stride(), offset)


def _viewed(mode: FakeTensorMode, made: Any, func: Any, viewed: Any, shape: Sequence[int]) -> Any:
    """A fake view with the strides that torch's own code gives it, also along axes of one element."""
    if not (_is_known(viewed) and _is_known(made)) or _is_upright(viewed):
        return made
    with disable_current_modes(), no_dispatch(), no_python_dispatcher():
        like = torch.empty_strided(viewed.shape, viewed.stride(), dtype=viewed.dtype, device="meta")
        strides = func(like, shape).stride()
    if strides == made.stride():
        return made
    with mode:
        return torch.ops.aten.as_strided.default(viewed, tuple(made.shape), strides, viewed.storage_offset())


def _makes_tensors(func: Any) -> bool:
    """Whether a function is one of torch's own ops and makes new tensors, not views or tensors that existed before."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or func.is_view:
        return False
    schema = func._schema
    told = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
    return not told and any("Tensor" in str(r.type) and r.alias_info is None for r in schema.returns)


def reads_by_index(func: OpOverload, operands: Sequence[torch.Tensor]) -> bool:
    """Whether integers among the operands may be indices, which some kernels do not check."""
    return torch.Tag.pointwise not in func.tags and any(
        not (t.dtype.is_floating_point or t.dtype.is_complex or t.dtype is torch.bool) for t in operands
    )


def _is_known(tensor: torch.Tensor) -> bool:
    """Whether a tensor has plain strides and sizes, without symbols, constants or inner tensors.

    Real tensors occur too: a loss has some, such as targets.
    """
    return (
        (type(tensor) is FakeTensor and tensor.constant is None) or type(tensor) in (torch.Tensor, torch.nn.Parameter)
    ) and (
        tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
        and all(type(n) is int for n in (*tensor.shape, *tensor.stride()))
    )


def _is_upright(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous and has the strides of a new tensor, also along axes of one element.

    Kernels use the strides along such axes to guess whether an image is channels last.
    """
    return tensor.stride() == make_contiguous_strides_for(tensor.shape)


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.dtype, value.device)
    return (type(value), value) if value.__hash__ else (type(value), repr(value))


def _layouts_of_results(results: Sequence[Any], fake: Sequence[Any], real: Sequence[Any]) -> _Layouts | None:
    """For each result, its layout if it differs from the fake one; None if the sample is another kind of call.

    Args:
        results: fake results of the call.
        fake: fake results of the call's sample.
        real: real results of the call's sample.
    """
    if not len(results) == len(fake) == len(real):
        return None
    found: list[_Layout | None] = []
    for result, ours, kernels in zip(results, fake, real, strict=True):
        if not isinstance(result, torch.Tensor):
            found.append(None)
            continue
        if not isinstance(ours, torch.Tensor) or not isinstance(kernels, torch.Tensor) or ours.shape != kernels.shape:
            return None
        if ours.dim() != result.dim() or ours.dtype != result.dtype or not _lies_as(result, ours):
            return None
        shape, strides = tuple(kernels.shape), tuple(kernels.stride())
        if ours.stride() == strides or result.numel() == 0:
            lies: tuple[int, ...] | None = tuple(result.stride())
        else:
            lies = strides if result.shape == kernels.shape else strides_alike(shape, strides, result.shape)
        same = lies == result.stride() and kernels.dtype == result.dtype
        found.append(None if same or lies is None else (lies, kernels.dtype))
    return tuple(found)


def _lies_as(large: torch.Tensor, small: torch.Tensor) -> bool:
    alike = strides_alike(tuple(large.shape), tuple(large.stride()), tuple(small.shape))
    axes = [axis for axis, size in enumerate(large.shape) if size > 1]
    return alike is not None and all(alike[axis] == small.stride(axis) for axis in axes)


def _laid_out(mode: FakeTensorMode, like: torch.Tensor, strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with mode:
        return torch.empty_strided(tuple(like.shape), strides, dtype=dtype, device=like.device)
