"""The forward pass of a whole model and its loss as one graph of calls, which can be cut into stages.

Dynamo traces the unmodified module with fake tensors, on one micro-batch; nothing runs. Its graph has one placeholder
for each parameter, buffer and input, and calls at the level of the model's source code, so a part of the graph is again
a module, which can be captured and planned like any other module.

Known limits: the model and its loss must be one graph; an error names the code that breaks the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from memfit.capture.call_settings import CallSettings
from memfit.capture.dynamo.capture_subgraphs import first_lines
from memfit.capture.dynamo.logging_calls import logs_left_out
from memfit.capture.frontend import frontend_of
from memfit.capture.loss.reading import scalar_loss
from memfit.capture.state.snapshot import preserved
from memfit.errors import CaptureError
from memfit.torch_compat.compiler import TorchDynamoException, dynamo_config
from memfit.torch_compat.core import pytree

__all__ = ["ForwardGraph", "PipelineLoss", "capture_forward", "flatten_inputs", "loss_of"]

PipelineLoss = Callable[..., torch.Tensor]
"""Takes the model's output, and the target if there is one; returns a scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardGraph:
    """Model and loss as one graph.

    Attributes:
        graph: placeholders, calls and one output: the loss.
        states: for each placeholder of a parameter, buffer or other tensor of the model, the tensor's name; the first
            name if a tensor has several.
        tensors: the tensors with those names.
        inputs: for each placeholder of an input, its place among the leaves of `flatten_inputs`.
    """

    graph: fx.Graph
    states: Mapping[fx.Node, str]
    tensors: Mapping[str, torch.Tensor]
    inputs: Mapping[fx.Node, int]

    @property
    def calls(self) -> list[fx.Node]:
        """Nodes of the graph that compute, in order."""
        return [n for n in self.graph.nodes if n.op not in ("placeholder", "output")]

    @property
    def loss(self) -> fx.Node:
        """The node of the loss."""
        (output,) = self.graph.find_nodes(op="output")
        found: fx.Node = output.args[0][0]
        return found


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss_fn: PipelineLoss | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, args: Any, kwargs: Any, target: Any) -> torch.Tensor:
        return loss_of(self.model, args, kwargs, target, self.loss_fn)


def loss_of(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, loss_fn: PipelineLoss | None
) -> torch.Tensor:
    """Runs model and loss."""
    output = model(*args, **kwargs)
    if loss_fn is not None:
        return loss_fn(output, target) if target is not None else loss_fn(output)
    loss = scalar_loss(output, None)
    assert loss is not None, "no loss"
    return loss


def flatten_inputs(args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """All inputs of a step as a list of leaves, and the tree to put them together again."""
    return pytree.tree_flatten((list(args), dict(kwargs), target))


def capture_forward(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, loss_fn: PipelineLoss | None
) -> ForwardGraph:
    """Traces a model and its loss; leaves the model unchanged.

    Args:
        model: in training mode.
        args: positional inputs of one micro-batch.
        kwargs: keyword inputs.
        target: second argument of the loss, after the output; None if the loss takes only the output.
        loss_fn: the loss; without it the loss is the output's own `loss`.

    Returns:
        The graph.

    Raises:
        CaptureError: if the model is not in training mode, breaks the graph or has no scalar loss.
    """
    if not model.training:
        raise CaptureError(f"{type(model).__name__} is in eval mode; call model.train() first")
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append((gm, list(inputs)))
        (output,) = gm.graph.find_nodes(op="output")
        results = [n.meta["example_value"] for n in output.args[0]]
        return lambda *_: tuple(
            torch.empty(r.shape, dtype=r.dtype, device=r.device, requires_grad=r.requires_grad) for r in results
        )

    whole = _WithLoss(model, loss_fn)
    try:
        with (
            preserved(model, args, kwargs, target, loss_fn, values=False),
            dynamo_config.patch(logs_left_out(all_calls=True)),
        ):
            loss = frontend_of(whole)(whole, backend, CallSettings(fullgraph=True))(list(args), dict(kwargs), target)
    except TorchDynamoException as error:
        if "no loss" in str(error):
            raise CaptureError(
                "a pipeline needs a scalar loss: pass loss_fn, or let the model return one as `output.loss`"
            ) from None
        raise CaptureError(
            "a pipeline needs the model and its loss as one graph, and this breaks it: " + first_lines(str(error))
        ) from error
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CaptureError(f"loss_fn must return a scalar tensor (returned: {shape})")
    if not loss.requires_grad:
        raise CaptureError("no gradient of the loss reaches a parameter; is everything frozen or detached?")
    gm, operands = found[-1]
    return _with_sources(gm.graph, operands, model, flatten_inputs(args, kwargs, target)[0])


def _with_sources(graph: fx.Graph, operands: list[Any], model: nn.Module, leaves: list[Any]) -> ForwardGraph:
    names: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        names.setdefault(id(tensor), name)
    places = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    states: dict[fx.Node, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    inputs: dict[fx.Node, int] = {}
    for node, value in zip(graph.find_nodes(op="placeholder"), operands, strict=True):
        if id(value) in names:
            states[node] = names[id(value)]
        elif id(value) in places:
            inputs[node] = places[id(value)]
            continue
        elif isinstance(value, torch.Tensor):
            states[node] = f"constant_{len(tensors)}"
        else:
            raise CaptureError(
                f"the model takes an input that is no tensor and not constant: {value!r}; pass a tensor, or set it as "
                "an attribute of the model"
            )
        tensors[states[node]] = value
    return ForwardGraph(graph=graph, states=states, tensors=tensors, inputs=inputs)
