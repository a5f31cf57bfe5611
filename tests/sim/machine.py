"""Executes a program sample by sample on a model of memory, to see that it makes what each op makes alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection

from memfit.ir.graph import StepGraph, StorageKind
from memfit.ir.instructions import Compute, Free, Instruction, SwapIn, SwapOut, TierResident, computes_in
from memfit.ir.program import Program
from memfit.ir.slicing import SMALL_SUM_BYTES
from memfit.sim.simulator import simulate

Block = list[int]
"""Memory: for each sample the storage of which it holds the right value, -1 for a wrong one."""


class Machine:
    """Runs a program on memory that knows which storage's value each sample of a block is."""

    def __init__(self, graph: StepGraph, tier_resident: Collection[int]) -> None:
        self.graph = graph
        self.tier_resident = set(tier_resident)
        self.batch = max((op.later.by_slices.batch for op in graph.ops if op.later.by_slices), default=2)
        self.blocks: dict[int, Block] = {
            s: [s] * self.batch for s, storage in enumerate(graph.storages) if storage.kind is StorageKind.STATIC
        }
        self.static = set(self.blocks)
        self.ran: set[int] = set()
        self.tiers: dict[int, Block] = {}

    def live_bytes(self) -> int:
        storages = self.graph.storages
        elsewhere = self.static | self.tier_resident
        return self.graph.static_bytes + sum(storages[s].nbytes for s in self.blocks if s not in elsewhere)

    def run_alone(self, instruction: Instruction) -> None:
        if isinstance(instruction, TierResident):
            return
        if isinstance(instruction, Free):
            del self.blocks[instruction.storage]
            return
        if isinstance(instruction, SwapOut):
            self.tiers[instruction.storage] = self.blocks[instruction.storage]
            return
        if isinstance(instruction, SwapIn):
            assert instruction.storage not in self.blocks
            self.blocks[instruction.storage] = list(self.tiers[instruction.storage])
            return
        op = self.graph.ops[instruction.op]
        op = op.later if instruction.op in self.ran else op
        self.ran.add(instruction.op)
        assert self.tier_resident.isdisjoint((*op.reads, *op.writes))  # of which there is no whole
        right = all(value == s for s in op.reads for value in self.blocks[s])
        if instruction.over is not None:
            del self.blocks[instruction.over]
        for s in op.writes:
            self.blocks[s] = [s if right else -1] * self.batch

    def run_fused(self, run: tuple[Instruction, ...]) -> list[int]:
        """Runs instructions slice by slice; returns the bytes in use at each, the most over all slices."""
        storages = self.graph.storages
        computes = [i.op for i in run if isinstance(i, Compute)]
        ops = {i: self.graph.ops[i].later if i in self.ran else self.graph.ops[i] for i in computes}
        self.ran.update(computes)
        sums = {s for op in ops.values() if op.by_slices for s in op.by_slices.sums}
        added = {s for op in ops.values() if op.by_slices and op.by_slices.accumulates for s in op.by_slices.sums}
        ends = {i.storage for i in run if isinstance(i, Free)}
        results = {s: [-1] * self.batch for op in ops.values() for s in op.writes if s not in ends}
        for instruction in computes_in(run):
            if instruction.over is not None:
                results[ops[instruction.op].writes[0]] = self.blocks[instruction.over]
        taken = [i.over for i in computes_in(run) if i.over is not None]
        assert self.tier_resident.isdisjoint(taken)
        here_whole = [s for s in results if s not in self.tier_resident]
        whole = self.live_bytes() + sum(storages[s].nbytes for s in here_whole) - sum(storages[s].nbytes for s in taken)
        assert all(storages[s].nbytes <= SMALL_SUM_BYTES for s in sums)
        whole += sum(2 * storages[s].nbytes for s in sums - added)  # totals in twice the precision
        slices = next(op.by_slices for op in ops.values())
        assert slices is not None
        # The slice on its way out; the next one on its way in.
        moving = {s: 1 for s in results if s in self.tier_resident}
        written = {s for op in ops.values() for s in op.writes}
        moving |= {s: 2 for op in ops.values() for s in op.reads if s in self.tier_resident and s not in written}
        of_slice = {s: math.ceil(storages[s].nbytes * slices.samples / slices.batch) for s in moving}
        whole += sum(count * of_slice[s] for s, count in moving.items())
        in_use: dict[int, int] = defaultdict(int)
        for start in range(0, slices.batch, slices.samples):
            here = range(start, min(start + slices.samples, slices.batch))
            made: dict[int, Block] = {}

            def used() -> int:
                slice_share = len(here) / slices.batch  # noqa: B023
                shares = {s: (s not in added) if s in sums else slice_share for s in made}  # noqa: B023
                return whole + sum(math.ceil(storages[s].nbytes * share) for s, share in shares.items())

            for place, instruction in enumerate(run):
                if isinstance(instruction, Free):
                    del made[instruction.storage]
                    in_use[place] = max(in_use[place], used())
                    continue
                op = ops[instruction.op]
                assert op.by_slices is not None
                right = True
                for s in op.reads:
                    if s in made:
                        assert s in op.by_slices.reads and s not in sums
                        right &= made[s] == [s] * len(here)
                    elif s in op.by_slices.reads:
                        right &= [self.blocks[s][k] for k in here] == [s] * len(here)
                    else:
                        right &= self.blocks[s] == [s] * self.batch
                made.update((s, [s if right else -1] * len(here)) for s in op.writes)
                in_use[place] = max(in_use[place], used() + op.by_slices.workspace_bytes)
            for s, part in made.items():
                for k, value in zip(here, part, strict=True):
                    results[s][k] = value  # of a sum, what these samples add to it
        for s in taken:
            del self.blocks[s]
        self.blocks.update(results)
        return [in_use[place] for place in range(len(run))]


def run_on_machine(graph: StepGraph, program: Program) -> None:
    """Asserts that a program makes what the caller gets, and that what runs in slices takes the predicted bytes."""
    buffers = graph.buffer_bytes(program.tiers()) if graph.tiers else 0
    bytes_at = [nbytes - buffers for nbytes in simulate(graph, program).bytes_at]
    machine, position = Machine(graph, program.tier_resident()), 0
    for run in program.runs():
        if isinstance(run[0], Compute) and run[0].sliced:
            assert bytes_at[position : position + len(run)] == machine.run_fused(run)
        else:
            machine.run_alone(run[0])
        position += len(run)
    left = {s: block for s, block in machine.blocks.items() if s not in machine.static}
    assert set(left) == graph.held_to_the_end()
    assert all(value == s for s, block in left.items() for value in block)
