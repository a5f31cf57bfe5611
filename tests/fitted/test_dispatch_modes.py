"""Dispatch modes of the user: planning sets them aside, and a step that one of them watches is the module's own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import memfit
from memfit.torch_compat.core import TorchDispatchMode
from tests.counted_ops import CountedOps


class Halving(TorchDispatchMode):
    """Changes what ops compute."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made / 2 if func is torch.ops.aten.tanh.default else made


def model_and_data() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 8)
    return nn.Sequential(*layers), torch.randn(512, 64)


def loss_fn(output: Tensor) -> Tensor:
    return output.square().mean()


def stepped(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = loss_fn(model(x))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: memfit.fit(model, (x,), budget="1.6MiB", loss_fn=loss_fn),
        lambda model, x: memfit.plan(model, (x,), budget="1.6MiB", loss_fn=loss_fn),
        lambda model, x: memfit.estimate(model, (x,), loss_fn=loss_fn),
    ],
    ids=["fit", "plan", "estimate"],
)
def test_planning_gives_no_op_to_a_mode(call: Callable[[nn.Module, Tensor], object]) -> None:
    model, x = model_and_data()
    with CountedOps() as mode:
        call(model, x)
    assert not mode.calls
    assert same(stepped(model, x), stepped(copy.deepcopy(model_and_data()[0]), x))


@pytest.mark.parametrize("mode", [CountedOps, Halving, lambda: FlopCounterMode(display=False)])
def test_a_watched_step_is_the_modules_own_and_is_told(mode: Callable[[], Any], told: list[str]) -> None:
    model, x = model_and_data()
    plain = copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1.6MiB", loss_fn=loss_fn)
    with mode():
        expected = stepped(plain, x)
    with mode():
        assert same(stepped(model, x), expected)
    assert [text for text in told if "plainly under a dispatch mode" in text]
    assert same(stepped(model, x), stepped(plain, x))
    assert memfit.plan_of(model).program.recomputed()


def test_a_mode_around_the_backward_pass_alone() -> None:
    model, x = model_and_data()
    plain = copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1.6MiB", loss_fn=loss_fn)
    torch.manual_seed(1)
    loss = loss_fn(model(x))
    with CountedOps() as mode:
        loss.backward()
    assert any("gelu_backward" in str(op) for op in mode.calls)
    assert same([loss.detach(), *(p.grad for p in model.parameters())], stepped(plain, x))


def test_selective_checkpointing_around_a_fitted_module(told: list[str]) -> None:
    model, x = model_and_data()
    plain = copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1.6MiB", loss_fn=loss_fn)
    kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    x.requires_grad_()

    def step(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        loss_fn(checkpoint(model, x, use_reentrant=False, context_fn=kept)).backward()
        return [p.grad.clone() for p in model.parameters()]

    assert same(step(model), step(plain))
    assert [text for text in told if "plainly under a dispatch mode" in text]
