"""Steps small enough to reason about: chains of equal ops."""

from __future__ import annotations

from msgspec.structs import replace

from memfit.ir.graph import Op, Phase, StepGraph, Storage, StorageKind
from tests.residents import residents

__all__ = ["chain", "stage"]


def chain(length: int, *, nbytes: int = 10, seconds: float = 1.0) -> StepGraph:
    """`length` forward ops in a row; backward op `i` reads what forward op `i` read and made."""
    storages = [Storage(name="x", nbytes=0, kind=StorageKind.STATIC)]
    ops: list[Op] = []
    for i in range(length):
        storages.append(Storage(name=f"a{i}", nbytes=nbytes, kind=StorageKind.FORWARD))
        ops.append(
            Op(
                name=f"f{i}",
                target="f",
                module=f"layers.{i}",
                phase=Phase.FORWARD,
                reads=(i,),
                writes=(i + 1,),
                seconds=seconds,
            )
        )
    storages.append(Storage(name="t", nbytes=nbytes, kind=StorageKind.TANGENT))
    gradient = len(storages) - 1
    ops.append(
        Op(name="loss", target="loss", phase=Phase.LOSS, reads=(length,), writes=(gradient,), recomputable=False)
    )
    for i in reversed(range(length)):
        storages.append(Storage(name=f"g{i}", nbytes=nbytes, kind=StorageKind.BACKWARD))
        reads, writes = (gradient, i, i + 1), (len(storages) - 1,)
        ops.append(Op(name=f"b{i}", target="b", phase=Phase.BACKWARD, reads=reads, writes=writes, seconds=2 * seconds))
        gradient = writes[0]
    return StepGraph(ops=tuple(ops), storages=tuple(storages))


def stage(length: int, *, received_bytes: int = 0) -> StepGraph:
    """A chain whose result is handed over in front of the loss, which reads nothing, as in a pipeline."""
    plain = chain(length)
    loss = plain.loss_index
    handed = Op(name="over", target="over", phase=Phase.FORWARD, reads=(length,), writes=(), recomputable=False)
    ops = (*plain.ops[:loss], handed, replace(plain.ops[loss], reads=()), *plain.ops[loss + 1 :])
    return replace(plain, ops=ops, residents=residents(received_bytes))
