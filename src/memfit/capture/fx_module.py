"""A module that is one graph of calls: a part of a model that Dynamo has traced before.

Capturing and compiling it needs no Dynamo, and so no guards: AOTAutograd receives the graph as it is. Its calls keep
their metadata about the modules they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from memfit.capture.call_settings import Backend, CallSettings

__all__ = ["OneGraph", "call_of_graph"]


class OneGraph(nn.Module):
    """A graph, and the tensors of a model that the graph reads.

    Args:
        graph: its placeholders are first the model's tensors, then the inputs; its output is a tuple.
        states: the model's tensors, by their names in the model.
        alone: whether it returns its only result without a tuple.
    """

    def __init__(self, graph: fx.Graph, states: Mapping[str, torch.Tensor], *, alone: bool = False) -> None:
        super().__init__()
        self.calls = fx.GraphModule(nn.Module(), graph)
        self.alone = alone
        self.names: list[str] = []
        for name, tensor in states.items():
            self.names.append("state_" + name.replace(".", "_DOT_"))
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(self.names[-1], tensor)
            else:
                self.register_buffer(self.names[-1], tensor)

    def forward(self, *inputs: Any) -> Any:
        """Runs the calls of the graph as they are."""
        return self.returned(self.calls(*self.operands(inputs)))

    def device(self) -> torch.device:
        """The device of its inputs, on which it runs if it reads no tensor of the model."""
        values = (node.meta.get("example_value") for node in self.calls.graph.find_nodes(op="placeholder"))
        return next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))

    def operands(self, inputs: Sequence[Any]) -> list[Any]:
        """The operands of the graph: the model's tensors, then the inputs."""
        return [*(getattr(self, name) for name in self.names), *inputs]

    def returned(self, results: Any) -> Any:
        """The output of the module, given the results of the graph."""
        return results[0] if self.alone else tuple(results)


def call_of_graph(model: nn.Module, backend: Backend, settings: CallSettings) -> Callable[..., Any]:
    """The front end of a `OneGraph` (`memfit.capture.frontend`); the backend may change the graph that it receives."""
    assert isinstance(model, OneGraph)
    made: list[Callable[..., Any]] = []

    def run(*inputs: Any) -> Any:
        operands = model.operands(inputs)
        if not made:
            made.append(backend(_copy(model.calls), operands))
        return model.returned(made[0](*operands))

    return run


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    (output,) = module.graph.find_nodes(op="output")
    (copy,) = graph.find_nodes(op="output")
    copy.meta = dict(output.meta)
    return fx.GraphModule(nn.Module(), graph)
