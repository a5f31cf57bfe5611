"""The dynamic program over the chain: least time to run blocks `s` to `t` forward and backward in `m` bytes.

    C(s, t, m) = min of
        an option of blocks s to e:   forward keeping it, C(e + 1, t, m - kept), backward
        a checkpoint before block c:  forward from s to c, C(c, t, m - boundary of c), C(s, c - 1, m)

The boundary before `s` is paid for outside, and `m` is what is left of the whole budget, so that a peak is compared
with the memory the step uses at that place anyway (static bytes, outputs, gradients). Segments that end before the
last block run a second time: their forward ops that nobody needs are left out.

Idea: Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019): the optimal persistent schedule, several
recomputations of one op allowed. New here: options of several blocks at once, carried storages paid once.

Known limits: bytes are rounded to slots, so whoever uses an order asks the simulator; a boundary is held until the
segment after it is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memfit.planner.chain import Chain
from memfit.step.graph import Phase, StepGraph, StorageKind
from memfit.step.program import Action, plain_order, program_of
from memfit.strategies.rotor.options import Backward, Option, options_of
from memfit.strategies.rotor.shape import Shape, profile, shape_of

__all__ = ["Table", "fill"]

_Cells = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One way to run blocks `start` to `stop`: an option and one of its backward passes."""

    stop: int
    option: Option
    backward: Backward
    seconds: float
    seconds_again: float
    need: int
    need_again: int
    kept: int


