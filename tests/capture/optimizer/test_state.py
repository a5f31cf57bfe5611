"""Optimizers are asked what they hold, and never stepped or changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import memfit
from memfit.capture.allocation_tracker import LiveBytes
from memfit.capture.optimizer.state import optimizer_cost, part_of
from memfit.errors import SpecError
from memfit.profiling.memory import allocation_peak


class Delegating(torch.optim.Optimizer):
    """A wrapper whose setters reach the real optimizer, as accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state, lambda self, v: setattr(self.optimizer, "state", v))
    param_groups = property(
        lambda self: self.optimizer.param_groups, lambda self, v: setattr(self.optimizer, "param_groups", v)
    )
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Looking(torch.optim.Optimizer):
    """Keeps a slow copy of each parameter, made at every k-th step, in a state of its own."""

    def __init__(self, base_optimizer: torch.optim.Optimizer, k: int = 3) -> None:
        self.base_optimizer, self.k, self.count = base_optimizer, k, 0
        self._optimizer_step_pre_hooks: dict[int, Any] = {}
        self._optimizer_step_post_hooks: dict[int, Any] = {}
        self.param_groups, self.defaults = base_optimizer.param_groups, {}
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base_optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p].setdefault("slow", p.clone())


class Sharpness(torch.optim.Optimizer):
    """Needs a closure, makes its optimizer inside, and has a required argument of its own."""

    def __init__(self, params: Any, base_optimizer: Any, rho: float) -> None:
        super().__init__(params, {})
        self.rho = rho
        self.base_optimizer = base_optimizer(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:
        assert closure is not None
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["moved"] = p.grad * self.rho
        closure()
        self.base_optimizer.step()


class Valued(torch.optim.Optimizer):
    """Looks at values, and keeps a row, a column and a copy for each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad.norm().item() > 0:
                    state = self.state[p]
                    if p.dim() == 2:
                        state["row"], state["column"] = p.sum(0), p.sum(1)
                    state["copy"] = p.to(torch.bfloat16)


class NeedsModel(torch.optim.Optimizer):
    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params, {})
        self.model = model


def _parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(100, 37)), nn.Parameter(torch.randn(37)), nn.Parameter(torch.randn(40, 100))]


def _state_bytes(*optimizers: torch.optim.Optimizer) -> int:
    tensors = [t for o in optimizers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return sum(t.untyped_storage().nbytes() for t in {id(t): t for t in tensors}.values())


_MAKES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "fused": lambda p: torch.optim.Adam(p, fused=True),
    "groups": lambda p: torch.optim.SGD([{"params": p[:1], "momentum": 0.9}, {"params": p[1:]}], lr=0.1),
    "named": lambda p: torch.optim.AdamW([(str(i), q) for i, q in enumerate(p)], foreach=True),
    "adafactor": torch.optim.Adafactor,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "sparse": lambda p: torch.optim.SparseAdam(p),
    "valued": Valued,
    "delegating": lambda p: Delegating(Delegating(torch.optim.Adam(p))),
    "looking": lambda p: Looking(torch.optim.Adam(p)),
    "sharpness": lambda p: Sharpness(p, torch.optim.Adam, 0.05),
}


@pytest.mark.parametrize("name", _MAKES)
def test_what_an_optimizer_will_hold_is_what_it_holds(name: str) -> None:
    parameters = _parameters()
    optimizer = _MAKES[name](parameters)
    fired: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda o, a, k: fired.append(o))
    groups = [dict(group) for group in optimizer.param_groups]
    before, random_state = [p.detach().clone() for p in parameters], torch.get_rng_state()
    try:
        cost = optimizer_cost(optimizer, "cpu")
    finally:
        handle.remove()
    assert not fired
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert not any(optimizer.state.values())
    assert [p for g in optimizer.param_groups for p in g["params"]] == [p for g in groups for p in g["params"]]
    for _ in range(4):
        for p in parameters:
            p.grad = torch.ones_like(p).to_sparse() if name == "sparse" else torch.ones_like(p)
        optimizer.step(lambda: torch.zeros(()))
    inner = getattr(optimizer, "base_optimizer", None)
    true = _state_bytes(optimizer) if inner is None else _state_bytes(optimizer, inner)
    assert cost.state_bytes == true
    assert optimizer_cost(optimizer, "cpu").state_bytes == true


class Trusting(torch.optim.Optimizer):
    """LAMB's trust ratio: the length of each step is a number read from norms."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            update = state["mean"] / (p.grad.abs() + 1e-8)
            ratio = float(p.norm()) / max(float(update.norm()), 1e-3)
            p.add_(update, alpha=-0.01 * min(ratio, 10.0))


class Guarded(torch.optim.Optimizer):
    """Leaves a parameter out whose gradient is not finite, as a loss scaler does."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if not bool(p.grad.isnan().any()):
                self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)


class Searching(Guarded):
    """Halves a step until a number is small."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            update = self.state[p].setdefault("mean", torch.ones_like(p)).lerp_(p.grad, 0.1).clone()
            while float(update.norm()) > 0.5:
                update *= 0.5
            p.sub_(update)


@pytest.mark.parametrize("kind", [Guarded, Searching])
def test_the_state_of_an_optimizer_that_decides_by_values(kind: type[Guarded]) -> None:
    parameters = [nn.Parameter(torch.randn(1000, 40)), nn.Parameter(torch.randn(300))]
    optimizer = kind(parameters)
    cost = optimizer_cost(optimizer, "cpu")
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert cost.state_bytes == _state_bytes(optimizer) > 0


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.AdamW, Trusting])
def test_what_the_step_of_an_optimizer_takes_for_a_moment(kind: Any, told: list[str]) -> None:
    parameters = [nn.Parameter(torch.randn(1000, 40)), nn.Parameter(torch.randn(300))]
    optimizer = kind(parameters)
    cost = optimizer_cost(optimizer, "cpu")
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert cost.step_bytes > 0 and not told
    assert cost.step_bytes == pytest.approx(allocation_peak(optimizer.step), rel=0.02)


