"""Modules sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`): what its hooks take of the memory, and when.

A unit keeps its parameters in shards. Its hooks gather them before its forward pass and give them up after it, gather
them again before its backward pass, and reduce its gradients to shards behind that. The hooks break the graph, so a
unit is a piece of its own; between the pieces stand ops that nobody here runs, with what the hooks hold: a buffer into
which shards are gathered, which in the forward pass stays until the next unit's is there, the parameters copied out of
it, the next unit's buffer ahead of its turn in the backward pass, a buffer from which gradients are reduced, and the
shards of the gradients. See PyTorch's `_fsdp_param_group.py`, whose defaults these are.

Known limits: parameters on another device than the model's inputs (`CPUOffloadPolicy`) are not counted, and time in
collectives is not predicted.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.step.graph import Op, Phase, Storage, StorageKind

__all__ = [
    "Communication",
    "Gathered",
    "communication",
    "gathering",
    "is_sharded",
    "local",
    "mesh_groups",
    "resharded",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """A unit whose parameters are gathered.

    Attributes:
        name: of its module.
        parameters: the gathered parameters, by identity.
        nbytes: of all of them.
        reduced_bytes: of their gradients while they are reduced.
        shard_bytes: what this process keeps of these gradients.
    """

    name: str
    parameters: frozenset[int]
    nbytes: int
    reduced_bytes: int
    shard_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What stands around the pieces of a step.

    Attributes:
        storages: what its ops write, numbered from where the step's own storages end.
        before_forward: for each piece the ops in front of its forward pass.
        after_forward: those behind it.
        before_backward: those in front of its backward pass.
        after_backward: those behind it.
    """

    storages: tuple[Storage, ...]
    before_forward: tuple[tuple[Op, ...], ...]
    after_forward: tuple[tuple[Op, ...], ...]
    before_backward: tuple[tuple[Op, ...], ...]
    after_backward: tuple[tuple[Op, ...], ...]


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the module or to one inside it."""
    return bool(_sharded_modules(model))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor that may be distributed."""
    held = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(held, torch.Tensor)
    return held


def mesh_groups(model: nn.Module) -> tuple[Any, ...]:
    """The process groups the module is sharded among, one for each dimension of its mesh; none if it is not."""
    for module in _sharded_modules(model).values():
        for parameter in module.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                return tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim))
    return ()


