"""The step graph: one training step as frozen data, without torch.

A step is forward, loss and backward. It is a list of **ops** in the order in which the baseline step runs them, and a
list of **storages** that the ops read and write. A storage is the memory of one or more aliasing tensors, so that views
cost nothing and freeing is exact. All code that plans, judges or explains works on this graph; only `memfit.capture`
knows how it was obtained and only `memfit.runtime` how it is run.

Known limits: the order of the ops is the order of the capture (recomputed ops are inserted into it, nothing
else is reordered), and a storage has one size from birth to death.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct, structs

from memfit.ir.fields import MOST_ITEMS, Bytes, Count, Index, Indices, Name, Seconds, Words
from memfit.ir.residents import Resident, ResidentKind
from memfit.ir.slicing import BySlices
from memfit.ir.tiers import Tier, TierLinks

__all__ = [
    "Baseline",
    "Op",
    "Phase",
    "StepGraph",
    "Storage",
    "StorageKind",
    "Stream",
    "Variant",
]


class Phase(StrEnum):
    """Where in the step an op runs."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


class StorageKind(StrEnum):
    """Who owns a storage, which decides when it may be freed."""

    STATIC = "static"
    """Parameters, buffers, inputs, constants: they exist before the step, are never freed by it, and are counted in
    `StepGraph.residents`."""

    FORWARD = "forward"
    """Written by a forward op."""

    TANGENT = "tangent"
    """The gradient of an output, written by the loss op."""

    BACKWARD = "backward"
    """Written by a backward op and gone before the step ends."""

    GRADIENT = "gradient"
    """Written by a backward op and handed to the caller, live until the end of the step."""


