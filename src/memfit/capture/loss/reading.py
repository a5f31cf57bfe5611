"""The loss between the forward and the backward pass: its memory, and the outputs that it brings a gradient.

The user's loop calls the loss itself, in plain autograd, so memfit does not plan it; but its memory is part
of the step, and an output that the loss does not use must not cost a gradient of zeros.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.allocation_tracker import LiveBytes
from memfit.capture.eager.backward_autocast import backward_region
from memfit.capture.eager.fake_strides import strides_of_kernels
from memfit.capture.eager.kernel_samples import strides_alike
from memfit.capture.gradients.autograd_graph import leaves_behind
from memfit.capture.gradients.tangents import Strides, strides_without_overlap
from memfit.capture.loss.memory import uses
from memfit.errors import CaptureError
from memfit.fxir.user_lines import user_line
from memfit.torch_compat.core import pytree

__all__ = [
    "AssumedLoss",
    "LossFunction",
    "LossReading",
    "backward_of",
    "forward_and_backward",
    "loss_name",
    "loss_place",
    "read_loss",
    "scalar_loss",
]


LossFunction = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReading:
    """Outputs that the loss's gradient reaches, and the memory that the loss takes.

    Attributes:
        receives_gradient: for each tensor leaf of the output, or each receiver, whether the loss's gradient reaches it.
        transient_bytes: peak of the loss and its backward pass beyond the outputs, their gradients and the held bytes.
        held_bytes: bytes that the loss holds from then on until the step ends.
        saved_bytes: bytes that the loss and its autograd graph hold until its backward pass begins.
        kept_bytes: bytes that the loss keeps beyond the step, so that a later step begins with them.
        output_bytes: bytes of the outputs.
        shapes: shapes of the outputs.
        gradient_strides: strides of the gradients of the outputs; None where unknown.
        leaves: ids of the leaves that the loss reaches past the output, such as parameters that it penalizes.
    """

    receives_gradient: tuple[bool, ...]
    transient_bytes: int
    output_bytes: int = 0
    held_bytes: int = 0
    saved_bytes: int = 0
    kept_bytes: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    gradient_strides: tuple[Strides | None, ...] = ()
    leaves: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedLoss:
    """A stand-in for a loss that cannot be called with these outputs: it reaches the outputs reached before.

    Attributes:
        name: name of the loss.
        before: the earlier reading of the loss, with other inputs.
    """

    name: str
    before: LossReading | None = None

    def reached(self, output: Any) -> list[torch.Tensor]:
        """Outputs that receive a gradient: as in the earlier reading if the counts are equal, else all that can."""
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
        before = self.before.receives_gradient if self.before is not None else ()
        receives = before if len(before) == len(tensors) else [True] * len(tensors)
        found = [t for t, does in zip(tensors, receives, strict=True) if does and t.requires_grad]
        return found or [t for t in tensors if t.requires_grad]

    def reading(self, output: Any) -> LossReading:
        """The earlier reading, with bytes scaled by the bytes of the outputs."""
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
        reached = {id(t) for t in self.reached(output)}
        nbytes = sum(t.numel() * t.element_size() for t in tensors)
        transient = saved = nbytes
        if self.before is not None and self.before.output_bytes:
            transient = -(-self.before.transient_bytes * nbytes // self.before.output_bytes)
            saved = -(-self.before.saved_bytes * nbytes // self.before.output_bytes)
        shapes = tuple(tuple(t.shape) for t in tensors)
        return LossReading(
            receives_gradient=tuple(id(t) in reached for t in tensors),
            transient_bytes=transient,
            saved_bytes=saved,
            output_bytes=nbytes,
            shapes=shapes,
            gradient_strides=self._strides(shapes),
            leaves=frozenset() if self.before is None else self.before.leaves,
        )

    def _strides(self, shapes: Sequence[tuple[int, ...]]) -> tuple[Strides | None, ...]:
        """Strides of gradients with the same layout as in the earlier reading."""
        before = self.before
        if before is None or [len(shape) for shape in before.shapes] != [len(shape) for shape in shapes]:
            return ()
        pairs = zip(before.shapes, before.gradient_strides, shapes, strict=False)
        return tuple(None if s is None else strides_alike(shape, s, ours) for shape, s, ours in pairs)

    def __call__(self, output: Any) -> torch.Tensor:
        """A scalar whose gradient is not the same for all elements."""
        parts = [torch.view_as_real(t) if t.is_complex() else t for t in self.reached(output)]
        return torch.stack([t.square().mean().float() for t in parts]).sum()


def scalar_loss(output: Any, loss_fn: LossFunction | None) -> torch.Tensor | None:
    """The scalar to differentiate: `loss_fn(output)`, else the output's own `loss`, else its only scalar, else None.

    Raises:
        CaptureError: if `loss_fn` returns something else than a scalar tensor.
    """
    if loss_fn is not None:
        loss = loss_fn(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CaptureError(
                f"loss_fn must return a scalar tensor ({loss_place(loss_fn)} returned: {shape}){_advice(loss)}"
            )
        return loss
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.numel() == 1:
        return own
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    scalars = [leaf for leaf in leaves if leaf.dim() == 0]
    return scalars[0] if len(scalars) == 1 else None


def _advice(returned: Any) -> str:
    if isinstance(returned, tuple | list) and returned and isinstance(returned[0], torch.Tensor):
        return "; return the tensor that backward is called on only, such as loss_fn=lambda output: fn(output)[0]"
    if isinstance(returned, float | int):
        return "; a Python number has no gradient, so leave out .item()"
    return "; reduce it, such as with .mean()" if isinstance(returned, torch.Tensor) else ""


def loss_name(loss_fn: Any) -> str:
    """A name of a loss, for people."""
    loss_fn = _innermost(loss_fn)
    return str(getattr(loss_fn, "__qualname__", None) or type(loss_fn).__name__)


def loss_place(loss_fn: Any) -> str:
    """The name of a loss, and the line where it is defined if that is in the user's Python code."""
    if loss_fn is None:
        return "the model's own loss"
    inner = _innermost(loss_fn)
    written = inner if hasattr(inner, "__code__") else getattr(type(inner), "forward", type(inner).__call__)
    code = getattr(written, "__code__", None)
    place = "" if code is None else user_line(f'File "{code.co_filename}", line {code.co_firstlineno}')
    return loss_name(loss_fn) + (f" at {place}" if place else "")


