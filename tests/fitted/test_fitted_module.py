"""The fitted module behaves as the module it was."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import memfit
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile
from memfit.fitted.installation import fitted_call
from memfit.profiling.cost_cache import CostCache, open_cache
from tests.models import Between, Frozen, Residual, Tied

X = torch.randn(8, 3, 24, 24, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 5


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, Y[: len(output)])


def fitted(share: float = 0.75) -> tuple[nn.Module, nn.Module]:
    """A fitted model and its plain twin."""
    torch.manual_seed(0)
    model = Residual(blocks=1)
    twin = copy.deepcopy(model)
    budget = int(plain_peak_bytes() * share)
    assert memfit.fit(model, (X,), budget=budget, loss_fn=loss_fn, search_seconds=0.1) is model
    return model, twin


@functools.cache
def plain_peak_bytes() -> int:
    plan = memfit.plan(Residual(blocks=1), (X,), budget="4GiB", loss_fn=loss_fn, prove=False)
    return plan.predicted.plain_peak_bytes


def same_gradients(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p.grad, q.grad) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def step(model: nn.Module, x: torch.Tensor = X) -> None:
    loss_fn(model(x)).backward()


@pytest.mark.smoke
def test_training_loop_keeps_its_bits() -> None:
    model, twin = fitted()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, twin)]
    for _ in range(3):
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            step(m)
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_gradients_accumulate_and_a_graph_kept_for_a_second_backward_pass_keeps_its_bits() -> None:
    # A plan may write over saved tensors, which a second pass reads again.
    model, twin = fitted()
    for m in (model, twin):
        output = m(X)
        output.sum().backward(retain_graph=True)
        loss_fn(output).backward()
    assert same_gradients(model, twin)
    for _ in range(2):
        step(model), step(twin)
    assert same_gradients(model, twin)


def test_what_changes_the_step_is_planned_anew_and_exact() -> None:
    """Inputs of another shape, another precision of one backend, another number of threads."""
    model, twin = fitted()
    for x in (X[:4], X):
        step(model, x), step(twin, x)
        assert same_gradients(model, twin)
        model.zero_grad(), twin.zero_grad()
    assert len(fitted_call(model).plans) == 2
    # Then torch.get_float32_matmul_precision raises.
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "bf16"
        for m in (model, twin):
            step(m)
    finally:
        matmul.fp32_precision = before
    assert same_gradients(model, twin)
    assert len(fitted_call(model).plans) == 3
    # That an op has the same bits in chunks is known for the threads it was tried with.
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    step(model)
    torch.set_num_threads(threads)
    assert len(fitted_call(model).plans) == 4


def test_beside_training_it_is_the_module_it_was() -> None:
    model, twin = fitted()
    assert list(model.state_dict()) == list(twin.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in twin.named_modules()]
    assert type(model) is type(twin)
    with torch.no_grad():
        assert torch.equal(model(X), twin(X))
    model.eval(), twin.eval()
    assert torch.equal(model(X), twin(X))
    assert len(fitted_call(model).calls) == 1
    model.train()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not isinstance(getattr(copied, "_compiled_call_impl", None), type(fitted_call(model)))
        step(copied)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    Residual(blocks=1).load_state_dict(torch.load(buffer, weights_only=True))
    # Release undoes fit.
    assert memfit.release(model) is model
    with pytest.raises(memfit.MemfitError, match="not fitted"):
        memfit.plan_of(model)
    memfit.release(model)


def test_the_caller_may_write_over_the_output() -> None:
    # The output of a linear layer without bias is `_unsafe_view` of a product, which autograd takes for no view.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8, bias=False))
    x, twin = torch.randn(3, 4, 8), copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1MiB", loss_fn=lambda output: output.square().sum())
    for m in (model, twin):
        m(x).mul_(2).square().sum().backward()
    assert same_gradients(model, twin)


def test_a_changed_module_is_planned_anew() -> None:
    model, twin = fitted(0.9)
    for m in (model, twin):
        m.blocks[0].eval()  # another graph: this block now uses its running statistics
        step(m)
    assert same_gradients(model, twin)


def test_planning_changes_nothing_and_a_plan_holds_no_inputs() -> None:
    torch.manual_seed(0)
    model, x = Residual(blocks=1), X.clone()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    made = memfit.plan(model, (x,), budget="1GiB", loss_fn=loss_fn)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    assert made.planned is not None


def test_least_bytes_works_as_a_budget() -> None:
    model = Residual(blocks=1)
    with pytest.raises(memfit.BudgetError) as caught:
        memfit.fit(model, (X,), budget=4096, loss_fn=loss_fn)
    assert "least budget" in str(caught.value) and caught.value.least_bytes > 4096
    memfit.fit(model, (X,), budget=caught.value.least_bytes, loss_fn=loss_fn, search_seconds=0.1)
    step(model)


def test_an_output_the_loss_does_not_use_gets_its_gradient_after_all() -> None:
    torch.manual_seed(0)
    model, tokens = Tied(), torch.randint(0, 50, (2, 16))
    plain = copy.deepcopy(model)
    memfit.fit(model, (tokens,), {"labels": tokens}, budget="1GiB")
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(1)
            each(tokens, labels=tokens)["logits"].sum().backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


def test_optimizer_state_counts() -> None:
    model, x = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 5)), torch.randn(8, 8)
    parameters = sum(p.nbytes for p in model.parameters())
    bare = capture_and_profile(model, (x,), {}, Request(budget=1, loss_fn=loss_fn))[1].static_bytes
    for optimizer, copies in (
        (torch.optim.SGD(model.parameters(), 0.1), 0),
        (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), 1),
        (torch.optim.Adam(model.parameters()), 2),
        (torch.optim.AdamW(model.parameters(), amsgrad=True), 3),
    ):
        request = Request(budget=1, loss_fn=loss_fn, optimizer=optimizer)
        static = capture_and_profile(model, (x,), {}, request)[1].static_bytes
        assert static - bare == pytest.approx(copies * parameters, rel=0.01, abs=1)
        assert not optimizer.state


def test_buffers_that_the_step_changes_change_once() -> None:
    torch.manual_seed(0)
    model, x = Frozen(), torch.randn(64, 16)
    twin = copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=lambda output: output.square().mean())
    for m in (model, twin):
        m(x).square().mean().backward()
    assert model.calls.item() == twin.calls.item() == 1
    assert torch.equal(model.first.weight.grad, twin.first.weight.grad)
    assert model.second.weight.grad is None


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x).relu()
        return torch.relu(self.a(hidden)), torch.relu(self.b(hidden))


def test_a_gradient_that_autograd_shares_is_not_overwritten() -> None:
    """One tensor is the tangent of both outputs, and `retain_grad` keeps it: writing over it would be wrong."""
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(64, 8)
    twin = copy.deepcopy(model)

    def loss_of(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return ((outputs[0] + outputs[1]) ** 3).mean()

    with pytest.raises(memfit.BudgetError) as caught:
        memfit.fit(model, (x,), budget=1024, loss_fn=loss_of)
    memfit.fit(model, (x,), budget=caught.value.least_bytes, loss_fn=loss_of)
    kept = []
    for m in (model, twin):
        outputs = m(x)
        for output in outputs:
            output.retain_grad()
        loss_of(outputs).backward()
        kept.append([output.grad for output in outputs])
    assert same_gradients(model, twin)
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_planning_inside_a_profiler() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        memfit.plan(TwoHeads(), (torch.randn(4, 8),), budget="1GiB", loss_fn=lambda outputs: outputs[0].sum())


def test_a_model_with_graph_breaks_can_be_planned_often() -> None:
    """Dynamo gives up on code it compiled so often and runs it plainly: the budget would not hold."""

    class Cut(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    model, x = Cut(4, 4), torch.randn(3, 4)
    for _ in range(3):
        with torch._dynamo.config.patch(recompile_limit=2):  # eight, if nobody says otherwise
            made = memfit.plan(model, (x,), budget="1GiB", loss_fn=torch.sum, prove=False)
        assert made.planned is not None and len(made.planned.capture.subgraphs.subgraphs) == 2


def test_every_run_of_a_graph_that_repeats_has_its_own_program() -> None:
    """Dynamo compiles blocks that look alike once; kept is what each of them is planned to keep."""
    model, x = Between(), torch.randn(2048, 64)
    twin = copy.deepcopy(model)

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    ample = memfit.plan(model, (x,), budget="2GiB", loss_fn=loss_fn)
    assert ample.planned is not None and len(ample.planned.capture.subgraphs.subgraphs) == 4
    assert len({id(subgraph.reading) for subgraph in ample.planned.capture.subgraphs.subgraphs}) < 4
    assert ample.measured_peak_bytes == pytest.approx(ample.predicted.peak_bytes, rel=0.01)
    budget = int(0.7 * ample.predicted.peak_bytes)
    memfit.fit(model, (x,), budget=budget, loss_fn=loss_fn, search_seconds=0.1)
    plan = memfit.plan_of(model)
    assert plan.predicted.peak_bytes <= budget  # what is planned is what runs: nothing was corrected
    assert plan.measured_peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.01)
    for each in (model, twin):
        for number in range(2):
            loss_fn(each(x + number)).backward()
    assert same_gradients(model, twin)


def test_layers_that_dynamo_leaves_alone_keep_their_kernels() -> None:
    """An LSTM between blocks in a loop stays with eager, with eager's bits, and its forward pass is its own again."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 32), nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 16)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)[0] if isinstance(layer, nn.LSTM) else torch.tanh(layer(x))
            return x

    model, x = Mixed(), torch.randn(64, 12, 16)
    twin = copy.deepcopy(model)
    plan = memfit.plan(model, (x,), budget="1GiB", loss_fn=lambda output: output.square().mean())
    plan.apply(model)
    for each in (model, twin):
        each(x).square().mean().backward()
    assert same_gradients(model, twin)
    assert not any("forward" in vars(module) for module in model.modules())
    copy.deepcopy(model)


def test_a_fitted_model_holds_no_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo keeps what a capture was made with; of known costs there may be thousands."""
    opened: list[weakref.ref[CostCache]] = []

    def noted(device: torch.device) -> CostCache:
        cache = open_cache(device)
        opened.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr("memfit.compiler.stages.open_cache", noted)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 8)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=lambda y: y.sum())
    model(x).sum().backward()
    gc.collect()
    assert opened and [ref() for ref in opened if ref() is not None] == []
