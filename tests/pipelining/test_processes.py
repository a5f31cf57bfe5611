"""Several processes with gloo: the same training, shared weights, checkpoints between numbers of stages, failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memfit
from memfit.capture.residents import storage_bytes
from memfit.errors import CaptureError, PipelineError
from memfit.pipelining.partition import cut_points
from memfit.pipelining.partition.forward_graph import ForwardGraph
from memfit.pipelining.partition.stages import Stage, cut_into_stages
from memfit.pipelining.runtime import build, tied_weights
from memfit.pipelining.runtime.stage import EngineStage
from memfit.pipelining.search import stage_planner
from memfit.profiling.memory import measure
from tests.pipelining.models import CASES, Case, baseline_step, gpt, gradients, tokens_loss, words
from tests.pipelining.test_memory import TiedHead
from tests.processes import run

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


def case(dtype: torch.dtype) -> Case:
    torch.manual_seed(0)
    return words(8, dtype)


def case_with_dropout(dtype: torch.dtype) -> Case:
    torch.manual_seed(0)
    return gpt(8, dtype, dropout=0.2)


def make(made: Case, world: int, **options: Any) -> memfit.Pipeline:
    return memfit.pipeline(
        *(made.model, made.args),
        target=made.target,
        loss_fn=made.loss_fn,
        num_stages=world,
        search_seconds=0.1,
        **{"prove": False, "schedule": "1f1b", **options},
    )


def measured_peak(pipe: memfit.Pipeline, made: Case, optimizer: torch.optim.Optimizer) -> int:
    """The peak of a step of this process alone, with what is there before it."""

    def step() -> None:
        made.model.zero_grad()
        pipe.step(*made.args, target=made.target)

    step()
    trained = [p for p in made.model.parameters() if p.grad is not None]
    made.model.zero_grad()
    state = [value for one in optimizer.state.values() for value in one.values()]
    start = storage_bytes([*trained, *state, *made.args, made.target], "cpu")
    return measure(step, warmup=0, repeats=0, start_bytes=start).peak_bytes


def trains_alike(rank: int, world: int, microbatches: int, schedule: str) -> None:
    dtype = torch.float32 if microbatches == 1 else torch.float64
    again = case_with_dropout if microbatches == 1 else case
    ours, plain = again(dtype), again(dtype)
    # Adam would divide rounding by rounding where a gradient is zero, such as that of a bias of keys.
    kind = torch.optim.Adam if microbatches == 1 else torch.optim.SGD
    optimizers = [kind(one.model.parameters(), lr=0.01) for one in (ours, plain)]
    pipe = make(ours, world, num_microbatches=microbatches, schedule=schedule, optimizer=optimizers[0])
    torch.manual_seed(7)
    losses = []
    for _ in range(3):
        losses.append(pipe.step(*ours.args, target=ours.target))
        optimizers[0].step()
        optimizers[0].zero_grad()
    drawn = torch.rand(2)
    torch.manual_seed(7)
    for loss in losses:
        expected = plain.loss_fn(plain.model(*plain.args), plain.target)
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        torch.testing.assert_close(loss, expected.detach(), rtol=0 if microbatches == 1 else 1e-12, atol=0)
    if microbatches == 1:
        assert torch.equal(drawn, torch.rand(2))
    states = pipe.plan.takes_random * 4 * torch.get_rng_state().numel()  # they travel too, and are not planned
    assert measured_peak(pipe, ours, optimizers[0]) <= 1.005 * pipe.plan.peak_bytes[rank] + states
    state = pipe.state_dict()
    for name, tensor in plain.model.state_dict().items():
        assert (state[name] - tensor).abs().max() <= (0 if microbatches == 1 else 1e-12) * tensor.abs().max()
    held = {id(p): p.untyped_storage().nbytes() for p in ours.model.parameters()}
    whole = sum(p.numel() * p.element_size() for p in plain.model.parameters())
    assert sum(held.values()) < 0.8 * whole
    fresh = again(dtype)
    fresh.model.load_state_dict(state)


@pytest.mark.parametrize(
    ("microbatches", "schedule"),
    [(1, "zero-bubble"), (4, "interleaved-1f1b"), (4, "zero-bubble-v")],
)
def test_two_processes_train_as_one(microbatches: int, schedule: str, tmp_path: Path) -> None:
    """The single micro-batch draws dropout."""
    run(trains_alike, 2, tmp_path, microbatches, schedule)


def crosses_as_rows(rank: int, world: int) -> None:
    """Cuts are those only at which a gradient lies otherwise than what crosses."""

    def turned(forward: ForwardGraph) -> list[cut_points.Cut]:
        return [cut for cut in cut_points.find_cuts(forward) if is_turned(cut_into_stages(forward, [cut])[0])]

    def is_turned(stage: Stage) -> bool:
        return any(crossing.is_flat for crossing in stage.leaving)

    for module in (stage_planner, build):
        module.find_cuts = turned  # type: ignore[attr-defined]
    torch.manual_seed(0)
    made = CASES["mixer"](6, torch.float64)
    plain = baseline_step(made)
    expected = gradients(made.model)
    pipe = make(made, world, num_microbatches=3)
    (stage,) = pipe.engine_stages()
    assert rank == 1 or is_turned(stage.runs[0][0])
    torch.testing.assert_close(pipe.step(*made.args, target=made.target), plain, rtol=1e-12, atol=0)
    held = {id(p) for p in stage.submod.parameters()}
    assert 0 < len(held) < len(expected)
    for name, parameter in made.model.named_parameters():
        if id(parameter) in held:
            assert (parameter.grad - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max(), name


def test_gradients_that_lie_otherwise_cross_as_they_lie(tmp_path: Path) -> None:
    run(crosses_as_rows, 2, tmp_path)


def keeps_budget(rank: int, world: int) -> None:
    torch.manual_seed(0)
    made = gpt(32, torch.float64)  # what it keeps is more than the step of the optimizer takes
    optimizer = torch.optim.Adam(made.model.parameters())
    options = {"num_microbatches": 4, "optimizer": optimizer}
    free = make(made, world, **options)
    budget = int(0.93 * max(free.plan.peak_bytes))
    free.release()
    before = {name: p.clone() for name, p in made.model.named_parameters()}
    pipe = make(made, world, **options, prove=True, budget_per_device=budget)
    assert max(pipe.plan.measured_peak_bytes) <= budget
    assert any(stage.recompute_seconds for stage in pipe.plan.stages)
    assert all(p.grad is None for p in made.model.parameters())
    state = pipe.state_dict()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    pipe.step(*made.args, target=made.target)
    optimizer.step()
    assert measured_peak(pipe, made, optimizer) <= budget


def test_budgets_hold_with_real_transfers(tmp_path: Path) -> None:
    run(keeps_budget, 2, tmp_path)


def ties_a_wide_embedding(rank: int, world: int) -> None:
    """Its gradient is larger than all that a micro-batch takes."""
    torch.manual_seed(0)
    model = TiedHead(vocabulary=20_000, width=32).double()
    x, y = torch.randint(20_000, (2, 4, 4))
    made = Case(model=model, args=(x,), target=y, loss_fn=tokens_loss)
    baseline_step(made)
    expected = gradients(model)
    optimizer = torch.optim.SGD(model.parameters())
    pipe = make(made, world, num_microbatches=4, optimizer=optimizer, prove=True)
    (stage,) = pipe.engine_stages()
    assert any(parameter is model.embed.weight for parameter in stage.submod.parameters())
    for measured, predicted in zip(pipe.plan.measured_peak_bytes, pipe.plan.peak_bytes, strict=True):
        assert measured <= predicted + 2**20
    pipe.step(x, target=y)
    assert (model.embed.weight.grad - expected["embed.weight"]).abs().max() <= 1e-12


def test_gradients_of_tied_weights_are_added_without_much_memory(tmp_path: Path) -> None:
    run(ties_a_wide_embedding, 2, tmp_path)


def sums_of_three(rank: int, world: int) -> None:
    """Three holders, of whom one has no gradient, one a transposed one, and more than goes at once."""
    tied_weights._AT_ONCE_BYTES = 40
    model = nn.ParameterDict({"tied": nn.Parameter(torch.zeros(3, 7)), "other": nn.Parameter(torch.zeros(2))})
    given = [torch.arange(21.0).reshape(3, 7), torch.arange(21.0).reshape(7, 3).t() * 10]
    if rank < 2:
        model["tied"].grad = given[rank].clone(memory_format=torch.preserve_format)
    shared = tied_weights.SharedStates(holders={"tied": (0, 1, 2), "other": (1,)}, several=frozenset({"tied"}))
    shared.add_gradients(model)
    assert torch.equal(model["tied"].grad, given[0] + given[1])
    assert model["other"].grad is None


def test_gradients_of_three_holders_are_added(tmp_path: Path) -> None:
    run(sums_of_three, 3, tmp_path)


def fails(rank: int, world: int, where: str) -> None:
    torch.manual_seed(0)
    made = CASES["twins"](8, torch.float32)
    pipe = make(made, world, num_microbatches=4)
    pipe.step(*made.args, target=made.target)
    if rank == 1:
        setattr(EngineStage, where, lambda *_, **__: 1 / 0)
    told = (ZeroDivisionError, None) if rank == 1 else (PipelineError, "process 1 of the pipeline failed: ZeroDivision")
    with pytest.raises(told[0], match=told[1]):
        pipe.step(*made.args, target=made.target)
    with pytest.raises(PipelineError, match="failed before"):
        pipe.step(*made.args, target=made.target)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("where", ["backward_one_chunk", "get_fwd_recv_ops"])  # one waits for results, one to send
def test_a_process_that_fails_ends_the_others_with_its_error(where: str, tmp_path: Path) -> None:
    run(fails, 2, tmp_path, where)


def differs(rank: int, world: int) -> None:
    made = case(torch.float32)
    if rank == 1:
        made.model.layers[1] = torch.nn.ReLU()
    error = memfit.PlanMismatchError if rank == 1 else PipelineError
    with pytest.raises(error, match="computes something else"):
        make(made, world, num_microbatches=2)
    made.model(*made.args).sum().backward()  # the model is usable as before


def breaks(rank: int, world: int) -> None:
    made = case(torch.float32)
    if rank == 0:
        made.model.eval()
    with pytest.raises(CaptureError if rank == 0 else PipelineError, match="eval mode"):
        make(made, world, num_microbatches=2)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("body", [differs, breaks])
def test_nothing_runs_where_one_process_disagrees(body: Callable[..., None], tmp_path: Path) -> None:
    run(body, 2, tmp_path)


def moves(rank: int, world: int, path: str) -> None:
    made = case(torch.float64)
    pipe = make(made, world, num_microbatches=2)
    state = torch.load(path, weights_only=True)
    pipe.load_state_dict(state)
    expected = case(torch.float64)
    expected.model.load_state_dict(state)
    loss = pipe.step(*made.args, target=made.target)
    torch.testing.assert_close(loss, expected.loss_fn(expected.model(*made.args), made.target).detach())
    gathered = pipe.state_dict()
    assert all(torch.equal(gathered[name], tensor) for name, tensor in state.items())
    assert torch.equal(pipe.release()(*made.args), expected.model(*made.args))
    assert torch.equal(pipe.step(*made.args, target=made.target), loss)  # planned anew


def test_a_checkpoint_moves_between_numbers_of_stages(tmp_path: Path) -> None:
    made = case(torch.float64)
    for parameter in made.model.parameters():
        parameter.data.mul_(1.5)
    pipe = make(made, 3, num_microbatches=2)
    torch.save(pipe.state_dict(), tmp_path / "state.pt")
    run(moves, 2, tmp_path, str(tmp_path / "state.pt"))


def replicas(rank: int, world: int) -> None:
    """Two pipelines of two stages, each on its own data: the mean of both replicas' gradients, everywhere."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    replica = mesh.get_local_rank("data")
    ours, plain = case(torch.float64), case(torch.float64)
    batches = [torch.randint(0, 40, ours.args[0].shape, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    optimizers = [torch.optim.SGD(one.model.parameters(), lr=0.1) for one in (ours, plain)]
    pipe = memfit.pipeline(
        *(ours.model, (batches[replica],)),
        target=ours.target,
        loss_fn=ours.loss_fn,
        num_stages=2,
        num_microbatches=4,
        schedule="1f1b",
        search_seconds=0.1,
        optimizer=optimizers[0],
        group=mesh.get_group("pipeline"),
        data_group=mesh.get_group("data"),
    )
    assert pipe.plan.measured_peak_bytes
    said: list[object] = [None] * world
    dist.all_gather_object(said, (pipe.plan.cuts, pipe.plan.measured_peak_bytes))
    assert len(set(said)) == 1
    for _ in range(2):
        loss = pipe.step(batches[replica], target=ours.target)
        optimizers[0].step()
        optimizers[0].zero_grad()
        for number, batch in enumerate(batches):
            expected = plain.loss_fn(plain.model(batch), plain.target)
            (expected / 2).backward()
            if number == replica:
                torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        optimizers[1].step()
        optimizers[1].zero_grad()
    state = pipe.state_dict()
    for name, tensor in plain.model.state_dict().items():
        assert (state[name] - tensor).abs().max() <= 1e-12 * tensor.abs().max()


def test_replicas_of_a_pipeline_average_their_gradients(tmp_path: Path) -> None:
    run(replicas, 4, tmp_path)