def _innermost(loss_fn: Any) -> Any:
    while True:
        if isinstance(loss_fn, functools.partial):
            loss_fn = loss_fn.func
        elif "__wrapped__" in getattr(loss_fn, "__dict__", ()):
            loss_fn = loss_fn.__wrapped__
        else:
            return loss_fn


def forward_and_backward(
    call: Callable[[], Any], loss_fn: LossFunction | None, *, hold_outputs: bool = True
) -> torch.Tensor | None:
    """Runs the model, the loss and the backward pass as a training loop would.

    Args:
        call: calls the model and returns its output; the output itself as an argument would live as long as the call.
        loss_fn: as for `memfit.plan`.
        hold_outputs: whether the loop holds the output until the backward pass ends, as `output = model(x)` does, or
            only until the loss is there, as `loss_fn(model(x)).backward()` does.

    Returns:
        The loss, detached, if there is one.
    """
    output = call()
    loss = scalar_loss(output, loss_fn)
    if loss is not None:
        if not hold_outputs:
            del output
        with backward_region():
            loss.backward()
        return loss.detach()
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    with backward_region():
        torch.autograd.backward(tensors, [torch.ones_like(t) for t in tensors])
    return None


def backward_of(output: Any, loss_fn: LossFunction | None) -> torch.Tensor | None:
    """Runs loss and backward as a training loop would; returns the loss, detached, if there is one."""
    return forward_and_backward(lambda: output, loss_fn)


def _twins(output: Any) -> dict[int, torch.Tensor]:
    """By identity, leaves that replace the tensors made by code after the last captured graph."""
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
    return {id(t): t.detach().requires_grad_() for t in tensors if t.requires_grad and t.grad_fn is not None}


