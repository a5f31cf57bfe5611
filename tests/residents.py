"""Memory that is there for a whole step."""

from __future__ import annotations

from memfit.ir.residents import Resident, ResidentKind

__all__ = ["residents"]


def residents(nbytes: int) -> tuple[Resident, ...]:
    """A parameter and a buffer that take so many bytes together."""
    halves = {ResidentKind.PARAMETER: nbytes // 2, ResidentKind.BUFFER: nbytes - nbytes // 2}
    return tuple(Resident(name=kind.value, nbytes=half, kind=kind) for kind, half in halves.items())
