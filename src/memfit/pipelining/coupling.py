"""Refuses models whose samples are not independent: in micro-batches they would train to something else.

Batch normalisation in training mode takes its statistics from the micro-batch. It is found in the graph, and refused
unless the caller says that this is meant. What else couples samples (a contrastive loss, a mean over the batch inside
the model) is found by trying: without dropout, the loss of some samples must be made of those of two halves of them.

Known limits: the trial is not made where the model draws random numbers by itself, or the batch is a single sample.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from memfit.capture.dynamo import preserved_state
from memfit.errors import CaptureError
from memfit.pipelining.forward_graph import ForwardGraph

__all__ = ["check_halves", "refuse_batch_norm"]

log = logging.getLogger(__name__)

_RELATIVE = 1e-3
"""Of the loss, by how much the sum over halves may be off in float32; coupled samples change it by far more."""

_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}


def refuse_batch_norm(forward: ForwardGraph, model: nn.Module) -> None:
    """Refuses batch normalisation that takes its statistics from the data.

    Raises:
        CaptureError: naming the modules.
    """
    calls = [
        n for n in forward.calls if n.target in (F.batch_norm, torch.batch_norm) and _takes_statistics(n.args, n.kwargs)
    ]
    if not calls:
        return
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
    ]
    raise CaptureError(
        f"batch normalisation ({', '.join(names[:3]) or calls[0].name}{', ...' if len(names) > 3 else ''}) takes its "
        "statistics from each micro-batch, so gradients would not be those of the whole batch; use one micro-batch, "
        'freeze it with .eval(), take GroupNorm, or accept it with batch_norm="per-microbatch"'
    )


def _takes_statistics(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    given = dict(zip(("input", "running_mean", "running_var", "weight", "bias", "training"), args, strict=False))
    return bool({**given, **kwargs}.get("training", False))


class _WithoutDropout(TorchFunctionMode):
    """Dropout lets everything pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
            args = args[:4] + ((0.0,) if len(args) > 4 else ()) + args[5:]
            if len(args) > 4:
                del kwargs["dropout_p"]
        return func(*args, **kwargs)


def check_halves(
    model: nn.Module, loss_of: Callable[[], torch.Tensor], losses_of_halves: Callable[[], list[torch.Tensor]]
) -> None:
    """Tries whether a loss is made of those of two halves of its samples. Leaves the model as it was.

    Args:
        model: whose buffers and random numbers are restored.
        loss_of: runs model and loss on some samples.
        losses_of_halves: runs them on each half, weighted.

    Raises:
        CaptureError: if it is not.
    """
    with preserved_state(model), torch.no_grad(), _WithoutDropout():
        state = torch.get_rng_state()
        whole = loss_of().double()
        if not torch.equal(state, torch.get_rng_state()):
            log.info("the model draws random numbers by itself, so it is not tried whether its samples are independent")
            return
        halves = torch.stack([loss.double() for loss in losses_of_halves()]).sum()
    if not torch.isfinite(whole) or not torch.isfinite(halves):
        return
    if abs(whole - halves) > _RELATIVE * max(1e-6, abs(float(whole))):
        raise CaptureError(
            f"the samples of a batch are not independent: the loss is {float(whole):.6g} for some of them together, "
            f"and {float(halves):.6g} for two halves; with more than one micro-batch gradients would be others"
        )
