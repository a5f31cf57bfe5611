"""Ops of FSDP's hooks around the subgraphs of a step; no program moves these ops, and memfit does not run them.

The storages that these ops write are the memory of the hooks: a buffer into which shards are gathered (in the forward
pass it stays until the next unit's buffer exists), the parameters copied out of this buffer, the next unit's buffer
(prefetched in the backward pass), a buffer from which gradients are reduced, and the shards of the gradients. These are
the defaults of PyTorch's `_fsdp_param_group.py`.

Known limits: time in collectives is not predicted. A unit that runs twice in a step counts as gathered in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from memfit.capture.distributed.fsdp import Gathered
from memfit.ir.graph import Op, Phase, Storage, StorageKind

__all__ = ["Communication", "communication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Ops and storages of the hooks around the subgraphs of a step.

    Attributes:
        storages: storages that its ops write, numbered after the step's own storages.
        before_forward: for each subgraph, the ops before its forward pass.
        after_forward: for each subgraph, the ops after its forward pass.
        before_backward: for each subgraph, the ops before its backward pass.
        after_backward: for each subgraph, the ops after its backward pass.
    """

    storages: tuple[Storage, ...]
    before_forward: tuple[tuple[Op, ...], ...]
    after_forward: tuple[tuple[Op, ...], ...]
    before_backward: tuple[tuple[Op, ...], ...]
    after_backward: tuple[tuple[Op, ...], ...]


def communication(
    gathered: Sequence[tuple[Gathered, ...]],
    staying: Sequence[Gathered],
    gradients: Mapping[str, Sequence[int]],
    first: int,
    *,
    copies: bool,
) -> Communication:
    """Makes the ops and storages of the hooks of sharded units around the subgraphs of a step.

    Args:
        gathered: for each subgraph the units that are gathered while it runs, outer ones first.
        staying: the units that are still gathered when the forward pass has ended.
        gradients: for each unit the storages of the whole gradients of its parameters.
        first: number of the first storage made here.
        copies: whether collectives copy the data that they send, as gloo's do.
    """
    made = _Hooks(gathered, staying, first, copies=copies)
    _forward(made)
    _backward(made, gradients)
    return Communication(
        storages=tuple(made.storages),
        before_forward=tuple(map(tuple, made.before_forward)),
        after_forward=tuple(map(tuple, made.after_forward)),
        before_backward=tuple(map(tuple, made.before_backward)),
        after_backward=tuple(map(tuple, made.after_backward)),
    )


class _Hooks:
    """Units, the first and the last subgraph of each unit, and the ops and storages made so far."""

    def __init__(
        self, gathered: Sequence[tuple[Gathered, ...]], staying: Sequence[Gathered], first: int, *, copies: bool
    ) -> None:
        count = len(gathered)
        self.units = {unit.name: unit for units in gathered for unit in units}
        self.of_subgraph = [[unit.name for unit in units] for units in gathered]
        self.stays = {unit.name for unit in staying}
        self.first_subgraph = {n: min(i for i in range(count) if n in self.of_subgraph[i]) for n in self.units}
        self.last_subgraph = {n: max(i for i in range(count) if n in self.of_subgraph[i]) for n in self.units}
        self.copies = copies
        self.number = first
        self.storages: list[Storage] = []
        self.whole: dict[str, int] = {}
        self.before_forward: list[list[Op]] = [[] for _ in range(count)]
        self.after_forward: list[list[Op]] = [[] for _ in range(count)]
        self.before_backward: list[list[Op]] = [[] for _ in range(count)]
        self.after_backward: list[list[Op]] = [[] for _ in range(count)]

    def hold(self, name: str, nbytes: int, kind: StorageKind) -> int:
        """Makes a storage and returns its number."""
        self.storages.append(Storage(name=name, nbytes=nbytes, kind=kind))
        self.number += 1
        return self.number - 1

    def act(
        self,
        where: list[list[Op]],
        subgraph: int,
        what: str,
        name: str,
        *,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        sent_bytes: int = 0,
    ) -> None:
        """Makes an op."""
        backward = where is self.before_backward or where is self.after_backward
        phase = Phase.BACKWARD if backward else Phase.FORWARD
        where[subgraph].append(
            Op(
                name=f"{what} {name} ({phase})",
                target=f"hook.{what}.default",
                module=name,
                phase=phase,
                subgraph=subgraph,
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(writes),
                workspace_bytes=sent_bytes if self.copies else 0,
                recomputable=False,
            )
        )


