"""Outputs of the previous forward pass that the loop still holds while the next forward pass runs.

In `for x, y in loader: out = model(x)`, the variable `out` refers to the previous output until the next forward pass
has returned. Outputs and losses refer to their autograd graph, the graph to the inputs that require a gradient, and
these to their gradients; a variable for the loss does so until the next loss is known. A plan that reaches its peak
before its backward pass then takes more than the budget.

*Idea*: in the first calls of each signature, weak references to the storages of the previous outputs tell which
are alive. Where the plan has no room for these, the step is planned again with room (`Request.beside_bytes`), as much
as its peak before the backward pass demands.

Known limits: only outputs of the module are seen, not what a loss made of them. Later calls are not looked at, and
their outputs are not remembered. A sharded module is not planned again, because all its processes would have to plan at
the same step, and each may hold something else; a notice tells it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.capture.allocation_tracker import parts_of
from memfit.capture.distributed.fsdp import is_sharded, local
from memfit.capture.state.input_signature import Signature
from memfit.capture.subgraphs import tensors_in
from memfit.capture.training_step import device_of
from memfit.compiler.plan import CompiledPlan
from memfit.ir.graph import Phase
from memfit.ir.instructions import Compute
from memfit.sim.simulator import simulate
from memfit.units import format_bytes

__all__ = ["HeldOutputs"]

log = logging.getLogger(__name__)

_LOOKED_AT = 4
"""Number of calls of a signature in which the outputs of the previous pass are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Tensors of the previous pass that the loop holds.

    Attributes:
        output_bytes: bytes of its outputs, held until the next forward pass ends.
        input_bytes: bytes of its inputs that require a gradient, and of these gradients, held until the next loss.
    """

    output_bytes: int = 0
    input_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return self.output_bytes + self.input_bytes

    def with_most_of(self, other: _Held) -> _Held:
        """The larger of each."""
        return _Held(
            output_bytes=max(self.output_bytes, other.output_bytes),
            input_bytes=max(self.input_bytes, other.input_bytes),
        )

    def missing_bytes(self, plan: CompiledPlan, room_bytes: int = 0) -> int:
        """Bytes that the plan takes above its budget in such a loop, `room_bytes` of which are for what is held."""
        assert plan.planned is not None
        graph, program = plan.planned.graph, plan.program
        held, most = self.nbytes, 0
        for instruction, nbytes in zip(program.instructions, simulate(graph, program).bytes_at, strict=True):
            is_loss = isinstance(instruction, Compute) and graph.ops[instruction.op].phase is Phase.LOSS
            most = max(most, nbytes + (self.input_bytes if is_loss else held))
            if is_loss:
                break
        return most - room_bytes - plan.budget_bytes


@dataclass(slots=True)
class HeldOutputs:
    """Outputs of earlier passes, as far as the loop holds them.

    Attributes:
        held: by signature, the most that was held when such a pass began.
        looked: by signature, the number of calls that were looked at.
        outputs: storages of the previous pass's outputs, with their bytes.
        inputs: storages of its inputs that require a gradient, with their bytes.
    """

    held: dict[Signature, _Held] = field(default_factory=dict)
    looked: Counter[Signature] = field(default_factory=Counter)
    outputs: list[tuple[StorageWeakRef, int]] = field(default_factory=list)
    inputs: list[tuple[StorageWeakRef, int]] = field(default_factory=list)

    def is_looking(self, key: Signature) -> bool:
        """Whether calls of a signature are still looked at."""
        return self.looked[key] < _LOOKED_AT

    def remember(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Remembers the outputs of a pass that has run."""
        known = {_cdata(part) for part in _parts(model, (*model.parameters(), *model.buffers()))}
        given = _parts(model, tensors_in(inputs))
        known |= {_cdata(part) for part in given}
        self.outputs = _weak(part for part in _parts(model, tensors_in(output)) if _cdata(part) not in known)
        self.inputs = _weak(part for part in given if part.requires_grad and part.is_leaf)

    def outgrown(self, key: Signature, model: nn.Module, inputs: Any, plan: CompiledPlan | None) -> bool:
        """Whether the loop holds more than the plan of the pass that is about to run has room for.

        Args:
            key: signature of the pass.
            model: the fitted module.
            inputs: inputs of the pass.
            plan: its present plan, if it has one.
        """
        self.looked[key] += 1
        here = {_cdata(part) for part in _parts(model, tensors_in(inputs))}
        before = self.held.get(key, _Held())
        # The gradient of an input lives as long as the input.
        now = _Held(output_bytes=_alive(self.outputs, here), input_bytes=2 * _alive(self.inputs, here))
        most = before.with_most_of(now)
        if most == before or plan is None:
            return False
        alone = not is_sharded(model)
        if alone:
            self.held[key] = most
        if most.missing_bytes(plan) <= 0:
            return False
        if not alone:
            self.looked[key] = _LOOKED_AT  # it is told once
        log.warning(
            "the loop still holds %s of outputs of the previous forward pass of %s when the next begins (a variable "
            "refers to them): %s; `del` them after backward()",
            format_bytes(most.nbytes),
            type(model).__name__,
            "it is planned again with room for these" if alone else "its steps may take that much above the budget",
        )
        return alone

    def plan(self, key: Signature, planned: Callable[[int], CompiledPlan]) -> CompiledPlan:
        """A plan with room for what the loop holds.

        Args:
            key: signature of the pass.
            planned: plans with the given number of bytes taken in addition to the step.
        """
        held = self.held.get(key)
        plan = planned(0)
        missing_bytes = 0 if held is None else held.missing_bytes(plan)
        if held is None or missing_bytes <= 0:
            return plan
        if missing_bytes < held.nbytes:
            plan = planned(missing_bytes)
            if held.missing_bytes(plan, missing_bytes) <= 0:
                return plan
        return planned(held.nbytes)


def _alive(storages: list[tuple[StorageWeakRef, int]], here: set[int]) -> int:
    """Bytes of the storages that are alive, without those of the present pass."""
    return sum({ref.cdata: nbytes for ref, nbytes in storages if not ref.expired() and ref.cdata not in here}.values())


def _parts(model: nn.Module, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The strided tensors on the module's device that the tensors consist of."""
    device_type = device_of(model).type
    return [part for t in tensors if t.device.type == device_type for part in parts_of(local(t))]


def _cdata(part: torch.Tensor) -> int:
    return int(part.untyped_storage()._cdata)


def _weak(parts: Iterable[torch.Tensor]) -> list[tuple[StorageWeakRef, int]]:
    return [(StorageWeakRef(part.untyped_storage()), int(part.untyped_storage().nbytes())) for part in parts]
