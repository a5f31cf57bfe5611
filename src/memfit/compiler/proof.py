"""Proves that a planned step equals the baseline step: both run from the same state and are compared bit by bit.

A plan is made from a captured graph. Capture promises that the graph computes the same as the module; this module
checks that promise on the user's module, inputs and loss. Where free memory allows, the whole baseline step runs, so
loss, outputs, gradients, buffers and random states are compared. Otherwise only its forward pass runs, and everything
that autograd would save is dropped at once (`torch.autograd.graph.saved_tensors_hooks`): it takes no more memory than a
pass without gradients, yet the model's code sees gradients enabled, as in training.

A second baseline step shows whether the baseline step differs from itself because one of its kernels is not
deterministic.

Parameters that hold only one number are perturbed for both steps (`memfit.compiler.perturbed`), since they would hide
differences.

Known limits: a step that takes another branch for other inputs is checked for these inputs only.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memfit.bits import max_difference, same_bits
from memfit.capture.eager.backward_autocast import backward_region
from memfit.capture.gradients.autograd_graph import leaves_behind
from memfit.capture.loss.reading import LossFunction, scalar_loss
from memfit.capture.state.detached_inputs import DetachedInputs
from memfit.capture.state.snapshot import Snapshot
from memfit.capture.state.tensor import TensorState
from memfit.capture.training_step import device_of
from memfit.compiler.difference import first_difference
from memfit.compiler.perturbed import perturb
from memfit.compiler.tolerance import is_within_rounding
from memfit.errors import CaptureError, ExactnessError
from memfit.torch_compat.core import pytree

__all__ = ["Proof", "ProvingStep", "StepResult", "compare"]

log = logging.getLogger(__name__)

_Key = tuple[str, str]
_TIMES = 4
"""Allowed distance of a planned step from the baseline step, in distances of the baseline step from itself."""

_NAMED = 3
"""Number of differing tensors that an error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The result of comparing a planned step with the baseline step, and the extent of the comparison.

    Attributes:
        gradients: whether gradients were compared; False where the baseline step did not fit in free memory.
        tensors: how many tensors were compared.
        equal: how many of them had the same bits.
        deterministic: whether the baseline step gives the same bits twice; True where that was not tested.
        relative_difference: difference of all gradients together (of outputs, without gradients), relative to their
            norm.
        seconds: time that the baseline steps took.
        other_gradients: whether gradients were left out because the loop brings other gradients than the loss alone.
    """

    gradients: bool
    tensors: int
    equal: int
    deterministic: bool = True
    relative_difference: float = 0.0
    seconds: float = 0.0
    other_gradients: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether every bit that was compared is the same."""
        return self.equal == self.tensors

    def __str__(self) -> str:
        """The proof in words."""
        why_not = "the loop brings other gradients than the loss alone, and without those they are proved"
        why_not = why_not if self.other_gradients else "the plain backward pass does not fit"
        what = "outputs and gradients" if self.gradients else f"outputs ({why_not})"
        if self.is_exact:
            return f"{what} proved equal to the baseline step's, bit by bit"
        why = "" if self.deterministic else ", which is not deterministic itself"
        return f"{what} within {self.relative_difference:.1e} of the baseline step's, relatively{why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Everything that one step leaves behind, copied to the host.

    Attributes:
        tensors: by kind (`loss`, `output`, `gradient`, `state`, `random state`) and name.
        has_gradients: whether the backward pass ran.
        computed_in: narrowest floating dtype among the results and of autocast; None if there is none.
        other_gradients: whether the loop brings other gradients than the loss alone, so that the gradients of the loop
            are not known.
    """

    tensors: Mapping[_Key, torch.Tensor] = field(repr=False)
    has_gradients: bool
    computed_in: torch.dtype | None = None
    other_gradients: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether loss, outputs and gradients hold only finite numbers."""
        told = [t for key, t in self.tensors.items() if key[0] in ("loss", "output", "gradient")]
        return all(bool(t.to_dense().isfinite().all()) for t in told if not t.is_quantized)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvingStep:
    """A training step of a model on inputs detached from the caller's graph, from a state that can be restored.

    Attributes:
        model: the module.
        inputs: inputs of the step.
        loss_fn: as for `memfit.plan`.
        state: state that is restored after each step.
        through: whether a backward pass may go through all that it reaches; a sharded module's hooks need that.
        perturbed: parameters that are perturbed before each step whose results are recorded.
    """

    model: nn.Module
    inputs: DetachedInputs
    loss_fn: LossFunction | None
    state: Snapshot
    through: bool = False
    perturbed: tuple[TensorState, ...] = ()

    def run(self, call: Callable[..., Any]) -> None:
        """Runs forward pass, loss and backward pass through `call`, and drops the gradients."""
        self._drop_gradients()
        self._backward(call(*self.inputs.args, **self.inputs.kwargs))
        self._drop_gradients()

    def result(self, call: Callable[..., Any], *, backward: bool = True) -> StepResult:
        """Runs one step through `call`, records everything that it leaves behind, and restores the state."""
        try:
            perturb(self.perturbed)
            return self._result(call, backward)
        finally:
            self._drop_gradients()
            self.state.restore()
            if self.perturbed:
                torch.clear_autocast_cache()

    def plain(self, *, backward: bool = True) -> StepResult:
        """Runs one step of the plain module; see `result`."""
        return self.result(self.model._call_impl, backward=backward)

    def made(self, call: Callable[..., Any], *, backward: bool) -> list[torch.Tensor]:
        """Runs one step through `call` and restores the state; returns the tensors that it made for others to read."""
        result = self.result(call, backward=backward)
        return [tensor for key, tensor in result.tensors.items() if key[0] != "random state"]

    def _result(self, call: Callable[..., Any], backward: bool) -> StepResult:
        found: dict[_Key, torch.Tensor] = {}
        self._drop_gradients()
        if backward:
            output = call(*self.inputs.args, **self.inputs.kwargs)
            found |= _outputs(output)
            loss = self._backward(output)
        else:
            with torch.autograd.graph.saved_tensors_hooks(_dropped, _refused):
                output = call(*self.inputs.args, **self.inputs.kwargs)
                found |= _outputs(output)
                loss = scalar_loss(output, self.loss_fn)
        del output
        if loss is not None:
            found["loss", "loss"] = _copied(loss)
        for state in self.state.tensors if backward else ():
            if state.tensor.is_leaf and state.requires_grad and state.tensor.grad is not None:
                found["gradient", state.name] = _copied(state.tensor.grad)
        for place, leaf in enumerate(self.inputs.leaves if backward else ()):
            if leaf.grad is not None:
                found["gradient", f"input {place}"] = _copied(leaf.grad)
        # Gradients are compared by name above; the state that a step writes is compared where it was written.
        changed = self.state.changed()
        gradients = {id(state.gradient) for state in self.state.tensors}
        found |= {("state", name): _copied(t) for name, t in changed.items() if id(t) not in gradients}
        found["random state", "cpu"] = torch.get_rng_state()
        return StepResult(tensors=found, has_gradients=backward, computed_in=_narrowest(found, device_of(self.model)))

    def _receiving(self) -> list[torch.Tensor]:
        return [*self.state.leaves(), *self.inputs.leaves]

    def _drop_gradients(self) -> None:
        for tensor in self._receiving():
            tensor.grad = None

    def _backward(self, output: Any) -> torch.Tensor | None:
        """Runs loss and backward pass, but not through the caller's graph if the loss closes over tensors of it."""
        loss = scalar_loss(output, self.loss_fn)
        ends = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        starts = [None] if loss is not None else [torch.ones_like(t) for t in ends]
        ends = [loss] if loss is not None else ends
        foreign = [s.tensor for s in self.state.tensors if s.tensor.grad_fn is not None and s.requires_grad]
        inputs = None if self.through or not foreign else self._own_leaves(foreign)
        with backward_region():
            torch.autograd.backward(ends, starts, inputs=inputs)
        return None if loss is None else loss.detach()

    def _own_leaves(self, foreign: list[torch.Tensor]) -> list[torch.Tensor]:
        """The leaves that may receive gradients: the model's own, and leaves at which no graph of the caller starts."""
        ours = {id(t) for t in (*self.model.parameters(), *self.inputs.leaves)}
        theirs = leaves_behind(foreign) - ours
        return [t for t in self._receiving() if t.requires_grad and id(t) not in theirs]


