"""What cannot be planned stays plain code between planned subgraphs, bit for bit; errors name the user's line."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import memfit
from memfit.fitted.installation import fitted_call


class Run(nn.Module):
    """A function of its layers and the input."""

    def __init__(self, function: Callable[..., torch.Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self, *inputs)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 8)
        weight, choice = self.gate(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for place, expert in enumerate(self.experts):
            (tokens,) = torch.where(choice == place)
            if tokens.numel():
                result.index_add_(0, tokens, expert(flat[tokens]) * weight[tokens, None])
        return x + result.view_as(x)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def linear() -> nn.Module:
    return nn.Linear(8, 8)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8))


X = torch.linspace(-1, 1, 48).view(6, 8)
CHOICE = torch.tensor([0, 3, 1, 2, 7, 1])
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "experts": (lambda: nn.Sequential(linear(), Experts(), linear()), (X,)),
    "one_hot": (lambda: Run(lambda m, x, i: m.a(x) * F.one_hot(i, 8), a=linear()), (X, CHOICE)),
    "mask": (lambda: Run(lambda m, x: m.b(m.a(x)[x > 0].view(-1, 1)), a=linear(), b=nn.Linear(1, 4)), (X,)),
    "nonzero": (lambda: Run(lambda m, x: m.b(m.a(x)[x[:, 0].nonzero()[:, 0]]), a=linear(), b=linear()), (X,)),
    "item": (lambda: Run(lambda m, x: m.b(m.a(x) * x.max().item()), a=linear(), b=linear()), (X,)),
    "no momentum": (lambda: nn.Sequential(linear(), nn.BatchNorm1d(8, momentum=None), linear()), (X,)),
    "sparse gradient": (
        lambda: nn.Sequential(nn.Embedding(9, 8, sparse=True), linear(), nn.ReLU(), linear()),
        (CHOICE,),
    ),
    "sparse product": (
        lambda: Run(lambda m, x, a: m.b(torch.sparse.mm(a, m.a(x))), a=linear(), b=linear()),
        (X, torch.eye(6).to_sparse()),
    ),
}


def gradients(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
    model.zero_grad()
    torch.manual_seed(1)
    loss_of(model(*inputs)).backward()
    return [
        None if p.grad is None else (p.grad.to_dense() if p.grad.is_sparse else p.grad.clone())
        for p in model.parameters()
    ]


def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().train()


@pytest.mark.parametrize("name", CASES)
def test_unplanned_parts_keep_every_bit_and_are_planned_once(name: str) -> None:
    make, inputs = CASES[name]
    model, plain = seeded(make), seeded(make)
    memfit.fit(model, inputs, budget="1GiB", loss_fn=loss_of, search_seconds=0.5)
    others = tuple(t.flip(0) if t.layout is torch.strided else t for t in inputs)
    for given in (inputs, others):
        assert all(map(equal, gradients(plain, given), gradients(model, given)))
    assert len(fitted_call(model).plans) == 1


def test_experts_are_left_to_plain_code_with_a_notice() -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("memfit.capture.dynamo.capture_subgraphs")
    logger.addHandler(handler)
    try:
        make, inputs = CASES["experts"]
        memfit.fit(seeded(make), inputs, budget="1GiB", loss_fn=loss_of, search_seconds=0.5)
    finally:
        logger.removeHandler(handler)
    (line,) = told
    assert "shapes depend on data in 1 (" in line and "test_unplanned_parts.py:" in line
    assert "other data may take more memory" in line


def test_an_output_without_a_gradient_behind_a_break() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            a, b, c = self.a(x).tanh(), self.b(x).tanh(), self.c(x).tanh()
            torch._dynamo.graph_break()
            logits = self.d(a * b + c)
            return {"loss": logits.square().mean(), "logits": logits}

    model, plain = seeded(Cut), seeded(Cut)
    memfit.fit(model, (X,), budget="1GiB", search_seconds=0.5)
    for module in (model, plain):
        module(X)["loss"].backward()
    assert all(equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.blocks = how, nn.Sequential(*(block() for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "sequential":
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=True)
        for one in self.blocks:
            x = x + checkpoint(one, x, use_reentrant=self.how == "reentrant")
        return x


@pytest.mark.parametrize("how", ["saved", "reentrant", "sequential"])
def test_own_checkpoints_are_named_or_replaced(how: str) -> None:
    model, plain = seeded(lambda: Checkpointed(how)), seeded(lambda: Checkpointed(how))
    x = X.clone().requires_grad_()
    with pytest.raises(memfit.CaptureError, match=r"checkpoints itself.*test_unplanned_parts\.py:\d+") as caught:
        memfit.fit(model, (x,), budget="1GiB", loss_fn=loss_of)
    assert "primals" not in str(caught.value)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=loss_of, search_seconds=0.5, checkpointing="replace")
    assert all(map(equal, gradients(plain, (x,)), gradients(model, (x,))))


def test_the_error_of_the_baseline_step_is_raised_as_it_is() -> None:
    model = seeded(lambda: Run(lambda m, x: m.a(x[:, :3]), a=linear()))
    with pytest.raises(RuntimeError, match="mat1 and mat2") as plain:
        model(X)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as planned:
        memfit.fit(model, (X,), budget="1GiB", loss_fn=loss_of)
    assert type(planned.value) is type(plain.value) and str(planned.value) == str(plain.value)


def test_fit_under_anomaly_mode() -> None:
    model = seeded(lambda: nn.Sequential(linear(), nn.ReLU(), linear()))
    with torch.autograd.set_detect_anomaly(True):
        memfit.fit(model, (X,), budget="1GiB", loss_fn=loss_of, search_seconds=0.5)
        gradients(model, (X,))


def test_where_plain_code_has_all_that_trains_the_line_is_named() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            return self.layer(x[x[:, 0] > 0])

    with pytest.raises(memfit.CaptureError, match=r"shapes depend on data .*test_unplanned_parts\.py:\d+.* is in it"):
        memfit.fit(Chosen(), (torch.randn(8, 8),), budget="1GiB", loss_fn=loss_of, search_seconds=0.1)


def test_a_part_is_told_once_however_often_it_is_captured(told: list[str]) -> None:
    """The second capture leaves out the gradient of an output that the loss does not use."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.first(x).tanh()
            if hidden.sum().item() > 1e9:
                hidden = -hidden
            hidden = hidden.exp()
            return self.second(hidden), hidden

    memfit.fit(Reading(), (torch.randn(8, 8),), budget="1GiB", loss_fn=lambda y: y[0].sum(), search_seconds=0.1)
    assert len([line for line in told if "a number is read" in line]) == 1


