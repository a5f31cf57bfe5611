"""A module's call, compiled under Dynamo's guards with a backend of memfit.

Dynamo compiles a separate function that calls the module, so that fitted modules share no cache. Dynamo skips code that
stays plain. After a graph break Dynamo compiles layers of torch, and modules without parameters, each on its own.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from memfit.capture.call_settings import Backend, CallSettings
from memfit.capture.checkpoints import without_checkpoints
from memfit.capture.dynamo.list_arguments import list_arguments
from memfit.capture.dynamo.logging_calls import logs_left_out
from memfit.capture.dynamo.marked_tensors import marks_left_out
from memfit.capture.dynamo.own_calls import own_call
from memfit.capture.eager.compiler_queries import eager_answers
from memfit.capture.eager.fake_kernels import rules_of_kernels
from memfit.capture.values.branches import decided_branches
from memfit.torch_compat.compiler import (
    decorators,
    disable,
    dynamo_config,
    dynamo_guards,
    reset_code,
    symbol_config,
    wrap_inline,
)
from memfit.torch_compat.core import pytree

__all__ = ["call_by_dynamo", "call_has_begun"]

_MOST_PLANS = 100_000
_ALL_GUARDS = {
    name: False
    for name in ("skip_tensor_guards_with_matching_dict_tags", "use_recursive_dict_tags_for_guards")
    if hasattr(dynamo_config, name)
}
"""With these options Dynamo skips the guards on a module's tensors while the module's dicts are unchanged, and so
misses that a parameter needs a gradient from now on (seen in torch 2.11)."""
_MARKED_ONLY = {"automatic_dynamic_shapes": False, "specialize_int": True, "specialize_float": True}
"""With these options only marked sizes become symbols, and no number."""
_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")
"""Attributes of a tensor with marked sizes."""
_CALL = "fitted_call"
"""Name of the function that Dynamo compiles."""


def call_by_dynamo(model: nn.Module, backend: Backend, settings: CallSettings) -> Callable[..., Any]:
    """Dynamo as a front end (`memfit.capture.frontend`): the call is compiled under guards, with a cache of its own."""
    plain, decisions, in_subgraphs = settings.plain, settings.decisions, settings.in_subgraphs
    impl: Callable[..., Any] = model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return impl(*args, **kwargs)

    # Dynamo caches by code object; a copy keeps fitted models from sharing one cache and its size limit.
    code = call.__code__.replace(co_name=_CALL)
    own = types.FunctionType(code, call.__globals__, _CALL, None, call.__closure__)
    vars(own)["backend"] = backend
    # Dynamo's table of compiled code and its cache keep each other alive, and with them the plan.
    weakref.finalize(own, reset_code, code).atexit = False
    compiled: Callable[..., Any] = torch.compile(
        own, backend=_weakly(backend), fullgraph=settings.fullgraph, dynamic=None if settings.varying else False
    )
    forwards = _own_forwards(model) if in_subgraphs else []
    modules = dict(model.named_modules())
    left = [modules[name] for name in sorted(plain.modules) if name in modules]
    forwards += [(vars(m), disable(m.forward)) for m in left]
    if plain.only_children:
        forwards.append((vars(model), disable(model.forward, recursive=False)))
    # Where the graph breaks, Dynamo caches subgraphs with the model's own code, which all plans of the model share. At
    # its limit Dynamo would silently run the subgraphs as plain code, without a plan and over the budget.
    limits = {"recompile_limit": _MOST_PLANS, "accumulated_recompile_limit": _MOST_PLANS}
    # By default Dynamo looks at hooks once and does not notice hooks that are registered or removed later. It also
    # draws random numbers of NumPy from torch's generator; with `use_numpy_random_stream` the graph breaks there.
    own_random = {"use_numpy_random_stream": True, "trace_numpy": not plain.numpy}
    state = {} if decisions is None else dict((*model.named_parameters(), *model.named_buffers()))
    # In one graph, a number read from an input breaks the graph only if its use cannot be decided.
    limits["capture_scalar_outputs"] = not in_subgraphs
    # A module that is planned while `DistributedDataParallel` calls it would have its graph split at the buckets.
    as_asked = {"skip_nnmodule_hook_guards": False, "optimize_ddp": False}
    options = limits | logs_left_out() | own_random | as_asked | _ALL_GUARDS
    options |= _MARKED_ONLY if settings.varying else {}

    def run(*args: Any, **kwargs: Any) -> Any:
        around = without_checkpoints() if settings.replaced and in_subgraphs else contextlib.nullcontext()
        with (
            dynamo_config.patch(options),
            own_call(),
            _replaced(forwards),
            around,
            contextlib.nullcontext() if settings.as_compiled else eager_answers(),
            decided_branches(decisions, pytree.tree_leaves((args, kwargs)) if state else (), state),
            marks_left_out(),
            list_arguments(),
            rules_of_kernels(),
            _guards_not_timed(),
            _with_symbols(settings.varying, pytree.tree_leaves((args, kwargs)) if settings.varying else ()),
        ):
            return compiled(*args, **kwargs)

    return run


@contextlib.contextmanager
def _with_symbols(varying: Mapping[int, Sequence[int]], leaves: Sequence[Any]) -> Iterator[None]:
    """While active, graphs that Dynamo makes have symbols for these sizes, each its own, unless the code fixes it."""
    if not varying:
        yield
        return
    for place, dimensions in varying.items():
        decorators.maybe_mark_dynamic(leaves[place], list(dimensions))
    try:
        with symbol_config.patch(use_duck_shape=False):
            yield
    finally:
        for place in varying:
            for mark in _MARKS:
                vars(leaves[place]).pop(mark, None)


def _weakly(backend: Backend) -> Callable[..., Any]:
    """The same backend behind a weak reference: it and the model are freed although Dynamo keeps all backends."""
    held = weakref.ref(backend)

    def weak(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        alive = held()
        assert alive is not None, "the compiled function holds it"
        return alive(gm, inputs)

    return weak


def call_has_begun() -> bool:
    """Whether code of the current call ran before the graph that Dynamo compiles now.

    If so, the graph comes after a graph break, and the call's function is a frame on the stack.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _CALL:
            return True
        frame = frame.f_back
    return False


