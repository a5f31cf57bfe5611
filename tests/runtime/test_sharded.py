"""A module sharded by `fully_shard` and fitted: FSDP's own gradients, to the bit, reduced once, within the budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import memfit
from benchmarks.notices import notices
from memfit.errors import BudgetError, CaptureError, PipelineError, PlanMismatchError
from tests.processes import run

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")

_WIDTH = 64
_SAMPLES = 2048
_BUDGET = 19 << 20
"""With which a step of four blocks recomputes, beside the state of its optimizer."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.drop = nn.Dropout(0.1)
        self.narrow = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.drop(nn.functional.gelu(self.wide(x))))


class Stack(nn.Module):
    """Blocks that look alike, so that one compiled graph runs for all, between layers of the root."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(_WIDTH, 3 * _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(output: Tensor) -> Tensor:
    return output.square().mean()


def data(rank: int, samples: int = _SAMPLES) -> Tensor:
    return torch.randn(samples, _WIDTH, generator=torch.Generator().manual_seed(rank))


def whole(blocks: int = 1) -> Stack:
    torch.manual_seed(0)
    return Stack(blocks)


def in_blocks(model: Stack, **options: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def partly_frozen_with_its_head(model: Stack) -> None:
    """An output layer of its own is one of torch's modules, which Dynamo does not look into by itself."""
    from torch.distributed.fsdp import fully_shard

    model.first.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    fully_shard(model.head)
    in_blocks(model)


def kept_whole_or_left_alone(model: Stack) -> None:
    """Gathered parameters stay until the backward pass; those that FSDP is told to ignore are never gathered."""
    model.first.requires_grad_(False)
    in_blocks(model, reshard_after_forward=False, ignored_params=set(model.first.parameters()))


SHARDINGS = (partly_frozen_with_its_head, kept_whole_or_left_alone)


def shards(model: nn.Module) -> int:
    return sum(held(p).nbytes for p in model.parameters())


