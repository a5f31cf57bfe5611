"""The first capture of a step has symbols for the sizes that may differ in a later call."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit import zoo
from memfit.capture.training_step import Capture
from memfit.compiler.capture_for_sizes import SymbolicCalls, captured_for_sizes, guessed_to_vary
from memfit.compiler.request import Request
from memfit.compiler.stages import captured_for
from memfit.fitted.installation import fitted_call
from memfit.ir.serialization import graph_digest
from memfit.profiling.cost_cache import open_cache


@pytest.mark.smoke
@pytest.mark.parametrize(
    "leaves, varying",
    [
        ([torch.ones(4, 9).long()], {0: [0, 1]}),  # words
        ([torch.ones(4, 9).long(), torch.ones(4, 9), torch.ones(4, 1, 9, 9)], {0: [0, 1], 1: [0, 1], 2: [0, 2, 3]}),
        ([torch.ones(4, 3, 8, 8), torch.ones(4).long()], {0: [0], 1: [0]}),  # images, their classes
        ([torch.ones(4, 9, 16)], {0: [0, 1]}),  # sequences of vectors
        ([torch.ones(4, 16)], {0: [0]}),
        ([torch.ones(1, 9).long(), True, None], {0: [1]}),  # one sample
        ([torch.ones(1, 3, 8, 8)], {}),
        ([torch.tensor(3.0), 0.5], {}),
    ],
)
def test_the_sizes_of_texts_and_the_number_of_samples_may_differ(
    leaves: list[object], varying: dict[int, list[int]]
) -> None:
    assert guessed_to_vary(leaves) == varying


@pytest.mark.parametrize(
    "name, shape",
    [
        ("zoo:gpt?layers=1", (32,)),
        ("zoo:llama?layers=1", (32,)),
        ("zoo:unet?depth=2&width=8", (3, 32, 32)),
        ("torchvision:resnet18", (3, 32, 32)),
    ],
)
def test_the_step_is_that_of_a_capture_without_symbols(name: str, shape: tuple[int, ...]) -> None:
    example = zoo.build(name, batch=4, shape=shape)
    model, cache = example.model.train(), open_cache(torch.device("cpu"))
    asked = Request(budget="1GiB", loss_fn=example.loss_fn)

    def captured(symbolic: object = None) -> Capture:
        return captured_for(model, example.args, example.kwargs, asked, cache, symbolic=symbolic)  # type: ignore[arg-type]

    found = captured_for_sizes(
        *(model, example.args, example.kwargs, SymbolicCalls(), asked),
        varying=lambda _, leaves: guessed_to_vary(leaves),
        captured=captured,
    )
    assert found is not None and found[1] is not None
    assert graph_digest(found[0].graph) == graph_digest(captured().graph)


_LIBRARY = torch.library.Library("memfit_test_sizes", "DEF")
_LIBRARY.define("scaled(Tensor x) -> Tensor")


def scaled(x: Tensor) -> Tensor:
    """An op that computes something else where sizes are symbols, as no op should."""
    return x * (3 if isinstance(x.shape[0], torch.SymInt) else 2)


_LIBRARY.impl("scaled", scaled, "CompositeImplicitAutograd")


class WithOwnOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.ops.memfit_test_sizes.scaled(self.layer(x)).square().mean()
        return made


def test_where_symbols_change_a_bit_each_size_is_captured_by_itself() -> None:
    model = WithOwnOp()
    memfit.fit(model, budget="1GiB", optimizer=0)
    for rows in (4, 6, 7):
        x = torch.randn(rows, 8)
        made, plain = model(x), model._call_impl(x)
        assert torch.equal(made, plain)
        grads = [torch.autograd.grad(loss, list(model.parameters())) for loss in (made, plain)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert not any(not call.is_broken for call in fitted_call(model).symbolic.made)


class Scaled(nn.Module):
    def __init__(self, scale: Callable[[int], float]) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), scale

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = (self.layer(x) * self.scale(x.shape[1])).exp().mean()
        return made


@pytest.mark.parametrize(
    "scale, calls",
    [
        (lambda n: (n * 0.1) * 3, 1),  # a number is rounded in the order of the code, not of the algebra
        (lambda n: (n / 7) / 3 * 0.1 + n * 0.3, 1),
        (lambda n: n**-0.5, 1),
        (lambda n: 0.1 if n * 0.1 > 0.9 else 0.7, 2),  # two ways, each for many sizes
        (lambda n: math.log(n), 3),  # it fixes the size; after two calls in vain, each size is captured by itself
    ],
)
def test_numbers_made_of_sizes_are_those_of_the_module(scale: Callable[[int], float], calls: int) -> None:
    model = Scaled(scale)
    memfit.fit(model, budget="1GiB", optimizer=0)
    for length in (5, 7, 11, 13, 23, 29):
        x = torch.randn(4, length, 8)
        made, plain = model(x), model._call_impl(x)
        assert torch.equal(made, plain), length
        grads = [torch.autograd.grad(loss, list(model.parameters())) for loss in (made, plain)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), length
    assert len(fitted_call(model).symbolic.made) == calls
