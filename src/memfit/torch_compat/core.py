"""Private interfaces that `import torch` has loaded: dispatch, fake tensors, graphs, the autograd engine, memory.

Names that exist only in some releases of torch are functions here, which say what they return without the interface.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._decomp
import torch._functorch.config
import torch._refs
import torch._subclasses
from torch._C import DispatchKey
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._C._profiler import _EventType as EventType
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    TangentAOTInput,
)
from torch._guards import Guard, TracingContext, detect_fake_mode, tracing
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._prims_common import make_contiguous_strides_for, suggest_memory_format
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

__all__ = [
    "AutoDispatchBelowAutograd",
    "BoxedCodeGen",
    "DispatchKey",
    "EventType",
    "ExcludeDispatchKeyGuard",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "Guard",
    "HigherOrderOperator",
    "InputMutationAOTOutput",
    "OpOverload",
    "OpOverloadPacket",
    "PlainAOTInput",
    "PlainAOTOutput",
    "SavedForBackwardsAOTOutput",
    "TangentAOTInput",
    "TorchDispatchMode",
    "TracingContext",
    "VALUE_ERRORS",
    "autocast_devices",
    "autocast_is_on",
    "autograd_node_number",
    "backward_keeps_graph",
    "clear_cublas_workspaces",
    "conv_backend",
    "cudnn_batch_norm_reserve_bytes",
    "cudnn_takes_batch_norm",
    "count_of_dispatch_modes",
    "current_autograd_node",
    "detect_fake_mode",
    "disable_current_modes",
    "dispatch_modes",
    "enable_python_dispatcher",
    "fake_impls",
    "functorch_config",
    "gpu_idle",
    "impure_functions",
    "in_backward_pass",
    "in_func_transform",
    "is_functional_tensor",
    "is_functorch_wrapped_tensor",
    "make_contiguous_strides_for",
    "make_fx",
    "make_graph_module",
    "no_dispatch",
    "no_python_dispatcher",
    "op_calls_traced",
    "profiler_is_on",
    "pytree",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "saved_tensor_hooks_aside",
    "set_version",
    "storage_references",
    "subclasses",
    "suggest_memory_format",
    "tracing",
    "unset_fake_temporarily",
    "use_lazy_graph_module",
    "user_modes_set_aside",
]

VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of an op on fake tensors whose result depends on their values."""

functorch_config = torch._functorch.config

subclasses = torch._subclasses

AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
"""Context in which ops go to the kernels behind autograd's."""

ExcludeDispatchKeyGuard = torch._C._SetExcludeDispatchKeyGuard
"""`ExcludeDispatchKeyGuard(key, excluded)`: context in which a dispatch key is excluded, or is not."""

current_autograd_node = torch._C._current_autograd_node
"""The node that runs backward in this thread; None outside of backward passes."""

clear_cublas_workspaces = torch._C._cuda_clearCublasWorkspaces
autocast_is_on = torch._C._is_any_autocast_enabled
autocast_devices = torch._C._autocast_supported_devices
is_functional_tensor = torch._is_functional_tensor

count_of_dispatch_modes = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes that watch the calls of this thread."""

_engine: Any = torch._C._autograd


def in_backward_pass() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def backward_keeps_graph() -> bool:
    """Whether the backward pass that runs keeps its graph (`retain_graph=True`)."""
    return bool(_engine._get_current_graph_task_keep_graph())


def autograd_node_number() -> int:
    """Number of the autograd node that was made last in this thread; nodes count up (`node._sequence_nr()`)."""
    return int(_engine._get_sequence_nr()) - 1


def profiler_is_on() -> bool:
    """Whether a profiler of torch records this thread; profilers do not nest."""
    return bool(_engine._profiler_enabled())


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Sets the counter of writes by which autograd recognises that a saved tensor was overwritten."""
    _engine._unsafe_set_version_counter((tensor,), (version,))


@contextlib.contextmanager
def saved_tensor_hooks_aside() -> Iterator[None]:
    """While active, no hooks on saved tensors are set."""
    hooks = []
    while (top := _engine._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        _engine._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _engine._push_saved_tensors_default_hooks(pack, unpack)


def in_func_transform() -> bool:
    """Whether a transform of `torch.func` acts on the current call."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextlib.contextmanager
def user_modes_set_aside() -> Iterator[None]:
    """While active, dispatch modes of the user are not given the calls that memfit makes; usable as a decorator."""
    with disable_current_modes() if _users_mode_is_on() else contextlib.nullcontext():
        yield


def _users_mode_is_on() -> bool:
    """Whether a dispatch mode is active that does not call itself infrastructure."""
    return bool(count_of_dispatch_modes()) and not all(m.is_infra_mode() for m in dispatch_modes())


def op_calls_traced() -> str | None:
    """Name of the tracer or mode that is given each op of the current call; None if none is.

    Modes that call themselves infrastructure do not count.
    """
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    keys = torch._C._TorchDispatchModeKey
    if torch._C._get_dispatch_mode(keys.FAKE) or torch._C._get_dispatch_mode(keys.PROXY):
        return "a tracer with fake tensors"
    return "a dispatch mode" if _users_mode_is_on() else None


def storage_references(storage: torch.UntypedStorage) -> int | None:
    """Number of tensors that refer to a storage; None where torch does not count them."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(storage._cdata))


def impure_functions() -> set[Any]:
    """The functions that graphs do not remove though nothing uses their results; may be changed."""
    found: set[Any] = torch.fx.node._side_effectful_functions
    return found


def gpu_idle(cycles: int) -> None:
    """Keeps the current CUDA stream busy for a number of clock cycles, so that a queue of kernels can build up."""
    torch.cuda._sleep(cycles)


def conv_backend(*operands: Any) -> str:
    """Name of the kernel for a convolution, for example `Mkldnn`; `???` for those that have no name in Python.

    Args:
        operands: data, weight, bias, stride, padding, dilation, transposed, output padding, groups, sizes of the bias.
    """
    return str(torch._C._select_conv_backend(*operands)).rpartition(".")[2]


def cudnn_takes_batch_norm(*operands: Any) -> bool:
    """Whether cuDNN computes a batch normalisation.

    Args:
        operands: data, weight, bias, running mean, running variance, training, epsilon.
    """
    choice = torch._C._select_batch_norm_backend(*operands)
    return bool(choice == torch._C._BatchNormBackend.Cudnn)  # type: ignore[attr-defined]


def cudnn_batch_norm_reserve_bytes(data: torch.Tensor, training: bool) -> int:
    """Bytes that cuDNN keeps from a forward batch normalisation for the backward one."""
    return int(torch._C._get_cudnn_batch_norm_reserve_space_size(data, training))  # type: ignore[attr-defined]