def compare(
    step: ProvingStep,
    call: Callable[..., Any],
    plain: StepResult,
    planned: StepResult,
    *,
    rounding: bool,
    seconds: float,
) -> Proof:
    """Compares a planned step with the baseline step.

    Args:
        step: step that gave both results.
        call: the planned call.
        plain: result of the plain module.
        planned: result of the plan.
        rounding: whether a difference within rounding is allowed.
        seconds: time that the baseline step took.

    Returns:
        The result of the comparison.

    Raises:
        ExactnessError: if bits differ, or with `rounding`, if results differ by more than rounding.
    """
    keys = list(dict.fromkeys((*plain.tensors, *(planned.tensors if plain.has_gradients else ()))))
    differing = [k for k in keys if not _equal(plain.tensors.get(k), planned.tensors.get(k))]
    proof = Proof(
        gradients=plain.has_gradients,
        tensors=len(keys),
        equal=len(keys) - len(differing),
        seconds=seconds,
        other_gradients=plain.other_gradients,
    )
    if not differing:
        return proof
    begin = time.perf_counter()
    again = step.plain(backward=plain.has_gradients)
    seconds += time.perf_counter() - begin
    deterministic = all(_equal(plain.tensors.get(k), again.tensors.get(k)) for k in keys)
    off = _relative_difference(plain, planned)
    proof = replace(proof, deterministic=deterministic, relative_difference=off, seconds=seconds)
    name = type(step.model).__name__
    if not deterministic:
        log.warning("the baseline step of %s has other bits each time, so a plan is proved up to that only", name)
    if rounding or not deterministic:
        scale = math.hypot(*(_norm(t) for k, t in plain.tensors.items() if k[0] == "gradient"))
        differing = [k for k in differing if not _within(k, plain, planned, again, scale)]
        if not differing:
            return proof
    rows = [f"{' '.join(k)} by {max_difference(plain.tensors.get(k), planned.tensors.get(k)):.3g}" for k in differing]
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    where = _where(step, call, plain.has_gradients)
    advice = (
        "that is more than rounding; please report it"
        if rounding
        else 'pass exact="rounding" to train with gradients that are equal up to rounding'
    )
    raise ExactnessError(
        f"the planned step of {name} is not the baseline step: {len(differing)} of {len(keys)} tensors differ, "
        f"{', '.join(rows[:_NAMED])}{more}; {where}{advice}"
    )


