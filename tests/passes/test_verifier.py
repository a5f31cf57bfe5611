"""After each pass, what the graph says of shapes, layouts and memory is what its calls make."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import memfit
from memfit.capture.options import CaptureOptions
from memfit.capture.training_step import capture_step
from memfit.passes import pass_list
from memfit.passes.pass_list import PASSES
from memfit.passes.replace_uses import replace_uses
from memfit.passes.verifier import GraphError, changed_nodes, node_states, verify
from memfit.torch_compat.core import FakeTensorMode
from tests.runtime.cases import CASES

_aten = torch.ops.aten


class Cloning(nn.Module):
    """Reads a copy of its hidden values through a view, and then the values themselves."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.last, self.kind = nn.Linear(16, 16), nn.Linear(16, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            hidden = self.linear(x)
            copied = hidden.clone()
            if self.kind == "flat":
                read = copied.view(-1, 8).sigmoid().view_as(hidden)
            elif self.kind == "turned":
                read = copied.t().sigmoid().t()
            elif self.kind == "halves":
                one, other = copied.view(2, -1).split(1)
                read = torch.cat([one.sigmoid(), other.tanh()]).view_as(hidden)
            else:
                read = copied[:, :8].sigmoid().repeat(1, 2)
            x = read * hidden.exp()
        made: Tensor = self.last(x)
        return made


@pytest.fixture
def verified() -> Iterator[None]:
    """Passes verify graphs where debug messages are shown."""
    level = pass_list.log.level
    pass_list.log.setLevel(logging.DEBUG)
    yield
    pass_list.log.setLevel(level)


@pytest.mark.parametrize("kind", ["flat", "turned", "halves", "part"])
def test_views_of_a_clone_that_is_dropped_are_views_of_its_source(kind: str, verified: None) -> None:
    """Else an op may write over the source, which is read later."""
    torch.manual_seed(0)
    plain, x = Cloning(kind), torch.randn(64, 16)
    fitted = copy.deepcopy(plain)
    memfit.fit(fitted, (x,), budget="1GiB", loss_fn=lambda y: y.square().mean(), search_seconds=0.1)
    plan = memfit.plan_of(fitted)
    assert plan is not None and plan.measured_peak_bytes == plan.predicted.peak_bytes
    for model in (plain, fitted):
        model(x).square().mean().backward()
    for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("grid", [(), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["residual", "tied", "layouts", "kernels", "unet", "gpt"])
def test_each_pass_leaves_what_it_says(name: str, grid: tuple[int, ...], verified: None) -> None:
    model, args, kwargs, loss_fn = CASES[name]()
    capture = capture_step(
        model, args, kwargs, loss_fn=loss_fn, options=CaptureOptions(separate=lambda _: True, grid=grid)
    )
    assert capture.graph.ops


def test_passes_have_names_of_their_own() -> None:
    assert len({one.name for one in PASSES}) == len(PASSES)


def graph_of(*calls: tuple[Any, tuple[Any, ...]]) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph of calls on a placeholder, whose operands are numbers of earlier nodes."""
    graph, nodes = fx.Graph(), list[fx.Node]()
    with FakeTensorMode():
        nodes.append(graph.placeholder("x"))
        nodes[0].meta["val"] = torch.empty(4, 6)
        for target, args in calls:
            operands = [nodes[int(a[1:])] if isinstance(a, str) else a for a in args]
            nodes.append(graph.call_function(target, tuple(operands)))
            nodes[-1].meta["val"] = target(*fx.map_arg(tuple(operands), lambda n: n.meta["val"]))
    graph.output(nodes[-1])
    return graph, nodes


def test_faults_are_named() -> None:
    def case() -> tuple[fx.Graph, list[fx.Node]]:
        return graph_of((_aten.clone.default, ("n0",)), (_aten.t.default, ("n1",)), (_aten.sin.default, ("n2",)))

    graph, nodes = case()
    verify(graph, nodes, "none")
    nodes[3].meta["val"] = nodes[0].meta["val"]
    with pytest.raises(
        GraphError, match=r"after the pass 'shape': %sin.* makes shape \(6, 4\), and its value says \(4, 6\)"
    ):
        verify(graph, nodes, "shape")

    graph, nodes = case()
    nodes[3].meta["val"] = nodes[3].meta["val"].contiguous()
    with pytest.raises(GraphError, match=r"makes strides \(1, 6\), and its value says \(4, 1\)"):
        verify(graph, nodes, "strides")

    graph, nodes = case()
    nodes[1].replace_all_uses_with(nodes[0])
    with pytest.raises(GraphError, match=r"%t_default .* is a view, and its value says otherwise"):
        verify(graph, nodes, "alias")

    graph, nodes = case()
    replace_uses(nodes[1], nodes[0])
    verify(graph, nodes, "alias")

    graph, nodes = case()
    nodes[2].append(nodes[1])
    with pytest.raises(GraphError, match="before it has been defined"):
        verify(graph, nodes, "order")


def test_only_what_a_pass_changed_is_verified() -> None:
    graph, nodes = graph_of((_aten.sin.default, ("n0",)), (_aten.cos.default, ("n1",)), (_aten.exp.default, ("n0",)))
    before = node_states(graph)
    assert not changed_nodes(graph, before)
    nodes[2].args = (nodes[0],)
    with graph.inserting_before(nodes[2]):
        made = graph.call_function(_aten.tanh.default, (nodes[0],))
    assert changed_nodes(graph, before) == [made, nodes[2]]
