"""The memory that is there for a whole step, tensor by tensor (`memfit.ir.residents`).

Known limits: a library's own memory and state that an optimizer shares between parameters have one record for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memfit.capture.allocation_tracker import parts_of
from memfit.capture.distributed.fsdp import local
from memfit.capture.gradients.autograd_graph import leaves_behind
from memfit.capture.loss.reading import LossReading
from memfit.capture.optimizer.state import OptimizerCost
from memfit.capture.subgraphs import Subgraphs
from memfit.ir.residents import Resident, ResidentKind
from memfit.torch_compat.core import pytree

__all__ = ["gradients_of", "residents_of", "storage_bytes"]


def storage_bytes(tensors: Sequence[Any], device_type: str) -> int:
    """Bytes of the tensors' distinct storages on one device type; a distributed tensor counts with its local shard."""
    seen: dict[int, torch.UntypedStorage] = {}
    return sum(_new_bytes(tensor, device_type, seen) for tensor in tensors)


def residents_of(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    subgraphs: Subgraphs,
    loss: LossReading,
    cost: OptimizerCost,
    device_type: str,
) -> tuple[Resident, ...]:
    """The residents of a captured step.

    Args:
        model: the module.
        args: positional inputs.
        kwargs: keyword inputs.
        subgraphs: the captured subgraphs, with their tensors.
        loss: the reading of the loss.
        cost: the memory of the optimizer.
        device_type: memory on other devices does not count.
    """
    parameters = dict(model.named_parameters())
    inputs = {str(place): leaf for place, leaf in enumerate(pytree.tree_leaves((args, kwargs)))}
    tensors = (
        (ResidentKind.PARAMETER, parameters),
        (ResidentKind.BUFFER, dict(model.named_buffers())),
        (ResidentKind.INPUT, inputs),
        (ResidentKind.GRADIENT, {name: parameter.grad for name, parameter in parameters.items()}),
    )
    seen: dict[int, torch.UntypedStorage] = {}
    found = [
        Resident(name=name, nbytes=_new_bytes(tensor, device_type, seen), kind=kind)
        for kind, named in tensors
        for name, tensor in named.items()
    ]
    of_state = {name: cost.by_parameter.get(id(parameter), 0) for name, parameter in parameters.items()}
    shared = cost.state_bytes - sum(of_state.values())
    for kind, nbytes_of in (
        (ResidentKind.OPTIMIZER_STATE, {**of_state, "shared, or of other parameters": shared}),
        (ResidentKind.GRADIENT, _coming_gradients(parameters, subgraphs)),
        (ResidentKind.PLAIN_CODE, {"between graphs": _between_bytes(model, subgraphs, device_type)}),
        (ResidentKind.LOSS, {"kept from step to step": loss.kept_bytes}),
    ):
        found.extend(Resident(name=name, nbytes=nbytes, kind=kind) for name, nbytes in nbytes_of.items())
    return tuple(resident for resident in found if resident.nbytes)


def gradients_of(model: nn.Module, device_type: str) -> tuple[Resident, ...]:
    """The gradients of parameters that exist, as residents."""
    seen: dict[int, torch.UntypedStorage] = {}
    named = ((name, _new_bytes(p.grad, device_type, seen)) for name, p in model.named_parameters())
    return tuple(Resident(name=name, nbytes=nbytes, kind=ResidentKind.GRADIENT) for name, nbytes in named if nbytes)


def _new_bytes(tensor: Any, device_type: str, seen: dict[int, torch.UntypedStorage]) -> int:
    """Bytes of the storages of a tensor that were not seen before, on one device type.

    `seen` holds the storages: another one cannot get the key of one that is alive.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != device_type:
        return 0
    storages = {part.untyped_storage()._cdata: part.untyped_storage() for part in parts_of(local(tensor))}
    found = sum(int(storage.nbytes()) for key, storage in storages.items() if key not in seen)
    seen.update(storages)
    return found


def _coming_gradients(parameters: Mapping[str, nn.Parameter], subgraphs: Subgraphs) -> dict[str, int]:
    """Bytes of gradients that are added up, stay allocated, and do not exist yet."""
    if not any(subgraph.reading.accumulated for subgraph in subgraphs.subgraphs):
        return {}
    coming = {name: p for name, p in parameters.items() if p.requires_grad and p.grad is None}
    return {name: p.numel() * p.element_size() for name, p in coming.items()}


def _between_bytes(model: nn.Module, subgraphs: Subgraphs, device_type: str) -> int:
    """Bytes held by code between the subgraphs: saved tensors, and gradients of parameters that only this code uses."""
    if not subgraphs.breaks or subgraphs.loss is None:
        return 0
    received = zip(subgraphs.receivers(), subgraphs.loss.receives_gradient, strict=False)
    reached = leaves_behind(tensor for tensor, does in received if does) | subgraphs.loss.leaves
    if (
        subgraphs.plain.modules or subgraphs.plain.loose
    ):  # which of its parameters such code uses may depend on the data
        reached = frozenset(id(p) for p in model.parameters() if p.requires_grad)
    used = {t.untyped_storage()._cdata for p in subgraphs.subgraphs for t in p.inputs if isinstance(t, torch.Tensor)}
    gathered = any(subgraph.gathered for subgraph in subgraphs.subgraphs)
    outside = [
        p
        for p in model.parameters()
        if id(p) in reached and p.untyped_storage()._cdata not in used and not (gathered and local(p) is not p)
    ]
    return subgraphs.between_bytes + storage_bytes(outside, device_type)
