"""Bad input gets a clear error and leaves the model as it was."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.compiler.driver import make_plan
from memfit.compiler.request import Request
from memfit.runtime.executable import compile_program
from memfit.zoo import build
from tests.models import Residual

X = torch.randn(2, 3, 16, 16)


class Deeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Conv2d(3, 3, 1), Residual()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(x).relu())


@pytest.mark.parametrize("budget", ["", "many", "8 XB", "-3GiB", 0, -1, "0%", "1000000TiB", True, 1.5])
def test_impossible_budgets(budget: object) -> None:
    model = Residual()
    with pytest.raises(memfit.SpecError):
        memfit.fit(model, (X,), budget=budget)  # type: ignore[arg-type]
    assert model._compiled_call_impl is None


@pytest.mark.parametrize(("name", "value"), [("strategy", "sqart"), ("levers", "every"), ("tiers", "host")])
def test_unknown_words(name: str, value: str) -> None:
    with pytest.raises(memfit.SpecError):
        memfit.plan(Residual(), (X,), budget="1GiB", **{name: value})  # type: ignore[arg-type]


def test_eval_mode() -> None:
    with pytest.raises(memfit.CaptureError, match=r"model\.train\(\)"):
        memfit.plan(Residual().eval(), (X,), budget="1GiB")


@pytest.mark.parametrize("entry", ["estimate", "plan", "fit"])
def test_parameters_without_a_shape_yet(entry: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(8)))
    budget = {} if entry == "estimate" else {"budget": "1GiB"}
    with pytest.raises(memfit.CaptureError, match=r"'weight' of 1\.0 \(LazyBatchNorm2d\).*call the model once"):
        getattr(memfit, entry)(model, (X,), **budget)
    assert sum(map(is_lazy, model.parameters())) == 4
    with torch.no_grad():
        model(X)
    getattr(memfit, entry)(model, (X,), **budget)


def test_nothing_to_train() -> None:
    with pytest.raises(memfit.CaptureError):
        memfit.plan(Residual().requires_grad_(False), (X,), budget="1GiB")


def test_values_on_the_meta_device(told: list[str]) -> None:
    spec = "hf:llama?num_hidden_layers=1&hidden_size=64&num_attention_heads=2&vocab_size=200&intermediate_size=128"
    example = build(spec, batch=2, shape=(32,), device=torch.device("meta"))
    with pytest.raises(memfit.CaptureError, match="the meta device does not have"):
        memfit.plan(example.model, example.args, example.kwargs, budget="1GiB", loss_fn=example.loss_fn)
    here = build(spec, batch=2, shape=(32,))
    found, counted = (memfit.estimate(e.model, e.args, e.kwargs, loss_fn=e.loss_fn) for e in (example, here))
    assert any("LlamaForCausalLM looks at values" in text for text in told)
    assert found.peak == pytest.approx(counted.peak, rel=0.1)  # it may hold the masks that eager mode drops


def test_input_on_another_device() -> None:
    with pytest.raises(memfit.CaptureError, match="meta"):
        memfit.plan(Residual(), (X.to("meta"),), budget="1GiB")


def test_a_model_that_checkpoints_itself() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda t: self.inner(t).relu(), x, use_reentrant=False)

    model = Own()
    with pytest.raises(memfit.CaptureError, match="checkpoint"):
        memfit.fit(model, (torch.randn(4, 8),), budget="1GiB")
    model(torch.randn(4, 8)).sum().backward()


def test_hugging_face_gradient_checkpointing() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train()
    model.gradient_checkpointing_enable()
    tokens = torch.randint(0, 50, (2, 8))
    with pytest.raises(memfit.CaptureError, match="gradient_checkpointing_disable"):
        memfit.plan(model, (tokens,), {"labels": tokens}, budget="1GiB")


def test_loss_that_is_no_scalar() -> None:
    with pytest.raises(memfit.CaptureError, match="scalar"):
        memfit.plan(Residual(), (X,), budget="1GiB", loss_fn=lambda output: output)


def test_a_model_with_nothing_to_train_is_named() -> None:
    with pytest.raises(memfit.CaptureError, match=r"a parameter or an input of Residual, .*is everything frozen"):
        memfit.plan(Residual().requires_grad_(False), (X,), budget="1GiB")


def test_a_budget_above_the_device_is_told_with_both() -> None:
    with pytest.raises(memfit.SpecError, match=r"102400\.00 GiB exceeds the .* of cpu; 'auto'"):
        memfit.plan(Residual(), (X,), budget="100TiB")


def test_a_graph_that_was_not_planned_is_told_with_its_line() -> None:
    plan = make_plan(Residual(), (X,), {}, Request(budget="1GiB", strategy="none", prove=False))
    assert plan.planned is not None
    call = compile_program(Deeper(), plan.planned.capture, plan.program)
    told = (
        r"Deeper now runs a graph that was not planned \(it begins at .*test_bad_input\.py:\d+\); plan or fit it anew"
    )
    with pytest.raises(BackendCompilerFailed) as caught:
        call(X)
    inner = caught.value.inner_exception
    assert isinstance(inner, memfit.PlanMismatchError) and re.search(told, str(inner))


def test_interrupted_planning_leaves_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model = Residual()
    with pytest.raises(KeyboardInterrupt):
        memfit.fit(model, (X,), budget="1GiB", progress=interrupt)
    assert model._compiled_call_impl is None
    model(X).sum().backward()


def test_out_of_memory_names_shape_and_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.runtime import boxed_call

    model = memfit.fit(Residual(), (X,), budget="1GiB", prove=False)

    def failing(gm: torch.fx.GraphModule) -> None:
        def forward(*_: object) -> None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

        gm.forward = forward  # type: ignore[method-assign]

    monkeypatch.setattr(boxed_call, "attach_metadata_only", failing)
    monkeypatch.setattr(torch.fx.GraphModule, "recompile", lambda self: None)
    with pytest.raises(
        memfit.OutOfMemoryError, match=r"(?s)\(2, 3, 16, 16\).*plan .*largest live tensors.*lower budget"
    ):
        model(X)
