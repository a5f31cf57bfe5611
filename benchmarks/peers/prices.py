"""What a step costs by the price list memfit plans with, whoever runs it.

Wall-clock times of two steps differ by what else the machine does; the sum of the profiled times of their ops does
not. `Executed` watches every op that really runs, in place or not, first time or again, and `seconds` adds up
what each takes. An op that memfit's own capture never saw is measured the way memfit measures its own: alone, on
made-up operands of the same shapes and strides.

The loss is left out on both sides: the forward pass ends with the outputs, the backward pass begins with their
gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.capture.loss.reading import LossFunction, scalar_loss
from memfit.fxir.marks import METADATA_ONLY_PREFIX
from memfit.fxir.signature import cost_key
from memfit.ops.kernels.convolution import convolution_input_gradient, takes_input_shape_only
from memfit.profiling.benchmark import variants_of
from memfit.profiling.cost_cache import CostCache

__all__ = ["Executed", "executed_seconds"]


_aten = torch.ops.aten

_SAME_COST: dict[Any, Any] = {
    _aten.native_batch_norm.default: _aten._native_batch_norm_legit_functional.default,
    _aten.bernoulli_.float: _aten.bernoulli.p,
}
"""What eager mode runs and what memfit captures for it, beside the in-place ops."""


class Executed(TorchDispatchMode):
    """While active, counts the ops that run by what decides their cost; views cost nothing."""

    # Without these Dynamo would refuse to run compiled code under the mode; it only watches.
    is_infra_mode = classmethod(lambda cls: True)
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.nodes: dict[str, fx.Node] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Random ops that are replayed come wrapped in another call, which runs them.
        nodes = _nodes(func, args, kwargs) if isinstance(func, torch._ops.OpOverload) and not func.is_view else []
        result = func(*args, **kwargs)
        if nodes and (func._schema.is_mutable or not _is_view(result, (args, kwargs))):
            for node in nodes:
                key = cost_key(node)
                self.counts[key] += 1
                self.nodes.setdefault(key, node)
        return result

    def seconds(self, costs: CostCache, device: torch.device) -> float:
        """Sum of the profiled times; ops without a price are measured now and join the list."""
        with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []), torch.no_grad():
            for key, node in self.nodes.items():
                if key not in costs:
                    costs[key] = variants_of(node, device)
        return float(sum(count * costs[key][0].seconds for key, count in self.counts.items()))


def executed_seconds(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFunction | None,
    costs: CostCache,
    device: torch.device,
) -> float:
    """Profiled time of the forward and the backward pass of one step.

    Args:
        call: what runs the model.
        args: positional inputs.
        kwargs: keyword inputs.
        loss_fn: as for `memfit.plan`; its own ops do not count.
        costs: the price list, extended by what is missing.
        device: where the ops run.

    Returns:
        Seconds.
    """
    executed = Executed()
    with executed:
        output = call(*args, **kwargs)
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    loss = scalar_loss(output, loss_fn)
    gradients = (
        [torch.ones_like(t) for t in leaves]
        if loss is None
        else torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    )
    pairs = [(t, g) for t, g in zip(leaves, gradients, strict=True) if g is not None]
    del output, loss
    with executed:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    return executed.seconds(costs, device)


def _nodes(func: Any, args: Any, kwargs: Any) -> list[fx.Node]:
    """A call as nodes of a graph, under the names of memfit's capture."""
    if (
        func is _aten.convolution_backward.default
        and (args[-1][0] and args[-1][1])
        and takes_input_shape_only(args[1], args[2], *args[3:-1])
    ):
        weight = _node(func, (*args[:-1], [False, True, args[-1][2]]), kwargs)
        return [weight, _node(convolution_input_gradient, args[:-1], kwargs, metadata_only=args[1])]
    return [_node(_SAME_COST.get(func) or _functional(func), args, kwargs)]


def _functional(func: Any) -> Any:
    """The op that an in-place call stands for, itself if there is none."""
    namespace, _, name = func._schema.name.partition("::")
    if not name.endswith("_") or name.endswith("__"):
        return func
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    return getattr(packet, func._overloadname, func) if packet is not None else func


def _node(func: Any, args: Any, kwargs: Any, *, metadata_only: torch.Tensor | None = None) -> fx.Node:
    """A call as one node, its operands as placeholders that know shape, strides and dtype."""
    graph = fx.Graph()
    made: dict[int, fx.Node] = {}

    def placeholder(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            node = graph.placeholder(f"{METADATA_ONLY_PREFIX if value is metadata_only else 't'}{len(made)}")
            node.meta["val"] = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device="meta")
            made[id(value)] = node
        return made[id(value)]

    named_args, named_kwargs = pytree.tree_map(placeholder, (args, kwargs))
    call = graph.call_function(func, tuple(named_args), dict(named_kwargs))
    if metadata_only is not None:
        call.meta["val"] = made[id(metadata_only)].meta["val"]  # a gradient has the shape of what it is for
    return call


def _is_view(result: Any, operands: Any) -> bool:
    """Whether all results live in the memory of operands."""
    known = {t.untyped_storage()._cdata for t in pytree.tree_leaves(operands) if isinstance(t, torch.Tensor)}
    results = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    return all(t.untyped_storage()._cdata in known for t in results)
