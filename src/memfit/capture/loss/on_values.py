"""A loss that may look at values: it is read on fake outputs if possible, otherwise on real outputs.

Fake outputs cost nothing, but a loss may select by a mask, call `.item()` or NumPy, assert, or run a kernel that reads
lengths (CTC). Then the module runs once without gradients, and the loss runs on its detached outputs. Module, inputs
and all state that the loss leads to are restored. A loss that also fails on real outputs must be fixed by the caller:
the error names its line.

Known limits: the outputs of a forward pass without gradients must fit next to the model; they fit where a plan fits.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.capture.loss.reading import AssumedLoss, LossFunction, LossReading, loss_name, read_loss
from memfit.capture.state.snapshot import preserved
from memfit.errors import CaptureError, LossError
from memfit.torch_compat.core import pytree

__all__ = ["held_within", "loss_reading", "not_reaching"]

log = logging.getLogger(__name__)

_MOST_OBJECTS = 2_000
"""Most objects of an output that are looked into."""

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def loss_reading(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    output: Any,
    loss_fn: LossFunction | None,
    device_type: str,
    *,
    receivers: Sequence[torch.Tensor],
    take_back: Callable[[], None],
) -> LossReading:
    """How the loss uses the outputs, and the memory that it takes.

    Args:
        model: in training mode.
        args: positional inputs.
        kwargs: keyword inputs.
        output: the output of the captured module, fake or real.
        loss_fn: the user's loss.
        device_type: only memory of this device type counts.
        receivers: tensors that may receive a gradient: those of the output, then tensors that the module does not
            return, which are assumed to receive a gradient where the loss cannot tell.
        take_back: undoes changes of the module by capturing, such as a fake tensor assigned to a buffer.

    Raises:
        LossError: if the loss cannot be called with real outputs either.
        CaptureError: if it returns no scalar tensor with a gradient.
    """
    try:
        with preserved(loss_fn):
            if isinstance(loss_fn, AssumedLoss):
                return _with_escaped(read_loss(output, loss_fn, device_type), output, receivers)
            return _used_by_the_loop(read_loss(output, loss_fn, device_type, receivers=receivers), output, receivers)
    except CaptureError:
        raise
    except Exception as error:
        if loss_fn is None or isinstance(loss_fn, AssumedLoss):
            raise
        first = error
    if any(t.is_meta for t in model.parameters()):
        raise LossError(_told(loss_fn, first) + "; the model is on the meta device, where no values are") from first
    log.info("the loss looks at values, reading it on real outputs: %s", first)
    take_back()
    with preserved(model, args, kwargs, loss_fn):
        with torch.no_grad():
            real = model._call_impl(*args, **kwargs)
        real = _leaves_like(real, output)
        try:
            return _with_escaped(read_loss(real, loss_fn, device_type), output, receivers)
        except CaptureError:
            raise
        except Exception as error:
            raise LossError(_told(loss_fn, error)) from error


def not_reaching(reading: LossReading, receivers: Sequence[Any], others: Sequence[Any]) -> LossReading:
    """The reading without gradients for `others`, since the loop brings them none."""
    without = {id(t) for t in others}
    received = zip(receivers, reading.receives_gradient, strict=False)
    return replace(reading, receives_gradient=tuple(does and id(t) not in without for t, does in received))


def _used_by_the_loop(reading: LossReading, output: Any, receivers: Sequence[torch.Tensor]) -> LossReading:
    """The reading, with gradients for all tensors that the module does not return: a loop uses them too."""
    returned = sum(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(output))
    within = held_within(output)
    used = zip_longest(receivers[returned:], reading.receives_gradient[returned:], fillvalue=False)
    beside = (does if id(t) in within else t.requires_grad for t, does in used if isinstance(t, torch.Tensor))
    return replace(reading, receives_gradient=(*reading.receives_gradient[:returned], *beside))


def _with_escaped(reading: LossReading, output: Any, receivers: Sequence[torch.Tensor]) -> LossReading:
    within = held_within(output)
    beside = (t.requires_grad and id(t) not in within for t in receivers[len(reading.receives_gradient) :])
    return replace(reading, receives_gradient=(*reading.receives_gradient, *beside))


def held_within(output: Any) -> set[int]:
    """The identities of tensors in objects that the module returns, such as a cache of keys and values.

    Unlike tensors that the module leaves on itself, they are outputs, and outputs that the loss does not use mostly get
    no gradient.
    """
    found: set[int] = set()
    waiting = [leaf for leaf in pytree.tree_leaves(output) if not isinstance(leaf, torch.Tensor)]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_OBJECTS:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, nn.Module | type):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.add(id(value))
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif hasattr(value, "__dict__") and not callable(value):
            waiting += vars(value).values()
    return found


def _leaves_like(real: Any, traced: Any) -> Any:
    """Real outputs as leaves, which receive gradients where the traced ones do."""
    receives = [t.requires_grad for t in pytree.tree_leaves(traced) if isinstance(t, torch.Tensor)]
    tensors = [t for t in pytree.tree_leaves(real) if isinstance(t, torch.Tensor)]
    if len(receives) != len(tensors):
        receives = [t.is_floating_point() or t.is_complex() for t in tensors]
    does = {id(t): here for t, here in zip(tensors, receives, strict=True)}
    leaves: dict[int, torch.Tensor] = {}

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in leaves:
            leaves[id(tensor)] = tensor.detach().requires_grad_(does[id(tensor)])
        return leaves[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, leaf, real)


def _told(loss_fn: Any, error: Exception) -> str:
    """A message that says where the loss failed, in the caller's own code if the traceback has any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    where = f" at {own[-1].filename}:{own[-1].lineno}, `{own[-1].line}`" if own else ""
    lines = str(error).strip().splitlines() or [""]
    return f"loss_fn {loss_name(loss_fn)} fails on the outputs of the model{where}: {type(error).__name__}: {lines[0]}"
