"""Refuses models whose samples are not independent: micro-batches would change how they train.

Batch normalisation in training mode takes its statistics from the micro-batch. It is found in the graph, and refused
unless the caller allows it. Other ops that couple samples are found in two ways:

- *By shapes.* The ops of model and loss are traced for two numbers of samples. Every result that depends on samples
  grows with the number of samples along one axis, except the sums and counts of the loss. A result that does not grow
  is computed from all samples together (a mean over the batch, the share of tokens that an expert gets), and a result
  that grows along two axes compares samples (a contrastive loss). Such a term is found even if its weight is small.
- *By trying.* Shapes do not show values that move between samples. So, without dropout, the loss of some samples must
  be the weighted sum of the losses of their two halves.

Known limits: shapes show nothing if a model runs other ops for another number of samples, as in a Python loop over
samples; the trial is skipped if the model itself draws random numbers, or if the batch is a single sample.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from memfit.capture.state.snapshot import preserved
from memfit.errors import CaptureError
from memfit.ops.registry import rule_of
from memfit.pipelining.loss.scaling import totals
from memfit.pipelining.loss.traced import TracedLoss
from memfit.pipelining.partition.forward_graph import ForwardGraph

__all__ = ["check_halves", "refuse_batch_norm", "refuse_mixing"]

log = logging.getLogger(__name__)

_RELATIVE = 1e-3
"""Allowed difference of the sum over halves, relative to the loss, in float32; coupled samples change it far more."""

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


_aten = torch.ops.aten


def refuse_mixing(few: TracedLoss, more: TracedLoss, samples: Collection[int]) -> None:
    """Refuses a model in which a result other than the loss is computed from several samples.

    Args:
        few: model and loss for some samples.
        more: model and loss for another number of samples.
        samples: leaves of the inputs with one row per sample.

    Raises:
        CaptureError: naming the op.
    """
    here, there = list(few.graph.nodes), list(more.graph.nodes)
    if [node.target for node in here if node.op != "placeholder"] != [
        node.target for node in there if node.op != "placeholder"
    ]:
        log.info("the model computes something else for another number of samples, so shapes do not tell what it mixes")
        return
    added = totals(few)
    read = _read_by_loss(few.loss)
    of_samples = {node for leaf, node in few.leaves.items() if leaf in samples}
    for node, other in zip(here, there, strict=True):
        if of_samples.isdisjoint(node.all_input_nodes) or not rule_of(node.target).reads_values:
            continue
        of_samples.add(node)
        if node not in read or node in added or not _is_floating(node):
            continue
        sizes = zip(node.meta["val"].shape, other.meta["val"].shape, strict=True)
        growing = sum(one != two for one, two in sizes)
        if growing != 1:
            how = "compares samples with each other" if growing else "makes one result of several samples"
            where = " ".join(map(str.strip, (node.stack_trace or "").strip().splitlines()[-1:]))
            raise CaptureError(
                f"the samples of a batch are not independent: {node.target} {how} (shape "
                f"{tuple(node.meta['val'].shape)}){': ' + where if where else ''}; with more than one micro-batch "
                "gradients would be others: use one"
            )


def _read_by_loss(loss: fx.Node) -> set[fx.Node]:
    """The ops whose values a loss depends on."""
    read: set[fx.Node] = set()
    waiting = [loss]
    while waiting:
        node = waiting.pop()
        if node not in read:
            read.add(node)
            waiting += node.all_input_nodes if rule_of(node.target).reads_values else []
    return read


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


class _WithoutDropout(TorchFunctionMode):
    """Mode in which dropout passes its input through."""

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
    """Checks by a trial that a loss is the sum of the losses of two halves of its samples. Leaves the model unchanged.

    Args:
        model: the model, whose buffers and random state are restored.
        loss_of: runs model and loss on some samples, and returns their loss.
        losses_of_halves: runs model and loss on each half, and returns the weighted losses.

    Raises:
        CaptureError: if the loss is not that sum.
    """
    with preserved(model), torch.no_grad(), _WithoutDropout():
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
            f"and {float(halves):.6g} for two halves; with more than one micro-batch gradients would be others: use "
            "one"
        )
