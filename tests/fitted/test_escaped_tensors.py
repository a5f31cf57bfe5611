"""Tensors that leave a fitted module in other ways than by its result, and uses of it beside training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from benchmarks.notices import notices
from memfit.fitted.installation import fitted_call

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


class Blocks(nn.Module):
    """Blocks with a residual stream, which may leave a loss on themselves."""

    def __init__(self, *, leaves_aux: bool = False) -> None:
        super().__init__()
        self.leaves_aux = leaves_aux
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.aux: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        if self.leaves_aux:
            self.aux = x.sigmoid().mean()
        return x


class Heads(nn.Module):
    """Two heads on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.a(hidden), self.b(hidden)


def square(output: Any) -> torch.Tensor:
    return sum(o.square().mean() for o in output) if isinstance(output, tuple) else output.square().mean()


def fitted(model: nn.Module, loss_fn: Callable[[Any], Any] = square) -> tuple[nn.Module, nn.Module]:
    twin = copy.deepcopy(model)
    memfit.fit(model, (X,), budget="64MiB", loss_fn=loss_fn, search_seconds=0.2)
    return model, twin


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = list(zip(gradients(a), gradients(b), strict=True))
    return all((x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in pairs)


HOOKS: dict[str, Callable[[nn.Module, list[Any]], Any]] = {
    "forward": lambda m, log: m.register_forward_hook(lambda _, i, o: (log.append(tuple(o.shape)), o * 2)[1]),
    "forward pre": lambda m, log: m.register_forward_pre_hook(lambda _, i: (log.append(1), (i[0] * 2,))[1]),
    "backward": lambda m, log: m.register_full_backward_hook(
        lambda _, i, o: (log.append(o[0].sum().item()), tuple(g * 2 for g in i))[1]
    ),
    "backward pre": lambda m, log: m.register_full_backward_pre_hook(
        lambda _, o: (log.append(1), tuple(g * 2 for g in o))[1]
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_registered_after_fit_and_removed_run_as_in_eager(kind: str) -> None:
    torch.manual_seed(0)
    model, twin = fitted(Blocks())
    seen: dict[nn.Module, list[Any]] = {model: [], twin: []}
    handles = [HOOKS[kind](m.layers[1], seen[m]) for m in (model, twin)]
    for _ in range(2):
        for m in (model, twin):
            square(m(X)).backward()
        assert equal(model, twin)
    assert seen[model] == seen[twin] and len(seen[model]) == 2
    for m, handle in zip((model, twin), handles, strict=True):
        handle.remove()
        square(m(X)).backward()
    assert equal(model, twin)
    assert seen[model] == seen[twin]


def test_the_same_hook_registered_anew_in_each_step_is_planned_once() -> None:
    model, twin = fitted(Blocks(leaves_aux=True))
    for factor in (2.0, 3.0, 2.0):
        for m in (model, twin):
            handle = m.layers[0].register_forward_hook(lambda _, i, o, factor=factor: o * 2)
            square(m(X)).backward()
            handle.remove()
        assert equal(model, twin)
    assert len(fitted_call(model).plans) == 2


def test_a_hook_of_the_old_kind_is_planned_around() -> None:
    model, twin = fitted(Blocks())
    for m in (model, twin):
        m.layers[1][0].register_backward_hook(lambda _, i, o: None)
    for m in (model, twin):
        square(m(X)).backward()
    assert equal(model, twin)
    assert memfit.plan_of(model).planned.capture.subgraphs.breaks


def test_a_loss_left_on_the_module_and_features_of_hooks_receive_gradients() -> None:
    torch.manual_seed(0)
    model = Blocks(leaves_aux=True)
    features: dict[int, torch.Tensor] = {}

    def collect(m: nn.Module) -> None:
        m.layers[0].register_forward_hook(lambda _, i, o: features.__setitem__(0, o))

    collect(model)

    def loss_of(m: nn.Module) -> Callable[[Any], torch.Tensor]:
        return lambda output: output.square().mean() + m.aux + features[0].abs().mean()  # type: ignore[no-any-return]

    twin = copy.deepcopy(model)
    memfit.fit(model, (X,), budget="64MiB", loss_fn=loss_of(model), search_seconds=0.2)
    assert model.aux is None and not features  # planning leaves nothing behind
    for m in (model, twin):
        loss_of(m)(m(X)).backward()
    assert equal(model, twin)


@pytest.mark.parametrize("which", [0, 1])
def test_where_no_gradient_reaches_none_stays_none(which: int) -> None:
    model, twin = fitted(Heads())
    for m in (model, twin):
        m(X)[which].square().mean().backward()
    assert any(p.grad is None for p in model.parameters())
    assert equal(model, twin)


def test_losses_differentiated_one_after_the_other_reach_their_own_parameters() -> None:
    model, twin = fitted(Heads())
    found = []
    for m in (model, twin):
        a, b = m(X)
        parameters = list(m.parameters())
        first = torch.autograd.grad(square(a), parameters, retain_graph=True, allow_unused=True)
        found.append((*first, *torch.autograd.grad(square(b), parameters, allow_unused=True)))
    for x, y in zip(*found, strict=True):
        assert (x is None) == (y is None) and (x is None or torch.equal(x, y))


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["module", "function", "parent", "compile()"])
def test_compiled_code_around_a_fitted_module_runs_the_plan(kind: str) -> None:
    model, twin = fitted(Blocks(leaves_aux=kind == "parent"))
    call: Callable[[torch.Tensor], Any] = model
    if kind == "module":
        call = torch.compile(model, backend="eager")
    elif kind == "function":
        call = torch.compile(lambda x: model(x) * 1.0, backend="eager")
    elif kind == "parent":
        call = torch.compile(nn.Sequential(nn.Identity(), model), backend="eager")
    else:
        model.compile(backend="eager")
    output = call(X)
    assert len(fitted_call(model).loops.passes) == 1  # a planned pass waits for its backward pass
    square(output).backward()
    square(twin(X)).backward()
    assert equal(model, twin)


@pytest.mark.smoke
def test_code_that_ran_compiled_before_runs_the_plan() -> None:
    other, other_twin = fitted(Heads())
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    model, twin = fitted(model)
    for each in (compiled, twin, other, other_twin):
        square(each(X)).backward()
    assert len(fitted_call(model).loops.passes) == 1
    assert equal(model, twin)
    assert equal(other, other_twin)
    assert len(fitted_call(other).plans) == 1


def test_release_gives_back_a_compiled_call() -> None:
    model = Blocks()
    model.compile(backend="eager")
    before = model._compiled_call_impl
    memfit.fit(model, (X,), budget="64MiB", loss_fn=square, search_seconds=0.2)
    assert memfit.release(model)._compiled_call_impl is before
    assert "compile" not in vars(model)


def test_transforms_run_the_module_plainly_and_say_so() -> None:
    model, twin = fitted(Blocks())
    with notices() as told:
        mapped = [torch.vmap(m)(X[:, None]) for m in (model, twin)]
        tangents = [torch.func.jvp(m, (X,), (torch.ones_like(X),))[1] for m in (model, twin)]
    assert torch.equal(*mapped) and torch.equal(*tangents)
    assert sum("transform of torch.func" in text for text in told) == 1
    for m in (model, twin):
        other = {name: p.detach() * 1.5 for name, p in m.named_parameters()}
        for p in other.values():
            p.requires_grad_()
        square(torch.func.functional_call(m, other, (X,))).backward()
        m.zero_grad()
    assert len(fitted_call(model).plans) == 1


def test_a_second_derivative_is_refused_and_forward_offers_it() -> None:
    model, twin = fitted(Blocks())
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(square(model(x)), x, create_graph=True)
    with pytest.raises(memfit.SecondDerivativeError, match=r"model\.forward"):
        gradient.square().sum().backward()
    model.zero_grad()
    for call, m in ((model.forward, model), (model, model), (twin, twin)):
        (gradient,) = torch.autograd.grad(square(call(x)), x, create_graph=True)
        if m is model and call is not model:
            gradient.square().sum().backward()
            model.zero_grad()
        else:
            gradient.square().sum().backward()
    assert equal(model, twin)


def test_several_forward_passes_before_one_backward_pass_are_told_and_planned_for() -> None:
    model, twin = fitted(Blocks())
    with notices() as told:
        for _ in range(3):
            for m in (model, twin):
                (square(m(X)) + 2 * square(m(X + 1))).backward()
            assert equal(model, twin)
    assert sum("2 forward passes before a backward pass" in text for text in told) == 1
    plan = memfit.plan_of(model)
    assert plan.planned is not None and plan.planned.request.beside_bytes > 0


def test_a_frozen_module_and_errors_of_the_module_are_as_in_eager() -> None:
    class Fails(Blocks):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if self.fails:
                raise KeyError("told")
            return y

    model, twin = fitted(Fails())
    model.fails = True  # type: ignore[assignment]
    with pytest.raises(KeyError, match="told"):
        model(X)
    model.fails = False  # type: ignore[assignment]
    model.requires_grad_(False)
    assert torch.equal(model(X), twin(X)) and not model(X).requires_grad
    model.requires_grad_(True)
    for m in (model, twin):
        square(m(X)).backward()
    assert equal(model, twin)


class Watched(nn.Module):
    """Leaves a statistic on itself that nobody differentiates; nought times an infinite derivative is NaN."""

    def __init__(self, *, infinite: bool) -> None:
        super().__init__()
        self.infinite = infinite
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.activity: Any = None
        self.aux: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        self.activity = (hidden - hidden.detach()).sqrt() if self.infinite else hidden.exp()
        self.aux = hidden.square().mean()
        return self.head(hidden)


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("adds_aux", [False, True])
def test_a_tensor_on_a_module_that_gets_no_gradient_adds_none(adds_aux: bool, infinite: bool) -> None:
    model, twin = fitted(Watched(infinite=infinite))
    with notices() as told:
        for _ in range(4):
            loss, expected = square(model(X)), square(twin(X))
            if adds_aux:
                loss, expected = loss + model.aux, expected + twin.aux
            loss.backward()
            expected.backward()
            for mine, plain in zip(gradients(model), gradients(twin), strict=True):
                assert mine is not None and plain is not None
                assert torch.isfinite(plain).all()
                assert torch.equal(mine, plain)
    # With zeros the plan of the infinite one cannot be proved, so it begins without all gradients of that kind.
    assert sum("no gradient arrived" in text for text in told) == (0 if infinite else 1), told
    assert sum("a gradient arrived" in text for text in told) == (1 if infinite and adds_aux else 0), told
    planned = memfit.plan_of(model).planned
    assert planned is not None
    assert len(planned.request.capture.without_gradient) == (1 if adds_aux else 2), (
        "from the second step on it is planned so"
    )


def test_a_weight_that_a_hook_makes_anew_gets_no_gradient_of_zeros() -> None:
    torch.manual_seed(0)
    convolution = nn.utils.spectral_norm(nn.Conv2d(4, 4, 3, padding=1))
    model = nn.Sequential(convolution, nn.Conv2d(4, 4, 3))
    twin = copy.deepcopy(model)
    x = torch.randn(6, 4, 8, 8).to(memory_format=torch.channels_last)
    memfit.fit(model, (x,), budget="64MiB", loss_fn=square, search_seconds=0.2)
    with notices() as told:
        for _ in range(2):
            square(model(x)).backward()
            square(twin(x)).backward()
            for mine, plain in zip(gradients(model), gradients(twin), strict=True):
                assert mine is not None and plain is not None
                assert torch.equal(mine, plain)
    assert not told, "that is known from the start"


class Auxiliary(nn.Module):
    """Leaves a loss on itself; a gradient of zeros for it makes a sum come out in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))
        self.last = nn.Conv1d(8, 8, 3, padding=1)
        self.aux: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale + self.shift
        self.aux = y.square().mean()
        return self.last(y.mT.reshape(4, 8, -1))


@pytest.mark.parametrize("adds_aux", [False, True])
def test_an_auxiliary_loss_is_planned_with_its_gradient_though_the_proof_brings_none(adds_aux: bool) -> None:
    torch.manual_seed(0)
    model, twin, x = Auxiliary(), Auxiliary(), torch.randn(32, 33, 16)
    twin.load_state_dict(model.state_dict())
    memfit.fit(model, (x,), budget="64MiB", loss_fn=square, search_seconds=0.2)
    plans = []
    with notices() as told:
        for _ in range(4):
            for one in (model, twin):
                loss = square(one(x))
                (loss + one.aux if adds_aux else loss).backward()
            for mine, plain in zip(gradients(model), gradients(twin), strict=True):
                assert mine is not None and plain is not None
                assert torch.equal(mine, plain)
            plans.append(memfit.plan_of(model))
    assert plans[1] is plans[2] is plans[3], "it settles with the second step"
    assert len(told) <= 1, told
    assert plans[3].proof is not None and plans[3].proof.is_exact
