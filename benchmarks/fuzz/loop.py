"""The training loop of the fuzz, and everything that one turn of it leaves behind."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from benchmarks.fuzz.cpu_allocator import CpuAllocatorBytes
from benchmarks.fuzz.device import AllocatorBytes
from benchmarks.fuzz.live_bytes import LiveBytes, storage_bytes
from benchmarks.fuzz.model import Case
from benchmarks.fuzz.modes import autocast
from benchmarks.fuzz.snapshot import snapshot

__all__ = ["measured_turn", "seed_all", "turn"]

_Live = LiveBytes | AllocatorBytes | CpuAllocatorBytes


def seed_all(seed: int) -> None:
    """Seeds torch's, Python's and NumPy's generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def turn(case: Case, number: int) -> dict[str, Any]:
    """One turn of the loop: forward, loss and backward as often as the mode says, then the optimizer's step.

    Returns:
        Losses, outputs, gradients of inputs, and a snapshot of the model and its loss with the gradients before the
        optimizer's step, and of both and the optimizer after it.
    """
    seed_all(100 + number)
    case.model.zero_grad(set_to_none=True)
    found = _passes(case, number)
    gradients = {name: p.grad for name, p in case.model.named_parameters()}
    found.update((f"gradient {name}", g if g is None else g.detach().clone()) for name, g in gradients.items())
    case.optimizer.step()
    found.update(snapshot(model=case.model, loss=case.loss, optimizer=case.optimizer.state_dict()))
    return found


def measured_turn(case: Case, number: int, *, by_allocator: bool = False) -> int:
    """The peak bytes of one turn, counted by `LiveBytes`, or by the allocator, as always on a device.

    As the budget does, it holds parameters, gradients, buffers, inputs, and the optimizer where `fit` is told of one.
    What the fuzz takes to make inputs, and copies of what comes out, are not the step's and are not in it.
    """
    seed_all(100 + number)
    case.model.zero_grad(set_to_none=True)
    state = _tensors(case.optimizer.state)
    existing = [*case.model.parameters(), *case.model.buffers(), *(state if case.recipe.counts_optimizer else ())]
    beside = _tensors((vars(case.loss), [vars(m) for m in case.model.modules()], state))
    device = case.recipe.mode.device
    live: _Live
    if device != "cpu":
        live = AllocatorBytes()
    else:
        live = CpuAllocatorBytes() if by_allocator else LiveBytes([*existing, *beside])
    with live:
        _passes(case, number, live)
        if case.recipe.counts_optimizer:
            case.optimizer.step()
    if not case.recipe.counts_optimizer:
        case.optimizer.step()
    return storage_bytes(existing, rounded_to=1 if device == "cpu" else 512) + live.peak_bytes


def _passes(
    case: Case, number: int, live: LiveBytes | AllocatorBytes | CpuAllocatorBytes | None = None
) -> dict[str, Any]:
    """The passes of a turn, and a copy of what comes out of them, which is not made where memory is measured."""
    mode, found = case.recipe.mode, {}
    for micro in range(mode.micro_batches):
        losses, inputs = [], []
        with autocast(mode):
            for k in range(mode.forwards):
                which = (number * mode.micro_batches + micro) * mode.forwards + k
                make = partial(case.inputs, which)
                args, keywords = make() if live is None else live.only_result(make)
                output = case.model(*args, **keywords)
                losses.append(case.loss(output) / mode.micro_batches + _auxiliary(case))
                inputs.append(args)
                for index, leaf in enumerate(_tensors(output) if live is None else ()):
                    found[f"output {micro}.{k}.{index}"] = leaf.detach().clone()
        torch.rand(3)  # whoever runs random ops again must not be led astray by others in between
        # A scale other than one, as a gradient scaler has it, in the precision that asks for it.
        loss = torch.stack(losses).sum() * (64.0 if mode.autocast is torch.float16 else 1.0)
        loss.backward()
        if live is not None:
            continue
        found[f"loss {micro}"] = loss.detach().clone()
        for k, args in enumerate(inputs):
            for index, x in enumerate(args):
                if x.requires_grad:
                    found[f"gradient of input {micro}.{k}.{index}"] = None if x.grad is None else x.grad.clone()
    return found


def _auxiliary(case: Case) -> torch.Tensor | float:
    found = [block.aux_loss for block in case.model.blocks if getattr(block, "aux_loss", None) is not None]
    return torch.stack([loss.float() for loss in found]).sum() if found else 0.0


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
