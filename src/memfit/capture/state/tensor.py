"""The state of one tensor: its values, memory, version and gradient, and how this state is restored.

Not only the values of a tensor can change: code may give it other memory (`tensor.data = ...`), resize it, turn its
gradient on or off, or replace `.grad`. Memory that was overwritten can be restored only from a copy, and graphs that
the caller has in flight must not notice a write, which autograd detects by the tensor's version counter.

The technique: an alias of the memory, sizes and strides is held from the start, and the bytes it covers are copied to
the host. Only differences are written back; where the bytes are the same again, the version counter is set back as
well. `memfit.capture.state.snapshot` finds the tensors.

Known limits: memory of sparse, quantised and wrapped tensors is not copied; only its version is watched, and a change
is reported. The bytes that a tensor with gaps between its elements covers include those of its neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from memfit.capture.distributed.fsdp import local
from memfit.torch_compat.core import set_version

__all__ = ["TensorState", "bytes_of", "differs", "noted", "restore_tensor"]

log = logging.getLogger(__name__)

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorState:
    """The noted state of a tensor.

    Attributes:
        tensor: the tensor.
        held: the plain tensor that holds its memory here; None if it has none that can be copied.
        name: the way to it from a root, for people.
        alias: another tensor with the memory, sizes and strides of `held`.
        copy: the bytes of that memory, on the host; None if there is no copy.
        watched: whether a change of the memory is reported, since it cannot be undone.
        version: its version counter; None if it has none.
        requires_grad: whether it received gradients.
        gradient: the object that was its `.grad`.
    """

    tensor: torch.Tensor
    held: torch.Tensor | None
    name: str
    alias: torch.Tensor | None
    copy: torch.Tensor | None
    watched: bool
    version: int | None
    requires_grad: bool
    gradient: torch.Tensor | None


def noted(
    tensor: torch.Tensor, name: str, *, copied: Callable[[torch.Tensor], torch.Tensor | None] | None
) -> TensorState:
    """Notes the state of a tensor.

    Args:
        tensor: the tensor.
        name: the way to it, for people.
        copied: returns the bytes of a plain tensor's memory, or None where there is no room for a copy; `copied` is
            None if memory is neither copied nor watched.
    """
    held = local(tensor)
    plain = held if type(held) in _PLAIN and held.layout is torch.strided and not held.is_quantized else None
    with torch.no_grad():
        alias = None if plain is None else plain.detach()
    copy = None if copied is None or alias is None else copied(alias)
    return TensorState(
        tensor=tensor,
        held=plain,
        name=name,
        alias=alias,
        copy=copy,
        watched=copied is not None and copy is None and tensor.numel() > 0 and not tensor.is_meta,
        version=None if tensor.is_inference() else int(held._version),
        requires_grad=tensor.requires_grad,
        gradient=tensor.grad if tensor.is_leaf or tensor.retains_grad else None,
    )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory that a plain tensor covers, as bytes; None if there is none."""
    if tensor.is_meta or tensor.numel() == 0:
        return None
    width = tensor.element_size()
    count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = tensor.untyped_storage()
    if storage.nbytes() < (tensor.storage_offset() + count) * width:  # freed by its owner, as FSDP does
        return None
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(storage, tensor.storage_offset() * width, (count * width,), (1,))


def differs(state: TensorState) -> bool:
    """Whether a tensor's values, or its memory, have changed; False for a tensor whose memory is only watched."""
    if state.alias is None or state.copy is None:
        return False
    span = bytes_of(state.alias)
    return _is_moved(state) or (span is not None and not torch.equal(span.cpu(), state.copy))


def _is_moved(state: TensorState) -> bool:
    """Whether a tensor has other memory, sizes or strides than before."""
    now, then = state.held, state.alias
    if now is None or then is None:
        return False
    if now.shape != then.shape or now.dtype is not then.dtype or now.stride() != then.stride():
        return True
    return bool(now.storage_offset() != then.storage_offset() or now.data_ptr() != then.data_ptr())


def restore_tensor(state: TensorState) -> None:
    """Writes back all differences; can be called any number of times."""
    tensor, held = state.tensor, state.held
    with torch.no_grad():
        if held is not None and state.alias is not None and _is_moved(state):
            held.data = state.alias
        if state.alias is not None and state.copy is not None:
            span = bytes_of(state.alias)
            if span is not None and not torch.equal(span.cpu(), state.copy):
                span.copy_(state.copy)
        elif state.watched and state.version is not None and local(tensor)._version != state.version:
            why = "it is no dense tensor of torch's own" if state.alias is None else "there was no room for a copy"
            log.warning("planning wrote to %s, and cannot take it back: %s", state.name, why)
        is_back = state.alias is not None and (state.copy is not None or state.alias.numel() == 0)
        if held is not None and is_back and state.version not in (None, held._version):
            set_version(held, state.version)
    if tensor.is_leaf and tensor.requires_grad != state.requires_grad:
        tensor.requires_grad_(state.requires_grad)
    if (tensor.is_leaf or tensor.retains_grad) and tensor.grad is not state.gradient:
        tensor.grad = state.gradient
