"""A script: a small training program with a place where its model is fitted, so that it runs plain and planned.

A script is a generator function that is given `fit` and yields after each step what that step made. Where `fit` returns
the model as it is, the program is the plain one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "DEVICE",
    "STEPS",
    "Fit",
    "NotBuilt",
    "Results",
    "Sample",
    "Script",
    "loss_of",
    "results",
    "seed_all",
    "train",
]

STEPS = 4
"""The last is measured and not compared: under a mode that counts, autograd takes other formulas for some gradients."""

DEVICE: ContextVar[str] = ContextVar("device", default="cpu")
"""Where `train` has the model and its inputs."""

Results = dict[str, torch.Tensor]


class Fit(Protocol):
    """`memfit.fit` with a budget, or nothing."""

    def __call__(
        self,
        model: nn.Module,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> nn.Module:
        """The same model, fitted for these inputs, or not."""
        ...


Script = Callable[[Fit], Iterator[Results]]


class NotBuilt(Exception):
    """A model cannot be made small here, or not be trained; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A model with inputs and a loss.

    Attributes:
        model: in training mode.
        args: positional inputs.
        kwargs: keyword inputs.
        loss_fn: from its output to a scalar; see `loss_of`.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], torch.Tensor] | None = None


def seed_all(seed: int) -> None:
    """Seeds torch's, Python's and NumPy's generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def loss_of(output: Any) -> torch.Tensor:
    """The output's own loss where it has one, else the mean square of everything in it that has a gradient.

    Raises:
        NotBuilt: if nothing has one.
    """
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.numel() == 1 and own.requires_grad:
        return own.reshape(())
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not leaves:
        raise NotBuilt("no output has a gradient")
    squares = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    return torch.stack([leaf.float().square().mean() for leaf in squares]).sum()


def results(model: nn.Module, **more: Any) -> Results:
    """Gradients, parameters, buffers, the random state, and whatever else is given; copied by who gets it.

    What this makes itself is not the step's memory, so no mode that counts sees it.
    """
    with _disable_current_modes():
        found = {name: leaf for name, value in more.items() for name, leaf in _leaves(name, value)}
        for name, parameter in model.named_parameters():
            found[f"parameter {name}"] = parameter
            if parameter.grad is not None:
                found[f"gradient {name}"] = parameter.grad
        found.update((f"buffer {name}", buffer) for name, buffer in model.named_buffers())
        found["random state"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            found["random state on the device"] = torch.cuda.get_rng_state()
        return {name: tensor.detach() for name, tensor in found.items()}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for index, leaf in enumerate(tree_leaves(value)):
        if isinstance(leaf, torch.Tensor):
            yield f"{name} {index}", leaf


def _moved(sample: Sample, device: str) -> Sample:
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (sample.args, sample.kwargs))
    return replace(sample, model=sample.model.to(device), args=args, kwargs=kwargs)


def train(sample: Callable[[], Sample]) -> Script:
    """The plainest loop there is, around a model."""

    def script(fit: Fit) -> Iterator[Results]:
        seed_all(0)
        made = _moved(sample(), DEVICE.get())
        loss_fn = made.loss_fn or loss_of
        model = made.model.train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-3, momentum=0.9)
        model = fit(model, made.args, made.kwargs, loss_fn=loss_fn, optimizer=optimizer)
        for number in range(STEPS):
            seed_all(10 + number)
            output = model(*made.args, **made.kwargs)
            loss = loss_fn(output)
            loss.backward()
            yield results(model, loss=loss, output=output)
            del output, loss
            optimizer.step()
            optimizer.zero_grad()

    return script
