"""Residents: memory that a step finds in place and does not free.

Parameters, their gradients, optimizer state and inputs take memory for the whole step. Each of them is a record of its
own, so that what plans or explains a step can name it; `StepGraph.static_bytes` is their sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from memfit.ir.fields import Bytes, Name

__all__ = ["Resident", "ResidentKind", "bytes_of"]


class ResidentKind(StrEnum):
    """Why memory is there for the whole step."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    GRADIENT = "gradient"
    """A gradient that exists before the step, or that is added up from step to step."""

    OPTIMIZER_STATE = "optimizer state"
    """As from the second step on."""

    LOSS = "loss"
    """Tensors that the loss keeps from one step to the next."""

    PLAIN_CODE = "plain code"
    """Tensors that code between graphs holds, and gradients of parameters that only this code uses."""

    LIBRARY = "library"
    """Workspaces that libraries allocate once."""

    TRANSFER_BUFFER = "transfer buffer"
    """Device memory in which transfers to and from a tier are staged."""

    OTHER = "other"
    """Memory beside the step: other training steps of a loop, messages of a pipeline."""


class Resident(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One block of memory that is there for the whole step.

    Attributes:
        name: for a tensor of the module its name there, for optimizer state the name of its parameter.
        nbytes: its size; memory that two tensors share is counted with the first.
        kind: why it is there.
    """

    name: Name
    nbytes: Bytes
    kind: ResidentKind


def bytes_of(residents: Iterable[Resident], *kinds: ResidentKind) -> int:
    """The bytes of all residents of some kinds."""
    return sum(resident.nbytes for resident in residents if resident.kind in kinds)
