"""Ops carry the names of the user's modules, behind graph breaks too."""

from __future__ import annotations

import torch
from torch import nn

import memfit
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Broken(nn.Module):
    """The break is inside a block, and the modules behind it are reached by the resumed code's own variables."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.blocks, self.head = Block(), nn.ModuleList(Block() for _ in range(2)), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](self.blocks[0](self.pause(self.model(x)))))

    def pause(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x


def named(model: nn.Module, x: torch.Tensor) -> set[str]:
    _, graph = capture_and_profile(model, (x,), {}, Request(budget="1GiB"))
    return {op.module for op in graph.ops}


def test_ops_behind_a_graph_break_belong_to_modules_of_the_model() -> None:
    model = Broken()
    found = named(model, torch.randn(3, 4))
    assert found <= {name for name, _ in model.named_modules()}
    assert found >= {"model.layers.0", "blocks.0.layers.0", "blocks.1.layers.0", "head"}


def test_a_shared_module_keeps_the_name_it_is_called_by() -> None:
    model = nn.Sequential(Block(), Block())
    model[1].layers[0] = model[0].layers[0]
    assert {"0.layers.0", "1.layers.0"} <= named(model, torch.randn(3, 4))


def test_the_error_of_a_budget_names_a_module_behind_a_break() -> None:
    model = Broken()
    try:
        memfit.plan(model, (torch.randn(3, 4),), budget=64, prove=False, search_seconds=0.1)
    except memfit.BudgetError as error:
        assert "___stack" not in str(error) and error.binding
    else:
        raise AssertionError("64 bytes are not enough for anything")
