"""The reading of a joint graph: ops, storages, and which nodes share storages (see `memfit.passes.read_joint`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.layout import owns_memory
from memfit.fxir.marks import is_tangent
from memfit.ir.graph import Phase, StorageKind
from memfit.ir.slicing import BySlices

__all__ = ["JointOp", "JointReading", "JointStorage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JointStorage:
    """A storage of the joint graph; `base` is the node whose result the storage holds."""

    base: fx.Node
    nbytes: int
    kind: StorageKind


@dataclass(frozen=True, slots=True, kw_only=True)
class JointOp:
    """A node that computes, and the call that recomputes it if that is another call (`memfit.fxir.call`)."""

    node: fx.Node
    phase: Phase
    module: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    in_place_over: tuple[int, ...] = ()
    in_place_argument: int | None = None
    random: bool = False
    recomputable: bool = False
    recompute_as: Call | None = None
    recompute_reads: tuple[int, ...] = ()
    by_slices: BySlices | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JointReading:
    """The reading of a joint graph.

    Attributes:
        module: the graph module, rewritten (see `memfit.passes.conv_backward_split`).
        num_forward_outputs: number of outputs that belong to the forward pass.
        ops: ops in the order of the graph, forward ops first.
        storages: all storages; ops refer to them by index.
        storage_of: the storage of each node that yields a tensor.
        output_storages: storages of the forward outputs, one entry per tensor output.
        gradient_storages: storages of the gradients, one entry per gradient.
        gradient_of_input: for each input the storage of its gradient, None without one.
        separated: keys of weight gradients that are computed part by part (`memfit.passes.concat_weight_gradients`).
        separable: nodes of weight gradients that could be computed part by part.
        grid: numbers of tiles into which samples may be cut; empty if the graph was not read for the lever `tile`.
        accumulated: storages of gradients that are added to existing gradients when they are made, and not returned.
        as_made: whether ops that can add their result to these gradients directly do so (`memfit.ops.accumulation`).
        added_as_made: storages of `accumulated` that never exist, because ops add their results directly.
    """

    module: fx.GraphModule
    num_forward_outputs: int
    ops: tuple[JointOp, ...]
    storages: tuple[JointStorage, ...]
    storage_of: dict[fx.Node, int]
    output_storages: tuple[int, ...]
    gradient_storages: tuple[int, ...]
    gradient_of_input: tuple[int | None, ...] = ()
    separated: frozenset[str] = frozenset()
    separable: tuple[fx.Node, ...] = ()
    grid: tuple[int, ...] = ()
    accumulated: frozenset[int] = frozenset()
    as_made: bool = False
    added_as_made: frozenset[int] = frozenset()

    def primals(self) -> list[fx.Node]:
        """The inputs of the forward pass, parameters included."""
        return [node for node in self.module.graph.find_nodes(op="placeholder") if not is_tangent(node)]

    def is_reusable(self, storage: int) -> bool:
        """Whether another storage may take the memory of this one after its last read."""
        found = self.storages[storage]
        ours = storage not in self.output_storages and storage not in self.gradient_storages
        return ours and found.kind in (StorageKind.FORWARD, StorageKind.BACKWARD) and owns_memory(found.base)
