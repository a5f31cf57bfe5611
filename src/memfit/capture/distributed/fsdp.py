"""Modules sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`): which units there are, and which are gathered.

A unit keeps its parameters in shards. Its hooks gather the parameters before its forward pass and free them after it,
gather them again before its backward pass, and reduce its gradients to shards after it.
`memfit.capture.distributed.fsdp_hooks` counts the memory of these hooks.

Known limits: parameters on another device than the model's inputs (`CPUOffloadPolicy`) are not counted, nor are whole
gradients that stay because their reduction is put off (`set_requires_gradient_sync`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Gathered", "gathering", "is_sharded", "local", "mesh_groups", "resharded", "without_gathering"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """A unit whose parameters are gathered.

    Attributes:
        name: name of its module.
        parameters: the gathered parameters, by identity.
        nbytes: bytes of all gathered parameters.
        reduced_bytes: bytes of their gradients while the gradients are reduced.
        shard_bytes: bytes of this process's shards of these gradients.
    """

    name: str
    parameters: frozenset[int]
    nbytes: int
    reduced_bytes: int
    shard_bytes: int


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the module or to one inside it."""
    return bool(_sharded_modules(model))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this process holds of a tensor that may be distributed."""
    held = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(held, torch.Tensor)
    return held


def mesh_groups(model: nn.Module) -> tuple[Any, ...]:
    """The process groups the module is sharded among, one for each dimension of its mesh; empty if not sharded."""
    for module in _sharded_modules(model).values():
        for parameter in module.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                return tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim))
    return ()


def gathering(model: nn.Module) -> Callable[[], tuple[Gathered, ...]]:
    """A function that returns the units gathered when it is called, outer units first; made while none is gathered."""
    units = []
    for name, module in _sharded_modules(model).items():
        slots = _own_shards(module)
        trained = [slots_of[key] for slots_of, key in slots if slots_of[key].requires_grad]
        units.append((name or "the root", module, slots, sum(local(p).nbytes for p in trained)))

    def now() -> tuple[Gathered, ...]:
        found = []
        for name, module, slots, shard_bytes in units:
            parameters = [slots_of[key] for slots_of, key in slots if local(slots_of[key]) is slots_of[key]]
            if parameters:
                found.append(
                    Gathered(
                        name=name,
                        parameters=frozenset(map(id, parameters)),
                        nbytes=sum(p.nbytes for p in parameters),
                        reduced_bytes=sum(_reduced_bytes(module, p) for p in parameters if p.requires_grad),
                        shard_bytes=shard_bytes,
                    )
                )
        return tuple(found)

    return now


@contextlib.contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """On exit, puts every unit in shards, as between two steps, even if no backward pass ran."""
    modules: dict[str, Any] = dict(_sharded_modules(model))
    try:
        yield
    except BaseException:
        for name, module in modules.items():
            is_root = not any(name.startswith(f"{outer}." if outer else "") for outer in modules if outer != name)
            if is_root and hasattr(module, "reset_iter_state"):  # newer than torch 2.11
                module.reset_iter_state()
        raise
    finally:
        for module in modules.values():
            module.reshard()


def _sharded_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules `fully_shard` was applied to, outer ones first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nothing imported it, nothing is sharded
    if fsdp is None:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, fsdp.FSDPModule)}


def _own_shards(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Slots of the parameters that are gathered with the module, without those of sharded modules inside it."""
    inner = {id(m) for name, unit in _sharded_modules(module).items() if name for m in unit.modules()}
    slots: dict[int, tuple[dict[str, Any], str]] = {}
    for owner in module.modules():
        if id(owner) not in inner:
            for key, parameter in owner._parameters.items():
                if parameter is not None and local(parameter) is not parameter:
                    slots.setdefault(id(parameter), (owner._parameters, key))
    return list(slots.values())


def _reduced_bytes(module: nn.Module, parameter: torch.Tensor) -> int:
    """Bytes of a parameter's whole gradient in the dtype it is reduced in, which only FSDP's own state knows."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    dtype = getattr(getattr(state, "_mp_policy", None), "reduce_dtype", None) or parameter.dtype
    return parameter.numel() * dtype.itemsize


@contextlib.contextmanager
def without_gathering(model: nn.Module, outputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """While active, gradients of a sharded module's outputs trigger no gathering.

    The module's hooks on its outputs would gather at the start of the backward pass, and the gathered parameters are
    not memory of the loss.
    """
    hooks = [t._backward_hooks for t in outputs if t._backward_hooks] if is_sharded(model) else []
    before = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, own in zip(hooks, before, strict=True):
            each.update(own)