class Table:
    """C(s, t, m) for all s, t, m; and the order behind each cell."""

    def __init__(self, graph: StepGraph, chain: Chain, slot: int, slots: int, width: int, narrow: float) -> None:
        self.graph, self.chain, self.slot, self.slots = graph, chain, slot, slots
        self.count = len(chain.blocks)
        self.lasts = [-1] * len(graph.storages)
        for index, op in enumerate(graph.ops):
            for s in op.reads:
                self.lasts[s] = index
        for s in graph.held_to_the_end():
            self.lasts[s] = len(graph.ops)
        self.forward_base, self.backward_base = self._bases()
        self.shapes = {
            (s, e): shape_of(graph, chain, self.lasts, s, e)
            for s in range(self.count)
            for e in range(s + 1, min(self.count, s + width) + 1)
        }
        self.ways: list[list[_Way]] = []
        for s in range(self.count):
            ways = []
            for e in range(s + 1, min(self.count, s + width) + 1):
                shape = self.shapes[s, e]
                base = self.backward_base[e]
                arriving = sum(shape.sizes[x] for x in shape.arriving)
                floor = max(0, int(narrow) - base)
                for option in options_of(shape, floor):
                    ways.extend(self._ways(s, e, shape, option))
            self.ways.append(ways)
        self.checkpoint_bytes = self._checkpoint_bytes()
        self.pass_seconds, self.pass_peak = self._passes()
        self.cells = self._fill()

    def _bases(self):
        graph, pinned = self.graph, self.chain.pinned
        sizes = [s.nbytes for s in graph.storages]
        counted = [
            s.kind in (StorageKind.TANGENT, StorageKind.BACKWARD, StorageKind.GRADIENT) or i in pinned
            for i, s in enumerate(graph.storages)
        ]
        before = []
        live = graph.static_bytes
        for instruction in program_of(graph, plain_order(graph)).instructions:
            index = instruction.index
            if instruction.action is Action.FREE:
                live -= sizes[index] if counted[index] else 0
                continue
            before.append(live)
            op = graph.ops[index]
            live += sum(sizes[s] for s in op.writes if counted[s])
            if instruction.in_place and counted[op.in_place_over]:
                live -= sizes[op.in_place_over]
        before.append(live)
        blocks = self.chain.blocks
        # forward base of block i in the first pass: at its end
        forward = [before[b.last + 1] for b in blocks]
        # backward base at the start of backward of range ending at e (exclusive)
        backward = [before[0]] + [before[blocks[e - 1].backward_first] for e in range(1, len(blocks) + 1)]
        return forward, backward

    def _ways(self, s, e, shape: Shape, option: Option):
        wanted = option.kept.union(shape.out)
        forward = range(shape.forward)
        seconds = sum(shape.ops[i].seconds for i in forward)
        again = sum(shape.ops[i].seconds for i in option.again)
        rel = max(profile(shape, forward, wanted)[0], default=0)
        rel_again = max(profile(shape, option.again, wanted)[0], default=0)
        arriving = sum(shape.sizes[x] for x in shape.arriving)
        base = self.backward_base[e] - arriving
        first = max(self.forward_base[s:e]) + rel
        if e == self.count: first = max(first, 0)
        for backward in option.backwards:
            down = base + backward.peak
            yield _Way(stop=e, option=option, backward=backward, seconds=seconds + backward.seconds, seconds_again=again + backward.seconds,
                       need=max(first, down), need_again=max(down, 0), kept=option.nbytes)

    def _checkpoint_bytes(self):
        n = self.count
        sets = [frozenset(b.boundary) for b in self.chain.blocks]
        size = [st.nbytes for st in self.graph.storages]
        return {(s, c): sum(size[x] for x in sets[c] - sets[s]) for s in range(n) for c in range(s + 1, n)}

    def _passes(self):
        """Seconds to run block i forward only (first, again) and peak of block i in pass from s."""
        n = self.count
        graph, chain = self.graph, self.chain
        size = [st.nbytes for st in graph.storages]
        seconds, peak = [], {}
        from memfit.strategies.rotor.shape import cone
        cache = {}
        for i in range(n):
            shape = self.shapes[i, i + 1]
            again = cone(shape, shape.out, shape.given)
            seconds.append((sum(op.seconds for op in shape.ops[: shape.forward]), sum(shape.ops[k].seconds for k in again)))
            boundary = chain.blocks[i].boundary
            after = set(chain.boundary_after(i))
            for s in range(i + 1):
                outer = set(chain.blocks[s].boundary)
                counted = [k for k, x in enumerate(boundary) if x not in outer]
                import dataclasses
                sz = list(shape.sizes)
                for k in counted: sz[k] = size[boundary[k]]
                key=(shape,tuple(sz))
                if key not in cache:
                    sh = dataclasses.replace(shape, sizes=tuple(sz))
                    wanted = [*shape.out, *(k for k, x in enumerate(boundary) if x in after)]
                    cache[key]=tuple(max(max(profile(sh, seq, wanted)[0], default=0), sum(sz[k] for k in range(len(boundary)))) for seq in (range(shape.forward), again))
                peak[s, i] = cache[key]
        return seconds, peak

    def _slots(self, n):
        return -(-n // self.slot)

    def _fill(self):
        n, M = self.count, self.slots
        C = np.full((n + 1, n, M), np.inf)
        self.cells = C
        for t in range(n):
            for s in range(t, -1, -1):
                rows, _ = self._rows(C, s, t)
                if rows is not None:
                    C[s, t] = rows.min(axis=0)
        return C

    def _rows(self, C, s, t):
        M = self.slots
        m = np.arange(M)
        first = t == self.count - 1
        rows, what = [], []
        bases, shifts, costs, needs = [], [], [], []
        # ways
        for way in self.ways[s]:
            if way.stop > t + 1: continue
            cost = way.seconds if first else way.seconds_again
            if first: need = way.need
            elif way.stop == t + 1:
                seq, rel, secs = self._end(s, way)
                cost = secs
                need = self.backward_base[t + 1] + rel
            else:
                # forward again happens while backward is at t+1
                need = max(way.need_again, self.backward_base[t + 1] + self._again_peak(s, way))
            if way.stop == t + 1:
                row = np.full(M, float(cost)); row[: self._slots(need)] = np.inf
            else:
                row = np.full(M, np.inf)
                k = int(round(way.kept / self.slot))
                if k < M:
                    row[k:] = C[way.stop, t, : M - k] + cost
                    row[: self._slots(need)] = np.inf
            rows.append(row); what.append(way)
        # checkpoints
        need = 0; cost = 0.0
        for c in range(s + 1, t + 1):
            i = c - 1
            base = self.forward_base[i] if first else self.backward_base[t + 1]
            need = max(need, base + self.pass_peak[s, i][0 if first else 1])
            cost += self.pass_seconds[i][0 if first else 1]
            k = int(round(self.checkpoint_bytes[s, c] / self.slot))
            if k >= M: continue
            row = np.full(M, np.inf)
            row[k:] = C[c, t, : M - k] + C[s, c - 1, k:] + cost
            row[: self._slots(need)] = np.inf
            rows.append(row); what.append(c)
        return (np.stack(rows) if rows else None), what

    def _again_peak(self, s, way):
        key = (s, way.stop, way.option.kept)
        cache = self.__dict__.setdefault("_ap", {})
        if key not in cache:
            shape = self.shapes[s, way.stop]
            cache[key] = max(profile(shape, way.option.again, way.option.kept.union(shape.out))[0], default=0)
        return cache[key]

    def _end(self, s, way):
        cache = self.__dict__.setdefault("_ep", {})
        key = (s, way.stop, way.option.kept, way.backward)
        if key not in cache:
            from memfit.strategies.rotor.shape import cone
            shape = self.shapes[s, way.stop]
            seq = (*cone(shape, way.option.kept, shape.given), *way.backward.sequence)
            rel = max(profile(shape, seq, shape.leaving)[0], default=0) - sum(shape.sizes[x] for x in shape.arriving)
            cache[key] = seq, rel, sum(shape.ops[i].seconds for i in seq if i < shape.forward)
        return cache[key]

    def order(self, m):
        out = []
        self._walk(0, self.count - 1, m, out)
        return out

    def _walk(self, s, t, m, out):
        rows, what = self._rows(self.cells, s, t)
        j = int(rows[:, m].argmin())
        assert np.isfinite(rows[j, m]), (s, t, m)
        first = t == self.count - 1
        w = what[j]
        blocks = self.chain.blocks
        from memfit.strategies.rotor.shape import cone
        if isinstance(w, int):
            for i in range(s, w):
                shape = self.shapes[i, i + 1]
                seq = range(shape.forward) if first else cone(shape, shape.out, shape.given)
                out.extend(blocks[i].first + k for k in seq)
            self._walk(w, t, m - int(round(self.checkpoint_bytes[s, w] / self.slot)), out)
            self._walk(s, w - 1, m, out)
            return
        shape = self.shapes[s, w.stop]
        fwd, back = blocks[s].first, blocks[w.stop - 1].backward_first
        if not first and w.stop == t + 1:
            out.extend(fwd + k if k < shape.forward else back + k - shape.forward for k in self._end(s, w)[0])
            return
        seq = range(shape.forward) if first else w.option.again
        out.extend(fwd + k for k in seq)
        if w.stop <= t:
            self._walk(w.stop, t, m - int(round(w.kept / self.slot)), out)
        out.extend(fwd + k if k < shape.forward else back + k - shape.forward for k in w.backward.sequence)