class Stream(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a tier-resident storage moves, slice by slice; see `memfit.ir.streaming`.

    Attributes:
        nbytes: its size on the tier.
        out_seconds: time for which the link is busy with the whole storage on the way out.
        into_seconds: the same on the way back.
        out_compute_seconds: time that the way out takes from compute.
        into_compute_seconds: time that the way back takes from compute.
    """

    nbytes: Bytes
    out_seconds: Seconds
    into_seconds: Seconds
    out_compute_seconds: Seconds = 0.0
    into_compute_seconds: Seconds = 0.0


class Storage(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One block of memory.

    Attributes:
        name: unique within the graph.
        nbytes: its size.
        kind: who owns it.
        reusable: whether a result may be put together from slices in its memory once nothing reads it any more.
        stream: how it moves if it is tier-resident, and so takes no memory; only `memfit.ir.streaming` sets this, and
            a step that is read from elsewhere has none.
    """

    name: Name
    nbytes: Bytes
    kind: StorageKind
    reusable: bool = False
    stream: Stream | None = None

    @property
    def whole_bytes(self) -> int:
        """Its size, in memory or on a tier."""
        return self.nbytes if self.stream is None else self.stream.nbytes


class Variant(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One way in which an op can run, with the same bits: whole, or in chunks one after the other.

    Attributes:
        chunks: 1 for whole.
        seconds: profiled time of one run.
        workspace_bytes: memory taken beyond operands and results.
    """

    chunks: Count
    seconds: Seconds
    workspace_bytes: Bytes


class Op(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One call that computes something. Views are not ops.

    Attributes:
        name: unique within the graph.
        target: name of the called function, such as `aten.convolution.default`.
        module: qualified name of the module that called it, `""` where unknown.
        phase: forward, loss or backward.
        subgraph: number of the captured graph it belongs to; graph breaks separate subgraphs.
        reads: storages read, without repetition.
        writes: storages created.
        in_place_over: operands whose memory the first result may take over, where the op is their last reader, the
            preferred one first; all have the same size.
        seconds: profiled time of one run, in the variant chosen for it, with results in memory of their own.
        in_place_seconds: profiled time of a run over one of the storages in `in_place_over`, if that differs.
        workspace_bytes: memory the kernel takes beyond operands and results, in the chosen variant.
        chunks: number of chunks of the chosen variant; 1 for whole.
        variants: every variant, the chosen one included; empty if whole is the only one.
        random_state_bytes: bytes of generator state to save for recomputing it; 0 if not random.
        recomputable: whether recomputing it gives the same bits and has no side effect.
        recompute_as: the op that runs in its place after the first run, if that is another call: it writes some of
            `writes` and may read others of them, which then live on from the first run.
        by_slices: how it runs a few samples at a time, if it can.
        half_of: name of a call that makes the results of this op and of the other op with the same `half_of` at once,
            `""` if there is none.
        estimated_seconds: the time of a recomputation as planners estimate it, where a planner has set it.
    """

    name: Name
    target: Name
    module: Name = ""
    phase: Phase
    subgraph: Index = 0
    reads: Indices
    writes: Indices
    in_place_over: Indices = ()
    seconds: Seconds = 0.0
    in_place_seconds: Seconds | None = None
    workspace_bytes: Bytes = 0
    chunks: Count = 1
    variants: Annotated[tuple[Variant, ...], Meta(max_length=1_000)] = ()
    random_state_bytes: Bytes = 0
    recomputable: bool = True
    recompute_as: Op | None = None
    by_slices: BySlices | None = None
    half_of: Name = ""
    estimated_seconds: Seconds | None = None

    @property
    def is_hook(self) -> bool:
        """Whether the module's own hooks run it, between subgraphs; then a program states only its memory and place."""
        return self.target.startswith("hook.")

    @property
    def later(self) -> Op:
        """The op as it runs when it is recomputed."""
        return self.recompute_as or self

    @property
    def whole_variant(self) -> Variant:
        """The variant that runs whole; the only one if there is no such variant."""
        return self.variant(1) if self.variants else self.variant(self.chunks)

    def whole(self) -> Op:
        """The op with one way to run: whole, in new memory, the same each time."""
        variant = self.whole_variant
        return structs.replace(
            self,
            recompute_as=None,
            in_place_over=(),
            seconds=variant.seconds,
            in_place_seconds=None,
            workspace_bytes=variant.workspace_bytes,
            chunks=variant.chunks,
            variants=(),
            by_slices=None,
        )

    @property
    def least_seconds(self) -> float:
        """Time of one run in the quickest variant, with results in memory of their own."""
        return min((variant.seconds for variant in self.variants), default=self.seconds)

    @property
    def least_seconds_in_place(self) -> float:
        """Time of one run in the quickest variant, in place or not."""
        return self.least_seconds if self.in_place_seconds is None else min(self.least_seconds, self.in_place_seconds)

    @property
    def recompute_seconds(self) -> float:
        """Seconds that a planner assumes for one recomputation."""
        return self.later.seconds if self.estimated_seconds is None else self.estimated_seconds

    def run_seconds(self, chunks: int, *, in_place: bool) -> float:
        """Time of one run in a number of chunks, over an operand or not.

        Raises:
            KeyError: if it does not run in that number of chunks.
        """
        if in_place and self.in_place_seconds is not None:
            return self.in_place_seconds
        return self.seconds if chunks == self.chunks else self.variant(chunks).seconds

    def run_workspace_bytes(self, chunks: int) -> int:
        """Workspace of one run in a number of chunks.

        Raises:
            KeyError: if it does not run in that number of chunks.
        """
        return self.workspace_bytes if chunks == self.chunks else self.variant(chunks).workspace_bytes

    def variant(self, chunks: int) -> Variant:
        """Time and workspace of a run in a number of chunks.

        Raises:
            KeyError: if it does not run in that number of chunks.
        """
        if chunks == self.chunks:
            return Variant(chunks=chunks, seconds=self.seconds, workspace_bytes=self.workspace_bytes)
        for variant in self.variants:
            if variant.chunks == chunks:
                return variant
        raise KeyError(f"{self.name} does not run in {chunks} chunks")


class Baseline(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Ops and storages of the step without memfit, as they were traced; the planned step has others.

    Attributes:
        ops: run whole, in new memory, once.
        storages: the storages that these ops read and write.
        outputs: the storages that the caller holds (see `StepGraph.outputs`).
    """

    ops: Annotated[tuple[Op, ...], MOST_ITEMS]
    storages: Annotated[tuple[Storage, ...], MOST_ITEMS]
    outputs: Indices = ()


class StepGraph(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A training step.

    Attributes:
        ops: forward ops, then exactly one loss op, then backward ops.
        storages: the storages that `Op.reads` and `Op.writes` index.
        outputs: storages the forward pass hands to the caller; the caller is assumed to hold them until the
            step ends.
        residents: memory that is there for the whole step: parameters, buffers, inputs, optimizer state and others.
        after_step_bytes: transient memory of `optimizer.step()` on top of static bytes and gradients.
        after_step_seconds: time of `optimizer.step()`.
        label: name of the captured step, for people.
        tiers: the tiers to which storages may be swapped, the first choice first; empty if there is none.
        baseline: the step without memfit; None if its ops and storages are these, run whole.
    """

    ops: Annotated[tuple[Op, ...], MOST_ITEMS]
    storages: Annotated[tuple[Storage, ...], MOST_ITEMS]
    outputs: Indices = ()
    residents: Annotated[tuple[Resident, ...], MOST_ITEMS] = ()
    after_step_bytes: Bytes = 0
    after_step_seconds: Seconds = 0.0
    label: Words = ""
    tiers: Annotated[tuple[TierLinks, ...], Meta(max_length=len(Tier))] = ()
    baseline: Baseline | None = None

    @property
    def static_bytes(self) -> int:
        """Bytes that are in memory for the whole step."""
        return sum(resident.nbytes for resident in self.residents)

    def beside(self, name: str, nbytes: int, kind: ResidentKind) -> StepGraph:
        """The same step with more memory taken for all of it."""
        if not nbytes:
            return self
        return structs.replace(self, residents=(*self.residents, Resident(name=name, nbytes=nbytes, kind=kind)))

    @property
    def loss_index(self) -> int:
        """Index of the loss op: forward ops come before it, backward ops after it."""
        return next(index for index, op in enumerate(self.ops) if op.phase is Phase.LOSS)

    @property
    def is_tiled(self) -> bool:
        """Whether first runs can run slice by slice."""
        return any(op.by_slices is not None and op.by_slices.first for op in self.ops)

    def read_whole_backward(self) -> frozenset[int]:
        """Storages that the backward pass cannot read slice by slice."""
        backward = [op for op in self.ops if op.phase is Phase.BACKWARD]
        return frozenset(s for op in backward for s in op.reads if s not in _read_in_slices(op))

    @property
    def seconds(self) -> float:
        """Least time with nothing recomputed: each op once, in its quickest variant, over operands that die at it."""
        return sum(self.first_seconds()) + self.after_step_seconds

    def first_seconds(self) -> list[float]:
        """For each op the least time of its first run with nothing recomputed."""
        last_reader = self.last_readers()
        held = self.held_to_the_end()

        def least(index: int, op: Op) -> float:
            over = any(last_reader[s] == index and s not in held for s in op.in_place_over)
            seconds = op.least_seconds_in_place if over else op.least_seconds
            slices = op.by_slices
            return min(seconds, slices.seconds) if slices is not None and slices.first else seconds

        return [least(index, op) for index, op in enumerate(self.ops)]

    @property
    def plain_seconds(self) -> float:
        """Time of the step without memfit: each op once, whole."""
        if self.baseline is None:
            return sum(op.whole_variant.seconds for op in self.ops) + self.after_step_seconds
        return sum(op.seconds for op in self.baseline.ops) + self.after_step_seconds

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients the step leaves behind."""
        return sum(s.nbytes for s in self.storages if s.kind is StorageKind.GRADIENT)

    def buffer_bytes(self, used: Collection[Tier]) -> int:
        """Device memory that transfers to and from the used tiers take while a step is in flight."""
        return sum(links.buffer_bytes for links in self.tiers if links.tier in used)

    def without_memfit(self) -> StepGraph:
        """The step as eager autograd runs it: ops whole, not in place, with its operands and sizes."""
        found = self.baseline
        if found is None:
            return structs.replace(self, ops=tuple(op.whole() for op in self.ops))
        return structs.replace(self, ops=found.ops, storages=found.storages, outputs=found.outputs, baseline=None)

    def as_baseline(self) -> Baseline:
        """The step without memfit, which stays the same when a lever changes this step."""
        found = self.without_memfit()
        return Baseline(ops=found.ops, storages=found.storages, outputs=found.outputs)

    def producers(self) -> list[int]:
        """For each storage the op that writes it, -1 for static storages."""
        producer = [-1] * len(self.storages)
        for index, op in enumerate(self.ops):
            for storage in op.writes:
                producer[storage] = index
        return producer

    def last_readers(self) -> list[int]:
        """For each storage the last op that reads it, -1 if none does."""
        last = [-1] * len(self.storages)
        for index, op in enumerate(self.ops):
            for storage in op.reads:
                last[storage] = index
        return last

    def is_free(self, storage: int) -> bool:
        """Whether the storage takes no memory of the step's own (static storages are counted once, up front)."""
        return self.storages[storage].kind is StorageKind.STATIC

    def lasting(self) -> frozenset[int]:
        """Storages that only the first run of their op makes."""
        return frozenset(s for op in self.ops if op.recompute_as for s in op.writes if s not in op.recompute_as.writes)

    def held_to_the_end(self) -> frozenset[int]:
        """Storages the caller owns once they exist: outputs and gradients."""
        gradients = (i for i, s in enumerate(self.storages) if s.kind is StorageKind.GRADIENT)
        return frozenset((*self.outputs, *gradients))


def _read_in_slices(op: Op) -> tuple[int, ...]:
    return op.by_slices.reads if op.by_slices is not None and op.by_slices.first else ()


def total_bytes(graph: StepGraph, storages: Sequence[int]) -> int:
    """Sum of the sizes of distinct storages."""
    return sum(graph.storages[s].nbytes for s in set(storages))