def _with_twins(output: Any, twins: Mapping[int, torch.Tensor]) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: twins.get(id(t), t), output) if twins else output


def _gradients(loss: torch.Tensor, wanted: Sequence[torch.Tensor], twins: Mapping[int, torch.Tensor]) -> list[Any]:
    """The gradients of tensors, some of which the loss took in the form of their twins.

    Tensors that the loss saved are freed, as in a training loop; tensors that code of the model saved stay for later
    use.
    """
    found: list[Any] = list(torch.autograd.grad(loss, [twins.get(id(t), t) for t in wanted], allow_unused=True))
    ends = [(t, g) for t, g in zip(wanted, found, strict=True) if id(t) in twins and g is not None]
    if len(wanted) == 1 or not ends:
        return found
    through = torch.autograd.grad(
        [t for t, _ in ends], wanted, [g for _, g in ends], retain_graph=True, allow_unused=True
    )
    return [b if a is None or b is not None else a for a, b in zip(found, through, strict=True)]


def read_loss(
    output: Any,
    loss_fn: LossFunction | None,
    device_type: str,
    *,
    receivers: Sequence[torch.Tensor] | None = None,
) -> LossReading:
    """Differentiates the loss back to the output's tensors, fake or real.

    Args:
        output: the output of the model; the backward pass stops at its tensors.
        loss_fn: the user's loss.
        device_type: only memory of this device type counts.
        receivers: tensors that may receive a gradient, the output's own first; by default the tensors of the output.

    Returns:
        Which tensors receive a gradient, and the memory the loss takes.
    """
    if isinstance(loss_fn, AssumedLoss):
        return loss_fn.reading(output)
    leaves = pytree.tree_leaves(output) if receivers is None else receivers
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    differentiable = [t for t in tensors if t.requires_grad]
    if not differentiable:
        raise CaptureError("no output of the model needs a gradient; is it in training mode with trainable parameters?")
    before = uses([t for t in tensors if t.device.type == device_type])

    def kept_outputs() -> int:
        after = uses([t for t in tensors if t.device.type == device_type])
        return sum(nbytes for key, (count, nbytes) in after.items() if count > before[key][0])

    with torch.enable_grad(), strides_of_kernels(), LiveBytes(device_type) as counter:
        twins = _twins(output)
        loss = scalar_loss(_with_twins(output, twins), loss_fn)
        if loss is None:
            return LossReading(receives_gradient=tuple(t.requires_grad for t in tensors), transient_bytes=0)
        if not loss.requires_grad:
            raise CaptureError(
                "the loss does not depend on the model's output by differentiable operations, so there is nothing to "
                f"train; is something detached, or under no_grad ({loss_place(loss_fn)})?"
            )
        saved_bytes = counter.live
        beyond = leaves_behind([loss])
        with backward_region():
            gradients = _gradients(loss, differentiable, twins)
        lying: dict[int, Strides | None] = {}
        for tensor, gradient in zip(differentiable, gradients, strict=True):
            if gradient is not None:
                lying[id(tensor)] = strides_without_overlap(gradient)
        tangents = {g.untyped_storage()._cdata: int(g.untyped_storage().nbytes()) for g in gradients if g is not None}
        peak = counter.peak
        # The gradient of the loss lives until the backward pass ends.
        held = counter.live - sum(tangents.values()) + loss.numel() * loss.element_size()
        del loss, gradients, gradient, twins
        if counter.live or kept_outputs():
            gc.collect()  # reference cycles of Python hold no memory for long
        kept = counter.live
    held = max(0, held - kept)
    kept += kept_outputs()
    return LossReading(
        receives_gradient=tuple(id(t) in lying for t in tensors),
        transient_bytes=max(0, peak - sum(tangents.values()) - held),
        held_bytes=held,
        saved_bytes=saved_bytes,
        kept_bytes=kept,
        output_bytes=sum(t.numel() * t.element_size() for t in tensors),
        shapes=tuple(tuple(t.shape) for t in tensors),
        gradient_strides=tuple(lying.get(id(t)) for t in tensors),
        leaves=beyond,
    )
