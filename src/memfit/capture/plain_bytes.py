"""The peak of the plain step, counted while the module, its loss and autograd run on fake tensors.

A graph knows which op reads a tensor last, but Python frees it when the last variable goes, autograd when a node has
run, and the engine adds gradients up as they come. To run the step as it is, on tensors without memory, counts all of
that: eager's own idea of a dry run, as `torch._subclasses.fake_tensor` makes it possible. What kernels take beyond
their results is asked of samples (`memfit.capture.sampled_workspace`).

The step runs twice, and the second run counts: tables and masks that a model keeps are made in the first.

Known limits: code that looks at values cannot run on fake tensors; there is no count then. On a GPU nothing is known of
workspaces, and blocks of the allocator are not rounded up.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from memfit.capture.fake_kernels import rules_of_kernels
from memfit.capture.inputs import detached
from memfit.capture.loss import LossFunction, backward_of
from memfit.capture.loss_memory import LossBytes
from memfit.capture.preserve import preserved
from memfit.capture.sampled_workspace import SampledWorkspace

__all__ = ["counted_step"]

log = logging.getLogger(__name__)


def counted_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss_fn: LossFunction | None,
    device_type: str,
) -> tuple[int, str] | None:
    """Bytes that one plain step takes at most beyond what is there before it, and the op at which it does.

    Args:
        model: in training mode; it is as before.
        args: positional inputs.
        kwargs: keyword inputs.
        loss_fn: the user's loss.
        device_type: only memory of this device type counts.

    Returns:
        None where the step cannot run on fake tensors.
    """
    inputs = detached(args, dict(kwargs))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    try:
        with preserved(model, args, kwargs, loss_fn, values=False), rules_of_kernels():
            fakes: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor) for name, tensor in held.items()}
            for name, tensor in held.items():
                if tensor.grad is not None:
                    fakes[name].grad = mode.from_tensor(tensor.grad)
            ours, named = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (inputs.args, inputs.kwargs))

            def step() -> None:
                backward_of(torch.func.functional_call(model, fakes, ours, named), loss_fn)

            counter = _PlainBytes(mode, device_type)
            with mode, counter:
                step()
                for name, tensor in held.items():
                    if tensor.grad is None:
                        fakes[name].grad = None
                before = counter.peak = counter.live
                step()
            return counter.peak - before, counter.at
    except Exception as error:  # of any code of the user's or of torch's: it then is not known
        log.info("the plain step does not run on fake tensors: %s: %s", type(error).__name__, error)
        return None


class _PlainBytes(LossBytes):
    """Counts as `LossBytes` does, and what kernels take; real tensors that code brings along are there already."""

    def __init__(self, mode: FakeTensorMode, device_type: str) -> None:
        super().__init__(device_type)
        self._mode = mode
        self.at = ""
        self._workspace = SampledWorkspace()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op; see `LiveBytes`."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs or {}))
        before = self.peak
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.live + self._workspace.of_values(func, args, kwargs, result))
        self.at = str(func) if self.peak > before else self.at
        return result

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)
