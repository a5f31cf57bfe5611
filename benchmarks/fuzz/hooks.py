"""Hooks on random modules: some that only look, some that change what passes."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.fuzz.model import Case

__all__ = ["Log", "register"]

Log = list[tuple[str, str, float]]
"""Which module or parameter, which hook, and the sum of what it saw."""


def register(case: Case, log: Log, *, fitted: bool) -> None:
    """Registers hooks on a model, each of which writes into a log.

    Args:
        case: whose model.
        log: where to.
        fitted: which half of the hooks: those that come before `fit`, or those after.
    """
    rng = random.Random(f"{case.recipe.seed} {fitted}")
    model = case.model
    modules = {"": model, **{f"blocks.{k}": block for k, block in enumerate(model.blocks)}, "head": model.head}
    for kind in rng.sample(sorted(_KINDS), 2):
        name = rng.choice(sorted(modules))
        _KINDS[kind](modules[name], name, log)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    name, parameter = rng.choice(trained)
    _PARAMETER_KINDS[rng.choice(sorted(_PARAMETER_KINDS))](parameter, name, log)


def _sum(value: Any) -> float:
    tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return float(sum(t.detach().double().abs().sum() for t in tensors))


def _looks_forward(module: nn.Module, name: str, log: Log) -> None:
    module.register_forward_hook(lambda m, inputs, output: log.append((name, "forward", _sum(output))))


def _looks_before(module: nn.Module, name: str, log: Log) -> None:
    module.register_forward_pre_hook(lambda m, inputs: log.append((name, "before", _sum(inputs))))


def _changes_forward(module: nn.Module, name: str, log: Log) -> None:
    def hook(m: nn.Module, inputs: Any, output: Any) -> Any:
        log.append((name, "changes", 0.0))
        return output * 1.25 if isinstance(output, torch.Tensor) else None

    module.register_forward_hook(hook)


def _looks_backward(module: nn.Module, name: str, log: Log) -> None:
    module.register_full_backward_hook(lambda m, into, out: log.append((name, "backward", _sum(out))))


def _changes_backward(module: nn.Module, name: str, log: Log) -> None:
    def hook(m: nn.Module, out: Any) -> Any:
        log.append((name, "before backward", _sum(out)))
        return tuple(None if g is None else g * 2 for g in out)

    module.register_full_backward_pre_hook(hook)


def _changes_gradient(parameter: nn.Parameter, name: str, log: Log) -> None:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        log.append((name, "gradient", _sum(gradient)))
        return gradient * 2

    parameter.register_hook(hook)


def _looks_accumulated(parameter: nn.Parameter, name: str, log: Log) -> None:
    parameter.register_post_accumulate_grad_hook(lambda p: log.append((name, "accumulated", _sum(p.grad))))


_KINDS = {
    "looks forward": _looks_forward,
    "looks before": _looks_before,
    "changes forward": _changes_forward,
    "looks backward": _looks_backward,
    "changes backward": _changes_backward,
}
_PARAMETER_KINDS = {"changes gradient": _changes_gradient, "looks accumulated": _looks_accumulated}
