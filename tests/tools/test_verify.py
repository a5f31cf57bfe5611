import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import nn

from memfit.bits import same_bits
from memfit.capture.training_step import capture_step
from memfit.compiler.driver import make_plan
from memfit.compiler.request import Request
from memfit.errors import BudgetError
from memfit.fitted.plan import Plan
from memfit.ir.instructions import Compute
from memfit.ir.program import Program
from memfit.report.records import document, json_text
from memfit.report.sentence import sentence
from memfit.sim.simulator import simulate_baseline
from memfit.tools.verify import verify
from memfit.zoo import Example, build
from tests.short_nets import RESNET


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Costs measured in this session only, on one thread: these models are tiny."""
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path_factory.getbasetemp() / "costs"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def request_for(
    example: Example, share: float, *, strategy: str = "auto", optimizer: torch.optim.Optimizer | None = None
) -> Request:
    """A request for a share of the baseline step's predicted peak."""
    captured = capture_step(example.model, example.args, {}, loss_fn=example.loss_fn, optimizer=optimizer)
    peak = simulate_baseline(captured.graph).peak_bytes
    return Request(budget=int(peak * share), loss_fn=example.loss_fn, optimizer=optimizer, strategy=strategy)


MODELS = [
    ("zoo:mlp?width=64&layers=4", 4096, (16,), 0.75, "auto"),
    ("zoo:gpt?layers=1&width=32&heads=2", 8, (64,), 0.75, "auto"),  # dropout
    (RESNET, 16, (3, 32, 32), 1.3, "every-block"),  # batch normalisation
    ("zoo:lstm-classifier?width=16&layers=1&unrolled=true&dropout=0.0", 64, (4,), 0.9, "auto"),
]


@pytest.mark.parametrize(("spec", "batch", "shape", "share", "strategy"), MODELS)
def test_a_planned_step_is_the_baseline_step(
    spec: str, batch: int, shape: tuple[int, ...], share: float, strategy: str
) -> None:
    pytest.importorskip("torchvision" if spec == RESNET else "torch")
    example = build(spec, batch=batch, shape=shape)
    before = {name: tensor.clone() for name, tensor in example.model.state_dict().items()}
    random_state = torch.get_rng_state()
    request = request_for(example, share, strategy=strategy)
    result = verify(example.model, example.args, example.kwargs, request)
    assert result.passed, result.differing
    assert result.steps == 2 and result.difference is None
    assert result.peak_bytes <= min(result.plan.budget_bytes, result.plain_peak_bytes)
    assert result.recomputes_executed == result.recomputes_planned > 0
    compared = {(check.kind, check.name) for check in result.checks}
    assert {("gradient", name) for name, _ in example.model.named_parameters()} <= compared
    assert {("buffer", name) for name, _ in example.model.named_buffers()} <= compared
    assert ("loss", "loss") in compared and ("random state", "cpu") in compared
    # Nothing of it happened to the caller.
    assert all(same_bits(before[name], tensor) for name, tensor in example.model.state_dict().items())
    assert all(p.grad is None for p in example.model.parameters())
    assert torch.equal(random_state, torch.get_rng_state())


def test_convolutions_that_run_again_in_chunks_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.ops.rules.convolution_chunks._CHUNK_BYTES", 1 << 19)
    monkeypatch.setattr(
        "memfit.planner.finalize.variant_selection.with_spares", lambda graph, program, limit: program
    )  # in slices, that is
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(4)))
    x = torch.randn(6, 32, 48, 48)
    request = Request(budget="64MiB", loss_fn=loss_of, strategy="sequential:2")
    plan = make_plan(model, (x,), {}, request)
    assert plan.planned is not None
    variants = [max((variant.chunks for variant in op.variants), default=1) for op in plan.planned.graph.ops]
    in_chunks = tuple(
        structs.replace(i, chunks=variants[i.op]) if isinstance(i, Compute) else i for i in plan.program.instructions
    )
    assert any(variants[i] > 1 for i in plan.program.recomputed())
    result = verify(model, (x,), {}, replace(plan, program=Program(instructions=in_chunks)))
    assert result.recomputes_executed == result.recomputes_planned > 0


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def test_the_optimizer_steps_too_and_gradients_that_exist_are_added_to() -> None:
    example = build("zoo:mlp?width=32&layers=4", batch=1024, shape=(16,))
    for parameter in example.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(example.model.parameters())
    request = request_for(example, 1.1, strategy="sqrt", optimizer=optimizer)
    result = verify(example.model, example.args, example.kwargs, request)
    assert result.passed, result.differing
    updated = [check for check in result.checks if check.kind == "parameter"]
    assert len(updated) == result.steps * len(list(example.model.parameters()))
    assert not optimizer.state
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in example.model.parameters())


