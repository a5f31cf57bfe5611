"""Ops that run again as one, slice of the batch by slice, have the bits of each alone and take what is predicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from torch import fx, nn

import memfit
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile
from memfit.fxir.call import Call
from memfit.ir.fusion import fuse
from memfit.ir.graph import Op, StepGraph, StorageKind
from memfit.ir.instructions import Compute, computes_in
from memfit.ir.program import Program, program_of
from memfit.ir.slicing import BySlices
from memfit.ops.batching.slices import Slice, in_slices
from memfit.planner.finalize.variant_selection import leanest
from memfit.planner.search.min_memory import least_order
from memfit.profiling.slice_benchmark import same_slices
from memfit.sim.simulator import simulate
from memfit.tools.verify import verify


class Block(nn.Module):
    """A residual block with a projection; its sum may be written over what came in."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 4, 1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.skip = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class Branches(nn.Module):
    """Pooling with indices, a concatenation, broadcast operands, and a view in between."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.scale = nn.Parameter(torch.randn(1, 16, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.max_pool2d(x, 3, 1, 1)
        x = torch.cat([self.left(pooled).relu(), nn.functional.hardswish(self.right(x))], dim=1) * self.scale
        return x.view(x.shape[0], 4, -1).neg().view(x.shape) - nn.functional.avg_pool2d(x, 3, 1, 1)


def residual(blocks: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Block(16, 16) for _ in range(blocks)), Block(16, 8, 2))


def branches() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Branches() for _ in range(3)))


def channels_last() -> nn.Module:
    return residual().to(memory_format=torch.channels_last)


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def planned_as_one(graph: StepGraph, program: Program) -> list[str]:
    return [graph.ops[i.op].later.target for run in program.runs() for i in computes_in(run) if i.sliced]


def spares_taken(graph: StepGraph, program: Program) -> int:
    """How many results are put together in memory of what no op of their run reads."""
    return sum(
        i.sliced and i.over is not None and all(i.over not in graph.ops[o.op].later.reads for o in computes)
        for run in program.runs()
        if (computes := computes_in(run))
        for i in computes
    )


@pytest.mark.smoke
@pytest.mark.parametrize(("make", "batch"), [(residual, 2), (branches, 5), (channels_last, 5)])
def test_bits_and_peak_of_all_that_can_run_as_one(
    make: Callable[[], nn.Module], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "memfit.planner.finalize.variant_selection._quickest", lambda graph, run, *_: [fuse(graph, run)[0]]
    )
    monkeypatch.setattr("memfit.planner.finalize.buffer_reuse._is_quicker", lambda *_: True)
    torch.manual_seed(0)
    model, x = make(), torch.randn(batch, 3, 40, 40)
    request = Request(budget="1GiB", loss_fn=loss_fn, strategy="sequential:2", prove=False)
    result = verify(model, (x,), {}, request, loss_fn=loss_fn)
    assert not result.differing
    assert result.peak_bytes == pytest.approx(result.plan.predicted.peak_bytes, rel=0.01)
    assert result.recomputes_executed == result.recomputes_planned
    assert result.plan.planned is not None
    graph = result.plan.planned.graph
    fused = planned_as_one(graph, result.plan.program)
    assert {"aten.cat.default", "aten.max_pool2d_with_indices.default"} <= set(fused) or make is not branches
    assert {"memfit.normalise.default", "aten.relu.default", "aten.add.Tensor"} <= set(fused) or make is branches
    assert "aten.convolution.default" in fused or batch == 2  # of one sample some have other bits
    assert spares_taken(graph, result.plan.program) or make is branches


def test_the_least_budget_is_lower() -> None:
    torch.manual_seed(0)
    model, x = residual(1), torch.randn(8, 3, 40, 40)
    _, graph = capture_and_profile(model, (x,), {}, Request(budget=1, loss_fn=loss_fn))
    lean = leanest(graph)
    alone = replace(lean, ops=tuple(without_slices(op) for op in lean.ops))
    fused, one_by_one = (simulate(g, program_of(g, least_order(g))).peak_bytes for g in (lean, alone))
    assert fused < one_by_one
    result = verify(model, (x,), {}, Request(budget=int(fused * 1.01), loss_fn=loss_fn, prove=False))
    assert not result.differing
    assert result.peak_bytes <= result.plan.budget_bytes < one_by_one


def without_slices(op: Op) -> Op:
    return replace(
        op, by_slices=None, recompute_as=None if op.recompute_as is None else without_slices(op.recompute_as)
    )


def test_a_result_takes_the_memory_of_an_operand_of_another_shape() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 4, 6, 6), torch.randn(16)
    expected = nn.functional.pixel_unshuffle(x, 2) * weight.view(16, 1, 1)
    seen: list[int] = []

    def run(part: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        seen.append(part.shape[0])
        return (nn.functional.pixel_unshuffle(part, 2) * weight.view(16, 1, 1),)

    how = Slice(run=run, sliced={0: 0}, batch=5, samples=2, results=[expected], axes=[0], over=[0])
    address = x.data_ptr()
    (result,) = in_slices(how)(x, weight)
    assert torch.equal(result, expected) and result.data_ptr() == address
    assert seen == [2, 2, 1]


def test_ops_of_which_nothing_is_wanted_run_all_the_same() -> None:
    how = Slice(run=lambda part: (), sliced={0: 0}, batch=4, samples=2, results=[], axes=[], over=[])
    assert in_slices(how)(torch.randn(4, 3)) == ()


def test_slices_of_every_alignment_are_compared() -> None:
    """The second of five slices, which is neither the first, the middle nor the last, has other bits."""
    node = fx.Graph().placeholder("x")
    node.meta["val"] = torch.empty(5, 3)
    call = Call(name="c", target=torch.ops.aten.neg.default, args=(node,), meta={"val": torch.empty(5, 3)})
    values = {node: torch.randn(5, 3)}
    whole = -values[node]
    slices = BySlices(batch=5, samples=1, seconds=0.0, workspace_bytes=0, reads=(0,))
    assert same_slices(call, slices, values, whole, torch.device("cpu"))
    whole[1] += 1
    assert same_slices(call, slices, values, whole, torch.device("cpu")) == ()


def saved_spares(plan: memfit.Plan) -> list[int]:
    """Storages of the forward pass over which a run of slices that reads nothing of them puts its result together."""
    graph = plan.planned.graph
    found: list[int] = []
    rewritten: set[int] = set()
    past_loss = False
    for run in plan.program.runs():
        computes = [i for i in run if isinstance(i, Compute)]
        past_loss |= any(i.op == graph.loss_index for i in computes)
        if past_loss:
            reads = {s for i in computes for s in graph.ops[i.op].later.reads}
            over = {i.over for i in computes if i.sliced and i.over is not None} - reads - rewritten
            found += [s for s in over if graph.storages[s].kind is StorageKind.FORWARD]
            rewritten.update(s for i in computes for s in graph.ops[i.op].writes)
    return found


@pytest.mark.parametrize("strategy", ["auto", "sqrt"])
def test_retaining_the_graph_keeps_what_would_be_overwritten(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.planner.finalize.buffer_reuse._is_quicker", lambda *_: True)
    torch.manual_seed(0)
    model, x = residual(1), torch.randn(6, 3, 24, 24)
    with pytest.raises(memfit.BudgetError) as refused:
        memfit.plan(model, (x,), budget=1000, loss_fn=loss_fn, strategy=strategy, prove=False)
    memfit.fit(model, (x,), budget=refused.value.least_bytes, loss_fn=loss_fn, strategy=strategy)
    plan = memfit.plan_of(model)
    assert any(i.over is not None for i in computes_in(plan.program.instructions) if i.sliced)
    assert strategy == "auto" or saved_spares(plan)
    loss = loss_fn(model(x))
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), once, strict=True) if p.grad is not None)


def test_where_the_bits_differ_ops_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.profiling.measurements.costs_in_slices", lambda *_: ())
    torch.manual_seed(0)
    _, graph = capture_and_profile(residual(1), (torch.randn(4, 3, 22, 22),), {}, Request(budget=1, loss_fn=loss_fn))
    assert all(op.later.by_slices is None for op in graph.ops)