def _forward(made: _Hooks) -> None:
    buffer: list[int] = []
    for subgraph, names in enumerate(made.of_subgraph):
        for name in names:
            if made.first_subgraph[name] != subgraph:
                continue
            nbytes = made.units[name].nbytes
            taken = made.hold(f"buffer of {name}", nbytes, StorageKind.FORWARD)
            where = made.before_forward
            made.act(where, subgraph, "all-gather", name, reads=buffer, writes=[taken], sent_bytes=nbytes)
            buffer = [taken]
            made.whole[name] = made.hold(f"parameters of {name}", nbytes, StorageKind.FORWARD)
            made.act(where, subgraph, "copy-out", name, reads=buffer, writes=[made.whole[name]])
        for name in names:
            if made.last_subgraph[name] == subgraph and name not in made.stays:
                made.act(made.after_forward, subgraph, "reshard", name, reads=[made.whole[name]])
    if buffer:
        made.act(made.after_forward, len(made.of_subgraph) - 1, "end", "of forward", reads=buffer)


def _backward(made: _Hooks, gradients: Mapping[str, Sequence[int]]) -> None:
    # Inner units end before outer units; the previous unit in this order is prefetched.
    last = made.last_subgraph
    order = sorted(made.units, key=lambda name: (last[name], -made.of_subgraph[last[name]].index(name)))
    ahead: dict[str, int] = {}
    done = set(made.stays)
    reducing: list[int] = []
    for subgraph in reversed(range(len(made.of_subgraph))):
        for name in made.of_subgraph[subgraph]:
            if last[name] != subgraph:
                continue
            if name not in done:
                _copy_out_again(made, name, subgraph, ahead)
                done.add(name)
            place = order.index(name)
            if place and order[place - 1] not in done:
                _gather_again(made, order[place - 1], subgraph, ahead)
        for name in reversed(made.of_subgraph[subgraph]):
            if made.first_subgraph[name] != subgraph:
                continue
            where = made.after_backward
            made.act(where, subgraph, "reshard", name, reads=[*reducing, made.whole[name]])
            reducing = []
            if gradients.get(name):
                nbytes = made.units[name].reduced_bytes
                reducing = [made.hold(f"gradients of {name} to reduce", nbytes, StorageKind.BACKWARD)]
                made.act(where, subgraph, "copy-in", name, reads=gradients[name], writes=reducing)
                shards = made.hold(f"gradients of {name} in shards", made.units[name].shard_bytes, StorageKind.GRADIENT)
                made.act(where, subgraph, "reduce-scatter", name, reads=reducing, writes=[shards], sent_bytes=nbytes)
    if reducing:
        made.act(made.after_backward, 0, "end", "of backward", reads=reducing)


def _gather_again(made: _Hooks, name: str, subgraph: int, ahead: dict[str, int]) -> None:
    """Fills a unit's buffer for the backward pass, where it is not filled yet."""
    if name not in ahead:
        nbytes = made.units[name].nbytes
        ahead[name] = made.hold(f"buffer of {name} again", nbytes, StorageKind.BACKWARD)
        made.act(made.before_backward, subgraph, "all-gather", name, writes=[ahead[name]], sent_bytes=nbytes)


def _copy_out_again(made: _Hooks, name: str, subgraph: int, ahead: dict[str, int]) -> None:
    _gather_again(made, name, subgraph, ahead)
    made.whole[name] = made.hold(f"parameters of {name} again", made.units[name].nbytes, StorageKind.BACKWARD)
    made.act(made.before_backward, subgraph, "copy-out", name, reads=[ahead[name]], writes=[made.whole[name]])
