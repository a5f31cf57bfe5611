"""A model that marks tensors for a compiler is one graph, and Dynamo refuses the marks of others as before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memfit.capture.dynamo.marked_tensors import marks_left_out
from memfit.capture.training_step import capture_step


class Marking(nn.Module):
    """Marks a tensor of its own, as caches of transformers do."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if not torch.compiler.is_dynamo_compiling():
            mark = getattr(torch._dynamo, self.mark)
            mark(hidden) if self.mark == "mark_static_address" else mark(hidden, 0)
        result: Tensor = self.second(hidden)
        return result


@pytest.mark.smoke
@pytest.mark.parametrize("mark", ["mark_static_address", "mark_dynamic", "maybe_mark_dynamic", "mark_static"])
def test_a_mark_breaks_no_graph(mark: str) -> None:
    capture = capture_step(Marking(mark), (torch.randn(3, 8),), {}, loss_fn=lambda output: output.square().sum())
    assert len(capture.subgraphs.subgraphs) == 1


def test_others_are_refused_as_before() -> None:
    def marking(x: Tensor) -> Tensor:
        torch._dynamo.mark_static_address(x)
        return x + 1

    with marks_left_out():
        assert torch.equal(torch.compile(marking, backend="eager")(torch.ones(2)), torch.full((2,), 2.0))
    torch._dynamo.reset()
    with pytest.raises(AssertionError, match="forbidden"):
        torch.compile(marking, backend="eager")(torch.ones(2))