def held(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def step(model: nn.Module, x: Tensor) -> None:
    torch.manual_seed(7)
    loss_fn(model(x)).backward()


def fits(rank: int, world: int, shard: Callable[[Stack], None]) -> None:
    plain, fitted = whole(blocks=4), whole(blocks=4)
    shard(plain)
    shard(fitted)
    x = data(rank)
    ample = memfit.plan(fitted, (x,), budget="2GiB", loss_fn=loss_fn, search_seconds=0.1)
    assert ample.measured_peak_bytes == pytest.approx(ample.predicted.peak_bytes, rel=0.005)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, fitted)]
    trained = {name: p for name, p in fitted.named_parameters() if p.requires_grad}
    state_bytes = sum(2 * held(p).nbytes + 4 for p in trained.values())  # two averages of each shard, and a count
    budget = _BUDGET + state_bytes
    options: Any = {"loss_fn": loss_fn, "optimizer": optimizers[1], "search_seconds": 0.1}
    assert memfit.fit(fitted, (x,), budget=budget, **options) is fitted
    plan = memfit.plan_of(fitted)
    assert plan.planned is not None and plan.decisions
    assert plan.planned.graph.static_bytes == shards(fitted) + 2 * x.nbytes + state_bytes  # `first` is plain code
    buffers = [s.nbytes for s in plan.planned.graph.storages if s.name.startswith("buffer") and "again" not in s.name]
    assert sum(buffers) == sum(p.nbytes for p in fitted.parameters() if isinstance(p, DTensor))
    assert plan.measured_peak_bytes is not None and plan.measured_peak_bytes <= budget
    assert plan.measured_peak_bytes == pytest.approx(plan.predicted.peak_bytes, abs=_SAMPLES * _WIDTH * 4)
    assert budget < 0.7 * plan.predicted.plain_peak_bytes
    assert len({str(plan) for plan in everywhere(plan.program)}) == 1
    counts: dict[str, int] = {}
    for name, parameter in trained.items():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: counts.update({name: counts.get(name, 0) + 1})
        )
    for number in range(3):
        x = data(rank + 2 * number)
        counts.clear()
        for model, optimizer in zip((plain, fitted), optimizers, strict=True):
            step(model, x)
            assert any(p.grad is not None for p in model.parameters())
            optimizer.step()
        assert counts == dict.fromkeys(trained, 1)
        for one, other in zip(fitted.parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(held(one.grad), held(other.grad))
            assert torch.equal(held(one), held(other))
        for optimizer in optimizers:
            optimizer.zero_grad()


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("shard", SHARDINGS)
def test_gradients_are_those_of_fsdp_within_the_budget(shard: Callable[[Stack], None], tmp_path: Path) -> None:
    run(fits, 2, tmp_path, shard)


def sums_up_as_one(rank: int, world: int) -> None:
    """Against the same model in one process: the mean of the gradients of all data."""
    model, alone = whole().eval(), whole()
    for module in (*model.modules(), *alone.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    in_blocks(model.train())
    memfit.fit(model, (data(rank),), budget="30%", loss_fn=loss_fn, search_seconds=0.1)
    step(model, data(rank))
    for other in range(world):
        (loss_fn(alone(data(other))) / world).backward()
    for one, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert one.grad is not None and expected.grad is not None
        torch.testing.assert_close(one.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-7)


def test_gradients_are_the_mean_of_all_processes(tmp_path: Path) -> None:
    run(sums_up_as_one, 2, tmp_path)


def refuses_together(rank: int, world: int) -> None:
    model = whole(blocks=2)
    in_blocks(model)
    x = data(rank)
    at_rest = [type(p) for p in model.parameters()]
    with pytest.raises(BudgetError) as told:
        memfit.plan(model, (x,), budget=shards(model) + x.nbytes, loss_fn=loss_fn, search_seconds=0.1)
    assert len(set(everywhere((told.value.least_bytes, str(told.value))))) == 1
    with pytest.raises(PipelineError if rank == 0 else PlanMismatchError, match="another step"):
        memfit.plan(model, (data(rank, _SAMPLES + rank),), budget="2GiB", loss_fn=loss_fn, search_seconds=0.1)
    model.train(rank == 0)
    with pytest.raises(PipelineError if rank == 0 else CaptureError, match="eval mode"):
        memfit.plan(model, (x,), budget="2GiB", loss_fn=loss_fn, search_seconds=0.1)
    model.train()
    assert [type(p) for p in model.parameters()] == at_rest
    # It trains on as before, and for inputs of another shape it is planned again. Then each process has a batch of
    # another size, for which no plan is found.
    memfit.fit(model, (x,), budget="2GiB", loss_fn=loss_fn, search_seconds=0.1)
    plain = whole(blocks=2)
    in_blocks(plain)
    for samples in (_SAMPLES, _SAMPLES // 2, _SAMPLES // 4 + rank, _SAMPLES):
        for each in (model, plain):
            each.zero_grad()
            step(each, data(rank, samples))
        assert all(
            torch.equal(held(one.grad), held(other.grad))
            for one, other in zip(model.parameters(), plain.parameters(), strict=True)
        )
    memfit.release(model)
    step(model, x)


def test_what_one_process_cannot_do_none_does_and_a_step_without_a_plan_runs_plainly(tmp_path: Path) -> None:
    run(refuses_together, 2, tmp_path)


class Features(nn.Module):
    """Returns features as well, which are large, so that the forward pass takes the most memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.layer(x))
        return y, torch.cat([y.detach()] * 64, 1).exp() + 1


def first_output(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[0].square().mean()


def holds_outputs_on_one(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model, x = Features(), torch.randn(256, 16)
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    options: Any = {"loss_fn": first_output, "search_seconds": 0.1, "prove": False}
    budget = memfit.plan(model, (x,), budget="1GiB", **options).predicted.peak_bytes
    memfit.fit(model, (x,), budget=budget, **options)
    plan, output = memfit.plan_of(model), None
    with notices() as texts:
        for _ in range(3):
            model.zero_grad()
            output = model(x)
            first_output(output).backward()
            output = output if rank == 0 else None
    assert memfit.plan_of(model) is plan
    assert everywhere(sum("still holds" in text for text in texts)) == [1, 0]


def test_a_process_that_holds_outputs_alone_does_not_plan_alone(tmp_path: Path) -> None:
    """It would wait for the others forever."""
    run(holds_outputs_on_one, 2, tmp_path)
