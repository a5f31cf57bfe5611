"""What an optimizer will hold from its second step on, and what its step takes for a moment.

State is created at the end of the first step, so a profile of one step misses it. Here a copy of the optimizer steps
once on fake parameters, of distributed ones on shards; nothing is allocated. An optimizer that looks at values cannot
run on fakes; then it steps on one-element parameters, and a state tensor of the parameter's shape counts in full.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from memfit.capture.live_bytes import LiveBytes
from memfit.capture.sharded import local

__all__ = ["OptimizerCost", "optimizer_cost", "part_of"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """`state_bytes` stay between steps; `step_bytes` exist while `step()` runs."""

    state_bytes: int = 0
    step_bytes: int = 0


def optimizer_cost(optimizer: torch.optim.Optimizer | None, device_type: str) -> OptimizerCost:
    """Predicts the memory of an optimizer without running it on real parameters.

    Args:
        optimizer: any `torch.optim.Optimizer`; None costs nothing.
        device_type: only state on this device type counts.

    Returns:
        Bytes of state (existing state included) and of the step's temporaries.
    """
    if optimizer is None:
        return OptimizerCost()
    try:
        return _on_fakes(optimizer, device_type)
    except Exception as error:
        # Any user-written optimizer may do anything; the estimate by shape below is the documented fallback.
        log.info("%s cannot step on fake tensors (%s); estimating by shape", type(optimizer).__name__, error)
    return _by_shape(optimizer, device_type)


def part_of(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer as if it had some of its parameters only; to be asked what it costs, not to be stepped."""
    mine = {id(p) for p in parameters}
    part = copy.copy(optimizer)
    part.param_groups = [{**g, "params": [p for p in g["params"] if id(p) in mine]} for g in optimizer.param_groups]
    part.state = defaultdict(dict, {p: state for p, state in optimizer.state.items() if id(p) in mine})
    return part


def _twin(optimizer: torch.optim.Optimizer, parameters: dict[int, torch.Tensor]) -> torch.optim.Optimizer:
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**g, "params": [parameters[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if hasattr(twin, name):
            setattr(twin, name, type(getattr(twin, name))())
    return twin


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _on_fakes(optimizer: torch.optim.Optimizer, device_type: str) -> OptimizerCost:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes: dict[int, torch.Tensor] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                held = local(p)
                fake = torch.empty_strided(tuple(held.shape), held.stride(), dtype=p.dtype, device=p.device)
                fake.requires_grad_(p.requires_grad)
                if p.requires_grad:
                    fake.grad = torch.empty_like(fake)
                fakes[id(p)] = fake
        twin = _twin(optimizer, fakes)
        with LiveBytes(device_type) as counter:
            twin.step()
            first_step = counter.live
            counter.peak = counter.live
            twin.step()
            state = _state_bytes(twin, device_type)
            return OptimizerCost(state_bytes=state, step_bytes=max(0, counter.peak - first_step))


def _by_shape(optimizer: torch.optim.Optimizer, device_type: str) -> OptimizerCost:
    tiny = {}
    for p in _parameters(optimizer):
        tiny[id(p)] = torch.ones([1] * p.dim(), dtype=p.dtype, requires_grad=True)
        tiny[id(p)].grad = torch.ones_like(tiny[id(p)])
    for group in optimizer.param_groups:
        for p in group["params"]:
            tiny.setdefault(id(p), torch.ones([1] * p.dim(), dtype=p.dtype))
    twin = _twin(optimizer, tiny)
    twin.step()
    by_id = {id(t): p for p in _parameters(optimizer) for t in [tiny[id(p)]]}
    total = 0
    for parameter, state in twin.state.items():
        real = local(by_id[id(parameter)])
        for value in pytree.tree_leaves(state):
            if isinstance(value, torch.Tensor):
                like_parameter = value.shape == parameter.shape and value.dim() > 0
                total += (real.numel() if like_parameter else value.numel()) * value.element_size()
    return OptimizerCost(state_bytes=total)


def _state_bytes(optimizer: torch.optim.Optimizer, device_type: str) -> int:
    storages: dict[int, int] = {}
    values: list[Any] = pytree.tree_leaves(list(optimizer.state.values()))
    for value in values:
        if isinstance(value, torch.Tensor) and value.device.type == device_type:
            storage = local(value).untyped_storage()
            storages[storage._cdata] = int(storage.nbytes())
    return sum(storages.values())