def _own_forwards(model: nn.Module) -> list[tuple[dict[str, Any], Callable[..., Any]]]:
    """Attributes of the modules that Dynamo must compile separately after a graph break, and their forward passes.

    Dynamo inlines an `nn.Linear` into the code that it traces. Where a graph break ends that code (any break in a loop
    does), Dynamo would run layers of torch in eager mode. And Dynamo never compiles code again after one call of the
    code did nothing: a drop path of rate 0 would leave all drop paths in eager mode. So each kind of module has its own
    code object.
    """
    # Modules of the same types and settings share a code object, so Dynamo compiles it once.
    codes: dict[tuple[Any, ...], types.CodeType] = {}
    forwards: list[tuple[dict[str, Any], Callable[..., Any]]] = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # it has no Python code
            continue
        of_torch = type(module).forward.__module__.startswith("torch.nn.modules")
        if "forward" in vars(module) or not (of_torch or _may_do_nothing(module)):
            continue
        wrapped = wrap_inline(module.forward)
        assert isinstance(wrapped, types.FunctionType)
        alike = (*(type(part) for part in module.modules()), *(() if of_torch else _settings(module)))
        wrapped.__code__ = codes.setdefault(alike, wrapped.__code__.replace())
        forwards.append((vars(module), wrapped))
    return forwards


def _may_do_nothing(module: nn.Module) -> bool:
    """Whether a module has no parameters, buffers or children, so that its settings may make it an identity."""
    return not any(True for _ in module.children()) and not module._parameters and not module._buffers


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    plain = (bool, int, float, str, types.NoneType)
    return tuple((name, value) for name, value in vars(module).items() if isinstance(value, plain))


@contextlib.contextmanager
def _guards_not_timed() -> Iterator[None]:
    """While active, Dynamo does not time each graph's guards.

    Dynamo flushes caches for this timing, which only its log uses and which takes up to a fifth of the capture.
    """
    names = vars(dynamo_guards)
    timed = names["profile_guard_manager"]
    names["profile_guard_manager"] = lambda *_: 0.0
    try:
        yield
    finally:
        names["profile_guard_manager"] = timed


@contextlib.contextmanager
def _replaced(forwards: Sequence[tuple[dict[str, Any], Callable[..., Any]]]) -> Iterator[None]:
    """Puts forward passes into modules, for the time of one call."""
    before = [(attributes, attributes.get("forward")) for attributes, _ in forwards]
    for attributes, forward in forwards:
        attributes["forward"] = forward
    try:
        yield
    finally:
        for attributes, own in reversed(before):
            attributes.pop("forward", None)  # a fitted module inside this one may have removed it
            if own is not None:
                attributes["forward"] = own