def _where(step: ProvingStep, call: Callable[..., Any], backward: bool) -> str:
    """Names the first op that differs; empty if none is found."""
    difference = first_difference(
        lambda: step.made(step.model._call_impl, backward=backward), lambda: step.made(call, backward=backward)
    )
    return f"{str(difference).rstrip('.')}; " if difference is not None else ""


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and same_bits(a, b)


def _within(key: _Key, plain: StepResult, planned: StepResult, again: StepResult, scale: float) -> bool:
    """Whether a tensor differs by rounding, or by a few times the difference of the baseline step from itself."""
    a, b, c = (result.tensors.get(key) for result in (plain, planned, again))
    if a is None or b is None or a.shape != b.shape or a.dtype is not b.dtype:
        return False
    own = 0.0 if c is None or c.shape != a.shape else _norm(_dense(a) - _dense(c))
    return _norm(_dense(a) - _dense(b)) <= _TIMES * own or is_within_rounding(
        a, b, None, scale=scale, own=0.0, computed_in=plain.computed_in
    )


def _relative_difference(plain: StepResult, planned: StepResult) -> float:
    kind = "gradient" if plain.has_gradients else "output"
    pairs = [(t, planned.tensors.get(k)) for k, t in plain.tensors.items() if k[0] == kind]
    whole = math.hypot(*(_norm(a) for a, _ in pairs))
    if any(b is None or a.shape != b.shape for a, b in pairs):
        return math.inf
    apart = math.hypot(*(_norm(_dense(a) - _dense(b)) for a, b in pairs if b is not None))
    return apart / whole if whole else apart


def _narrowest(tensors: Mapping[_Key, torch.Tensor], device: torch.device) -> torch.dtype | None:
    dtypes = {t.dtype for t in tensors.values() if t.is_floating_point() or t.is_complex()}
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _norm(tensor: torch.Tensor) -> float:
    return float(_dense(tensor).norm()) if tensor.numel() else 0.0


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _outputs(output: Any) -> dict[_Key, torch.Tensor]:
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
    return {("output", str(place)): _copied(t) for place, t in enumerate(leaves)}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _dropped(tensor: torch.Tensor) -> None:
    """Drops a tensor that autograd would save."""


def _refused(_: None) -> torch.Tensor:
    raise CaptureError(
        "cannot prove the plan: the plain backward pass does not fit in what is free, and in the forward pass alone "
        "nothing is saved for the gradients that the model's own code takes; prove=False plans without the proof"
    )