def gathering(model: nn.Module) -> Callable[[], tuple[Gathered, ...]]:
    """What tells, while the module runs, which units are gathered, outer ones first; made while none is."""
    units = {
        name: (module, sum(local(p).nbytes for p in _own_parameters(module) if p.requires_grad))
        for name, module in _sharded_modules(model).items()
    }

    def now() -> tuple[Gathered, ...]:
        found = []
        for name, (module, shard_bytes) in units.items():
            parameters = [p for p in _own_parameters(module) if local(p) is p]
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
    """On exit every unit is in shards, as between two steps, though no backward pass ran."""
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


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Those that are gathered with the module: not those of a sharded one inside it."""
    inner = {id(p) for name, m in _sharded_modules(module).items() if name for p in m.parameters()}
    return [p for p in module.parameters() if id(p) not in inner]


def communication(
    gathered: Sequence[tuple[Gathered, ...]],
    staying: Sequence[Gathered],
    gradients: dict[str, list[int]],
    first: int,
    *,
    copies: bool,
) -> Communication:
    """What the hooks of sharded units do around the pieces of a step.

    Args:
        gathered: for each piece the units that are gathered while it runs.
        staying: those that still are when the forward pass has ended.
        gradients: for each unit the storages of the whole gradients of its parameters.
        first: number of the first storage made here.
        copies: whether collectives copy what they send, as gloo's do.
    """
    storages: list[Storage] = []
    count = len(gathered)
    before_forward: list[list[Op]] = [[] for _ in range(count)]
    after_forward: list[list[Op]] = [[] for _ in range(count)]
    before_backward: list[list[Op]] = [[] for _ in range(count)]
    after_backward: list[list[Op]] = [[] for _ in range(count)]

    def hold(name: str, nbytes: int, kind: StorageKind = StorageKind.BACKWARD) -> int:
        storages.append(Storage(name=name, nbytes=nbytes, kind=kind))
        return first + len(storages) - 1

    units = {unit.name: unit for units in gathered for unit in units}
    names = [[unit.name for unit in units] for units in gathered]
    stays = {unit.name for unit in staying}
    first_piece = {name: min(i for i in range(count) if name in names[i]) for name in units}
    last_piece = {name: max(i for i in range(count) if name in names[i]) for name in units}

    def act(
        where: list[Op], what: str, name: str, phase: Phase, piece: int, reads: Any, writes: Any = (), copied: int = 0
    ) -> None:
        op = Op(
            name=f"{what} {name} ({phase})",
            target=f"hook.{what}",
            module=name,
            phase=phase,
            piece=piece,
            reads=tuple(reads),
            writes=tuple(writes),
            workspace_bytes=copied if copies else 0,
            recomputable=False,
        )
        where.append(op)

    buffer: list[int] = []
    whole: dict[str, int] = {}
    for piece in range(count):
        ops = before_forward[piece]
        for name in names[piece]:
            if first_piece[name] != piece:
                continue
            nbytes = units[name].nbytes
            taken = hold(f"buffer of {name}", nbytes, StorageKind.FORWARD)
            act(ops, "all-gather", name, Phase.FORWARD, piece, buffer, (taken,), nbytes)
            buffer = [taken]
            whole[name] = hold(f"parameters of {name}", nbytes, StorageKind.FORWARD)
            act(ops, "copy-out", name, Phase.FORWARD, piece, buffer, (whole[name],))
        for name in names[piece]:
            if last_piece[name] == piece and name not in stays:
                act(after_forward[piece], "reshard", name, Phase.FORWARD, piece, (whole[name],))
    if buffer:
        act(after_forward[-1], "end", "of forward", Phase.FORWARD, count - 1, buffer)

    # Inner units end before outer ones; the one before in this order is gathered ahead in the backward pass.
    order = sorted(units, key=lambda name: (last_piece[name], -names[last_piece[name]].index(name)))
    ahead: dict[str, int] = {}
    gone = set(stays)
    reducing: list[int] = []

    def gather(where: list[Op], name: str, piece: int) -> None:
        ahead[name] = hold(f"buffer of {name} again", units[name].nbytes)
        act(where, "all-gather", name, Phase.BACKWARD, piece, (), (ahead[name],), units[name].nbytes)

    for piece in reversed(range(count)):
        ops = before_backward[piece]
        for name in names[piece]:
            if last_piece[name] != piece:
                continue
            if name not in stays:
                if name not in ahead:
                    gather(ops, name, piece)
                whole[name] = hold(f"parameters of {name} again", units[name].nbytes)
                act(ops, "copy-out", name, Phase.BACKWARD, piece, (ahead[name],), (whole[name],))
                gone.add(name)
            place = order.index(name)
            if place and order[place - 1] not in gone and order[place - 1] not in ahead:
                gather(ops, order[place - 1], piece)
        for name in reversed(names[piece]):
            if first_piece[name] != piece:
                continue
            unit, ops = units[name], after_backward[piece]
            act(ops, "reshard", name, Phase.BACKWARD, piece, [*reducing, whole[name]])
            reducing = []
            if gradients.get(name):
                reducing = [hold(f"gradients of {name} to reduce", unit.reduced_bytes)]
                act(ops, "copy-in", name, Phase.BACKWARD, piece, dict.fromkeys(gradients[name]), reducing)
                shards = hold(f"gradients of {name} in shards", unit.shard_bytes, StorageKind.GRADIENT)
                act(
                    *(ops, "reduce-scatter", name, Phase.BACKWARD, piece),
                    *(reducing, (shards,), unit.reduced_bytes),
                )
    if reducing:
        act(after_backward[0], "end", "of backward", Phase.BACKWARD, 0, reducing)
    return Communication(
        storages=tuple(storages),
        before_forward=tuple(map(tuple, before_forward)),
        after_forward=tuple(map(tuple, after_forward)),
        before_backward=tuple(map(tuple, before_backward)),
        after_backward=tuple(map(tuple, after_backward)),
    )


def _reduced_bytes(module: nn.Module, parameter: torch.Tensor) -> int:
    """Bytes of a parameter's whole gradient in the dtype it is reduced in, which only FSDP's own state knows."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    dtype = getattr(getattr(state, "_mp_policy", None), "reduce_dtype", None) or parameter.dtype
    return parameter.numel() * dtype.itemsize
