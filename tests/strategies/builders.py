"""Small steps built by hand: what a capture gives for plain chains, residual streams and long skips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.ir.graph import Op, Phase, StepGraph, Storage, StorageKind
from tests.residents import residents

__all__ = ["Layer", "chain", "mirrored", "residual", "unet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A forward op with one result.

    Attributes:
        name: of the op and of its result.
        reads: names of layers; none for the input of the step.
        nbytes: of the result.
        seconds: forward and backward.
        saves_out: whether its backward op reads the result instead of the operands.
        module: which module calls it.
        target: what is called.
    """

    name: str
    reads: tuple[str, ...]
    nbytes: int = 8
    seconds: float = 1.0
    saves_out: bool = False
    module: str = ""
    target: str = "aten.mm.default"


def mirrored(layers: Sequence[Layer], *, static_bytes: int = 0, gradient_bytes: int = 0) -> StepGraph:
    """A step with one backward op for each layer, in reverse, and sums where a result is read several times."""
    storages: list[Storage] = [Storage(name="input", nbytes=static_bytes, kind=StorageKind.STATIC)]
    index: dict[str, int] = {}
    ops: list[Op] = []

    def storage(name: str, nbytes: int, kind: StorageKind) -> int:
        storages.append(Storage(name=name, nbytes=nbytes, kind=kind))
        return len(storages) - 1

    for layer in layers:
        index[layer.name] = storage(layer.name, layer.nbytes, StorageKind.FORWARD)
        reads = tuple(index[name] for name in layer.reads) or (0,)
        ops.append(
            Op(
                name=layer.name,
                target=layer.target,
                module=layer.module,
                phase=Phase.FORWARD,
                reads=reads,
                writes=(index[layer.name],),
                in_place_over=reads[:1] if layer.saves_out and storages[reads[0]].nbytes == layer.nbytes else (),
                seconds=layer.seconds,
            )
        )
    last = layers[-1]
    tangent = storage("tangent", last.nbytes, StorageKind.TANGENT)
    ops.append(Op(name="loss", target="loss", phase=Phase.LOSS, reads=(index[last.name],), writes=(tangent,)))
    gradient = {last.name: tangent}
    for layer in reversed(layers):
        arriving = gradient[layer.name]
        saved = (index[layer.name],) if layer.saves_out else tuple(index[name] for name in layer.reads)
        writes = [storage(f"d_{name}", storages[index[name]].nbytes, StorageKind.BACKWARD) for name in layer.reads]
        produced = [storage(f"w_{layer.name}", gradient_bytes, StorageKind.GRADIENT)] if gradient_bytes else []
        ops.append(
            Op(
                name=f"{layer.name}_backward",
                target=f"{layer.target}_backward",
                module=layer.module,
                phase=Phase.BACKWARD,
                reads=(arriving, *saved),
                writes=(*writes, *produced),
                seconds=2 * layer.seconds,
            )
        )
        for name, new in zip(layer.reads, writes, strict=True):
            if name in gradient:
                total = storage(f"sum_{name}_{layer.name}", storages[new].nbytes, StorageKind.BACKWARD)
                ops.append(
                    Op(
                        name=f"add_{name}_{layer.name}",
                        target="aten.add.Tensor",
                        phase=Phase.BACKWARD,
                        reads=(gradient[name], new),
                        writes=(total,),
                        in_place_over=(gradient[name],),
                    )
                )
                new = total
            gradient[name] = new
    return StepGraph(
        ops=tuple(ops),
        storages=tuple(storages),
        outputs=(index[last.name],),
        residents=residents(static_bytes),
        label="hand",
    )


def chain(sizes: Sequence[int], seconds: Sequence[float] | None = None) -> StepGraph:
    """One layer after the other."""
    times = seconds or [1.0] * len(sizes)
    names = [f"l{i}" for i in range(len(sizes))]
    return mirrored(
        [
            Layer(
                name=name, reads=(names[i - 1],) if i else (), nbytes=sizes[i], seconds=times[i], module=f"layers.{i}"
            )
            for i, name in enumerate(names)
        ]
    )


def residual(units: int, *, wide: int = 64, narrow: int = 16) -> StepGraph:
    """A stem, and units of narrow, normalise, wide, add, rectify."""
    layers = [Layer(name="stem", reads=(), nbytes=wide, module="stem")]
    skip = "stem"
    for u in range(units):
        module = f"layer.{u}"
        names = [f"u{u}_{part}" for part in ("narrow", "norm", "wide", "add", "relu")]
        layers += [
            Layer(name=names[0], reads=(skip,), nbytes=narrow, seconds=4.0, module=module),
            Layer(name=names[1], reads=(names[0],), nbytes=narrow, seconds=0.5, module=module, target="aten.norm"),
            Layer(name=names[2], reads=(names[1],), nbytes=wide, seconds=4.0, module=module),
            Layer(name=names[3], reads=(names[2], skip), nbytes=wide, seconds=1.0, module=module, target="aten.add"),
            Layer(
                name=names[4],
                reads=(names[3],),
                nbytes=wide,
                seconds=0.5,
                saves_out=True,
                module=module,
                target="aten.relu",
            ),
        ]
        skip = names[4]
    return mirrored(layers)


def unet(depth: int, *, wide: int = 64, layers_each: int = 3) -> StepGraph:
    """Down, down, … up, up, with a skip across each level; every level is half as wide."""
    layers: list[Layer] = []
    below = ""

    def level_of(name: str, level: int, *others: str) -> None:
        nonlocal below
        for number in range(layers_each):
            reads = (below, *others) if not number else (below,)
            below = f"{name}{level}_{number}"
            layers.append(Layer(name=below, reads=tuple(r for r in reads if r), nbytes=wide >> level))

    for level in range(depth):
        level_of("down", level)
    for level in reversed(range(depth - 1)):
        level_of("up", level, f"down{level}_{layers_each - 1}")
    return mirrored(layers)