def test_a_plan_from_a_file_is_verified(tmp_path: Path) -> None:
    example = build("zoo:mlp?width=64&layers=4", batch=4096, shape=(16,))
    request = request_for(example, 1.1, strategy="sqrt")
    make_plan(example.model, example.args, {}, request).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    result = verify(example.model, example.args, None, plan, loss_fn=example.loss_fn)
    assert result.passed and result.recomputes_planned > 0


def test_differences_are_found_and_measured() -> None:
    example = build("zoo:mlp?width=64&layers=2", batch=64, shape=(16,))
    calls = itertools.count(1)

    def fickle(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean() * next(calls)

    request = replace(request_for(example, 1.1, strategy="none"), loss_fn=fickle)
    result = verify(example.model, example.args, {}, request)
    assert not result.passed and result.fits
    different = {check.kind for check in result.differing}
    assert different == {"loss", "gradient"}
    assert all(check.max_difference > 0 for check in result.differing)
    assert result.difference is not None and result.difference.op == "aten.mul.Tensor"
    assert result.difference.line.startswith(f"{Path(__file__)}:") and result.difference.line.endswith("in fickle")
    assert "aten.mul.Tensor" in sentence(result)
    told = document(result)["difference"]
    assert (told["op"], told["dtype"], told["is_layout"]) == ("aten.mul.Tensor", "float32", False)
    assert json.loads(json_text(result))["difference"]["sentence"] == str(result.difference)


def test_a_budget_that_is_exceeded_is_found() -> None:
    example = build("zoo:mlp?width=64&layers=2", batch=64, shape=(16,))
    plan = make_plan(example.model, example.args, {}, request_for(example, 1.1, strategy="none"))
    result = verify(example.model, example.args, {}, replace(plan, budget_bytes=plan.predicted.peak_bytes // 2))
    assert not result.fits and not result.passed and not result.differing


def test_what_cannot_be_planned_cannot_be_verified() -> None:
    example = build("zoo:mlp?width=64&layers=2", batch=64, shape=(16,))
    with pytest.raises(BudgetError):
        verify(example.model, example.args, {}, replace(request_for(example, 1.1, strategy="none"), budget=1000))


def test_a_model_without_a_loss_is_compared_by_its_outputs() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(32, 8, requires_grad=True)
    result = verify(model, (x,), {}, Request(budget="50%", prove=False))
    assert result.passed, result.differing
    compared = {(check.kind, check.name) for check in result.checks}
    assert {("output", "0"), ("gradient", "input 0")} <= compared
    assert x.grad is None


def test_bits_are_compared_not_values() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor(0.0)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    assert not same_bits(torch.zeros(2), torch.zeros(3))
    assert same_bits(torch.ones(2, 3).t(), torch.ones(3, 2))
    assert same_bits(torch.zeros(0), torch.zeros(0))


class NotesItsLoss(nn.Module):
    """Sets in its first call what Dynamo guards, as models of transformers do, so the second call compiles too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        self.kind: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "regression"
        return self.inner(x)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_second_compilation_is_not_the_step(steps: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    request = Request(budget=3000, loss_fn=lambda output: output.square().mean())  # compiling takes twice 5056 bytes
    result = verify(NotesItsLoss(), (x,), {}, request, steps=steps)
    assert result.passed and result.plan.measured_peak_bytes is not None
    assert 0 < result.peak_bytes <= result.plan.measured_peak_bytes