@pytest.mark.smoke
def test_a_layer_that_does_nothing_leaves_the_others_planned() -> None:
    """Dynamo skips code for good once a call of it did nothing; torch's layers must not share theirs."""

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(x.shape, generator=self.generator)

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Identity(), nn.Linear(8, 8), Noise(), nn.Linear(8, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    plan = memfit.plan(Looped(), (torch.randn(4, 8),), budget="1MiB", loss_fn=loss_of)
    assert plan.planned is not None
    assert [op.target for op in plan.planned.capture.graph.ops].count("aten.addmm.default") == 2


def test_a_module_whose_setting_makes_it_do_nothing_leaves_others_of_its_class_planned() -> None:
    class Scaled(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.by == 1.0 else x.mul(self.by).sin()

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), *(Scaled(by) for by in (1.0, 0.5, 1.0, 0.5))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

    plan = memfit.plan(Looped(), (torch.randn(4, 8),), budget="1MiB", loss_fn=loss_of)
    assert plan.planned is not None
    assert [op.target for op in plan.planned.capture.graph.ops].count("aten.sin.default") == 2


class _Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def test_scripted_and_traced_modules_behind_a_break() -> None:
    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            compiled = [torch.jit.script(_Sine()), torch.jit.trace(_Sine(), torch.randn(2, 8))]
            self.layers = nn.ModuleList([nn.Linear(8, 8), *compiled, nn.Linear(8, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

    torch.manual_seed(0)
    model, x = Looped(), torch.randn(4, 8)
    plain = model(x)
    loss_of(plain).backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    memfit.fit(model, (x,), budget="1MiB", loss_fn=loss_of)
    planned = model(x)
    loss_of(planned).backward()
    assert torch.equal(plain, planned)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


class DropsLayers(nn.Module):
    """Layers that are left out at random, by a number that the code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]).item() < 0.7:
                x = x + layer(x).tanh()
        return x


def test_code_that_reads_a_number_may_take_more_memory_with_others(told: list[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), DropsLayers(), nn.Linear(8, 4))
    memfit.fit(model, (torch.randn(4, 8),), budget="1GiB", loss_fn=loss_of, search_seconds=0.5)
    (line,) = told
    assert "a number is read from a tensor in 2 (" in line and "other data may take more memory" in line


class ReadsBetween(nn.Module):
    """Plain code reads the result of a convolution, and passes a new tensor on."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
        self.after = nn.Conv2d(8, 8, 3, padding=1)

    @torch.compiler.disable
    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lying = self.before[0](x).to(memory_format=torch.channels_last).contiguous()
        result: torch.Tensor = self.after(self.plain(self.before[1](lying))).relu()
        return result


def test_a_tiled_part_makes_whole_what_plain_code_reads() -> None:
    torch.manual_seed(0)
    model, x = ReadsBetween().double(), torch.randn(4, 3, 8, 8, dtype=torch.double)
    loss_of(model(x)).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    options = {"levers": "all", "exact": "rounding", "loss_fn": loss_of, "search_seconds": 0.2}
    with pytest.raises(memfit.BudgetError) as least:
        memfit.fit(model, (x,), budget=1, **options)
    memfit.fit(model, (x,), budget=least.value.least_bytes, **options)
    loss_of(model(x)).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)
