"""A model that asks whether it is compiled hears what it hears in eager."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import memfit
from memfit.capture.eager.compiler_queries import eager_answers
from memfit.capture.training_step import capture_step
from memfit.errors import CaptureError
from memfit.tools.verify import same_bits

QUESTIONS: dict[str, Callable[[Tensor], bool]] = {
    "compiling": lambda y: torch.compiler.is_compiling(),
    "dynamo compiling": lambda y: torch.compiler.is_dynamo_compiling(),
    "exporting": lambda y: torch.compiler.is_exporting(),
    "_dynamo": lambda y: torch._dynamo.is_compiling(),
    "_utils": lambda y: torch._utils.is_compiling(),  # type: ignore[deprecated]
    "jit": lambda y: torch.jit.is_tracing() or torch.jit.is_scripting(),
    "tracing state": lambda y: torch._C._get_tracing_state() is not None,
    "fx": lambda y: torch.fx._symbolic_trace.is_fx_symbolic_tracing(),
    "onnx": lambda y: torch.onnx.is_in_onnx_export(),
    "fake": lambda y: isinstance(y, FakeTensor),
    "proxy": lambda y: isinstance(y, torch.fx.Proxy),
    "class": lambda y: type(y) is not Tensor,
    "cuda graph": lambda y: _or_false(torch.cuda.is_current_stream_capturing),
    "xpu graph": lambda y: _or_false(torch.xpu.is_current_stream_capturing),
}


def _or_false(question: Callable[[], bool]) -> bool:
    """As libraries ask it: there may be no such device."""
    try:
        return question()
    except Exception:
        return False


class Asking(nn.Module):
    def __init__(self, question: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.question(y):
            y = torch.sin(y)
        return self.second(torch.tanh(y))


def loss_of(output: Tensor) -> Tensor:
    return output.square().sum()


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:.*is_compiling")
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_captured_step_takes_the_road_of_eager(question: str) -> None:
    model, x = Asking(QUESTIONS[question]), torch.randn(3, 8)
    capture = capture_step(model, (x,), {}, loss_fn=loss_of)
    (subgraph,) = capture.subgraphs.subgraphs
    assert not [op for op in subgraph.reading.ops if "sin" in op.node.name]


def test_a_fitted_model_takes_it_too() -> None:
    model, x = Asking(QUESTIONS["compiling"]), torch.randn(3, 8)
    plain = model(x)
    loss_of(plain).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    memfit.fit(model, (x,), budget="64MiB", loss_fn=loss_of)
    fitted = model(x)
    loss_of(fitted).backward()
    assert same_bits(plain, fitted)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and gradient is not None and same_bits(parameter.grad, gradient)


def test_an_op_that_asks_in_its_own_backward_hears_it_too() -> None:
    heard: list[bool] = []

    @torch.library.custom_op("memfit_test::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)

    def backward(context: object, gradient: Tensor) -> Tensor:
        heard.append(torch.compiler.is_compiling())
        return gradient * 2

    doubled.register_autograd(backward)

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(doubled(self.layer(x)))

    capture_step(Doubling(), (torch.randn(3, 8),), {}, loss_fn=loss_of)
    assert heard and not any(heard)


def test_torch_itself_hears_that_it_is_traced() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.vmap(lambda row: row * row.sum())(self.layer(x))
            return result

    assert len(capture_step(Mapped(), (torch.randn(3, 8),), {}, loss_fn=loss_of).subgraphs.subgraphs) == 1


def test_other_compilations_hear_torchs_answer_again() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    def compiled(x: Tensor) -> Tensor:
        return x + 1 if torch.compiler.is_compiling() else x

    with pytest.raises(CaptureError):
        capture_step(Failing(), (torch.randn(3, 8),), {})
    x = torch.zeros(3)
    assert torch.equal(torch.compile(compiled, backend="eager", fullgraph=True)(x), x + 1)
    torch._dynamo.reset()
    with eager_answers(), eager_answers():
        assert torch.equal(torch.compile(compiled, backend="eager", fullgraph=True)(x), x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(compiled, backend="eager", fullgraph=True)(x), x + 1)


class Collector:
    """A `ContextVar` for eager code, and a plain attribute where that cannot be traced, as transformers has it."""

    def __init__(self) -> None:
        self.variable: ContextVar[int | None] = ContextVar("collector", default=None)
        self.plainly: int | None = None

    def put(self, value: int) -> None:
        if is_compiling_anywhere():
            self.plainly = value
        else:
            self.variable.set(value)


def is_compiling_anywhere() -> bool:
    return torch.compiler.is_compiling()


COLLECTOR = Collector()


def test_a_context_variable_breaks_no_graph() -> None:
    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            COLLECTOR.put(3)
            return self.layer(x) * (2.0 if is_compiling_anywhere() else 1.0)

    model, x = Collecting(), torch.randn(3, 8)
    assert not capture_step(model, (x,), {}, loss_fn=loss_of).subgraphs.breaks
    memfit.fit(model, (x,), budget="1GiB", loss_fn=loss_of, search_seconds=0.1)  # proves that nothing is doubled


def test_a_function_that_only_warns_breaks_no_graph() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def warn_of_padding(self, x: Tensor) -> None:
            if is_compiling_anywhere():
                return
            if 0 in x:
                self.told = True

        def forward(self, x: Tensor) -> Tensor:
            self.warn_of_padding(x)
            return self.layer(x)

    assert not capture_step(Careful(), (torch.randn(3, 8),), {}, loss_fn=loss_of).subgraphs.breaks