def test_l_bfgs_holds_its_history_while_the_model_runs() -> None:
    parameter = nn.Parameter(torch.linspace(-1, 1, 4096))
    scale = torch.linspace(1, 40, 4096)
    optimizer = torch.optim.LBFGS([parameter], history_size=4, max_iter=12, line_search_fn="strong_wolfe", lr=0.5)
    cost = optimizer_cost(optimizer, "cpu")
    held = []
    with LiveBytes("cpu") as counter:

        def closure() -> torch.Tensor:
            parameter.grad = None
            held.append(counter.live)
            loss = (scale * parameter).cos().mul(scale).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.step(closure)
    assert len(optimizer.state[parameter]["old_dirs"]) == 4
    assert max(held) <= cost.state_bytes <= 1.5 * max(held)


def test_parts_of_an_optimizer_sum_to_it() -> None:
    parameters = _parameters()
    optimizer = torch.optim.Adam(parameters)
    parts = [optimizer_cost(part_of(optimizer, [p]), "cpu").state_bytes for p in parameters]
    assert sum(parts) == optimizer_cost(optimizer, "cpu").state_bytes
    whole = sum(p.nbytes for p in parameters)
    stated = [optimizer_cost(part_of("1MiB", [p], whole), "cpu").state_bytes for p in parameters]
    assert 2**20 - 3 <= sum(stated) <= 2**20


def test_bytes_stand_for_an_optimizer_and_other_things_are_refused() -> None:
    assert optimizer_cost("1.5KiB", "cpu").state_bytes == 1536
    assert optimizer_cost(0, "cpu").state_bytes == 0
    parameters = _parameters()
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(parameters, lr=0.1), 1)
    for wrong in (scheduler, -1, 2.5, True, "much", [torch.optim.SGD(parameters, lr=0.1)]):
        with pytest.raises(SpecError, match="bytes that its state will take"):
            memfit.fit(nn.Linear(2, 2), (torch.ones(1, 2),), budget="1GiB", optimizer=wrong)  # type: ignore[arg-type]


def test_an_optimizer_of_which_nothing_can_be_told_asks_for_a_number() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(SpecError, match="state the bytes of its state"):
        optimizer_cost(NeedsModel(model.parameters(), model), "cpu")


def test_training_with_a_delegating_wrapper_goes_on_as_without_memfit() -> None:
    def trained(fitted: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = Delegating(torch.optim.AdamW(model.parameters(), lr=0.1))
        x = torch.randn(4, 8)
        if fitted:
            memfit.fit(model, (x,), budget="1GiB", loss_fn=lambda o: o.pow(2).mean(), optimizer=optimizer)
        for _ in range(2):
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.optimizer.zero_grad()
        return model[0].weight.detach()

    assert torch.equal(trained(True), trained(False))
