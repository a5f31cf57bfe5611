"""A remedy for a step that does not fit: its batch in micro-batches, whose gradients are added up.

The inputs of the call are at hand, so smaller batches are made of their rows, and divided as `effective_batch` does it.

Known limits: if some inputs have the batch in another dimension than the first, the smaller step cannot be captured,
and nothing is advised. Where several processes train, nothing is advised either, since each may have another batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit.compiler.request import Request
from memfit.distributed.process_group import world_size
from memfit.errors import SpecError
from memfit.tools.batch_steps import BatchSteps
from memfit.tools.effective_batch import EffectiveBatch, divided
from memfit.torch_compat.core import pytree

__all__ = ["advised_batch", "micro_batch_advice"]

log = logging.getLogger(__name__)


def micro_batch_advice(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], request: Request) -> str:
    """Tells how to divide the batch of a call that does not fit; empty if no way is found."""
    found = advised_batch(model, args, kwargs, request)
    if found is None:
        return ""
    return (
        f"{found.accumulation_steps} micro-batches of {found.micro_batch} samples, with their gradients added up, fit "
        f"in the place of {found.samples} samples, by prediction"
    )


def advised_batch(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], request: Request
) -> EffectiveBatch | None:
    """The batch of a call in the fastest micro-batches that fit; None if none do, or if several processes train."""
    if world_size() > 1:
        return None
    log.info("%s does not fit; looking for micro-batches that fit", type(model).__name__)
    try:
        found = _divided_batch(model, args, kwargs, request)
    except Exception as failure:  # the error to report is that of the budget
        log.info("no micro-batch is advised: %s", failure)
        return None
    return found if found.micro_batch < found.samples else None


def _divided_batch(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], request: Request) -> EffectiveBatch:
    """Divides the batch of a call into micro-batches, the fastest that fit, for a call that does not fit.

    Args:
        model: in training mode.
        args: positional inputs; of tensors with as many rows as the first, some rows are taken.
        kwargs: keyword inputs.
        request: what a plan must fulfil.

    Raises:
        BudgetError: if not even single samples fit.
        LossError: if the loss is bound to the targets of the whole batch.
        SpecError: if there is no batch to divide: no tensor with several rows.
    """
    leaves, form = pytree.tree_flatten((tuple(args), dict(kwargs)))
    samples = next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
    if samples < 2:
        raise SpecError(f"there is no batch to divide (samples: {samples})")

    def inputs(count: int) -> Any:
        def part(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.dim() or len(leaf) != samples:
                return leaf
            return leaf[torch.arange(count, device=leaf.device) % samples]

        return pytree.tree_unflatten([part(leaf) for leaf in leaves], form)

    return divided(
        BatchSteps(model, inputs, lambda _: request.loss_fn, replace(request, prove=False, plain=False), None), samples
    )
