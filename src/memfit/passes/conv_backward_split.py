"""Rewrites of the joint graph that lower memory and change no bit.

- **Split convolution backward.** `convolution_backward` returns the input's and the weight's gradient at
  once, so input, gradient-in and gradient-out are alive together. Its weight half needs input and
  gradient-out; its input half needs gradient-out, weight and only the input's *shape*. So run the weight half, free the
  input, and run the input half with a metadata-only tensor (right shape and strides, no memory). This was checked
  bitwise on CPU over strides, groups, kernels and memory formats; the profiler checks it again on each machine and
  shape.
- **Shapes only.** The backward op of a pooling takes the pooled tensor but uses only its shape; it gets a metadata-only
  tensor, so that nothing is saved for it.
- **No copies of tensors that are not overwritten.** For an in-place activation whose backward needs its input, autograd
  clones that input; in a functional graph the input itself still exists.
- **Masked before unpooling.** The gradient of `max_pool(relu(x))` goes to the positions of the maxima, and at these
  positions the mask of the ReLU equals the mask of the pooled tensor. So the mask is applied to the small gradient, and
  backward does not need the result of the ReLU.
- **Weight gradients first.** A gradient that no other op reads is computed as soon as its operands exist, so the saved
  input can be freed before the input's gradient is made.
- **In place.** Capture functionalises `relu_`, `add_`, `dropout`; if an op is the last use of an operand, the op can
  overwrite the operand again. Only kernels that read an element before they write it are listed: pointwise ones, and
  batch normalisation on CPU, which takes its statistics first and whose backward runs by channels.

Source of the first rewrite: the place of the step's peak in convolutional networks, measured in docs/design.md.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.marks import (
    HALF_OF,
    METADATA_ONLY_PREFIX,
    STANDS_FOR,
    is_view,
    original,
    returned_storages,
    storage_key,
)
from memfit.ops.kernels.convolution import (
    _takes_metadata_only,
    convolution_input_gradient,
    input_gradient_beside_stand_in,
    takes_input_shape_only,
)
from memfit.ops.registry import rule_of
from memfit.passes.replace_uses import replace_uses
from memfit.torch_compat.core import OpOverload, detect_fake_mode

__all__ = [
    "drop_clones",
    "halves_of",
    "hoist_weight_gradients",
    "metadata_only_attribute",
    "metadata_only_shape_operands",
    "in_place_arguments",
    "mark_halves",
    "mask_before_unpooling",
    "split_convolution_backward",
]

_aten = torch.ops.aten


def split_convolution_backward(module: fx.GraphModule, *, rounded: bool = False) -> None:
    """Splits every convolution backward that makes both gradients; see the module docstring.

    Args:
        module: the joint graph.
        rounded: whether gradients may differ by rounding, so that other kernels may be split as well.
    """
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=_aten.convolution_backward.default):
        halves = halves_of(node, rounded=rounded)
        getitems = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if halves is None or len(getitems) != len(node.users) or 0 not in getitems:
            continue
        of_data, of_weight = halves
        grad_output, data, *rest = of_data.args
        with graph.inserting_before(node):
            half = graph.call_function(of_weight.target, of_weight.args)
            half.meta = of_weight.meta
            gradient = graph.call_function(of_data.target, (grad_output, metadata_only_attribute(module, data), *rest))
            gradient.meta = of_data.meta
        replace_uses(getitems[0], gradient)
        graph.erase_node(getitems[0])
        for index in (1, 2):
            if index in getitems:
                getitems[index].update_arg(0, half)
        graph.erase_node(node)


def halves_of(node: fx.Node, *, rounded: bool = False) -> tuple[Call, Call] | None:
    """The calls that make the gradients of a convolution's input and of its weight one after the other.

    Args:
        node: a convolution backward.
        rounded: see `split_convolution_backward`.

    Returns:
        The two calls; None if the node makes one of them only, or its kernel computes both from the input.
    """
    mask = cast(Any, node.args[-1])
    if len(node.args) != 11 or not (mask[0] and mask[1]):
        return None
    grad_output, data, weight, *rest = cast(tuple[Any, ...], node.args[:-1])
    target = convolution_input_gradient
    if not takes_input_shape_only(data.meta["val"], weight.meta["val"], *rest):
        if not rounded:
            return None
        target = input_gradient_beside_stand_in
    values = node.meta["val"]
    of_data = Call(
        name=node.name,
        target=target,
        args=(grad_output, data, weight, *rest),
        meta={**node.meta, "val": values[0]},
    )
    of_weight = Call(
        name=node.name,
        target=_aten.convolution_backward.default,
        args=(*node.args[:-1], [False, True, bool(mask[2])]),
        meta={**node.meta, "val": (None, *values[1:])},
    )
    return of_data, of_weight


def mark_halves(graph: fx.Graph, alone: Container[fx.Node]) -> None:
    """Marks the two halves of each convolution backward that still match after all other rewrites.

    Args:
        graph: the joint graph.
        alone: calls that always run separately.
    """
    weight_halves = {}
    for node in graph.find_nodes(op="call_function", target=_aten.convolution_backward.default):
        grad_output, data, weight, *rest, mask = node.args
        if not mask[0] and mask[1] and node not in alone:
            weight_halves[grad_output, data, weight, str(rest)] = node
    for node in graph.find_nodes(op="call_function", target=convolution_input_gradient):
        grad_output, metadata_only, weight, *rest = node.args
        half = weight_halves.pop((grad_output, metadata_only.meta.get(STANDS_FOR), weight, str(rest)), None)
        if half is not None:
            half.meta[HALF_OF] = node.meta[HALF_OF] = node.name


def metadata_only_attribute(module: fx.GraphModule, original: fx.Node, like: torch.Tensor | None = None) -> fx.Node:
    """A `get_attr` node that stands for `original`, with the layout of `like` if given.

    Lowering puts a metadata-only tensor there.
    """
    like = original.meta["val"] if like is None else like
    number = sum(str(node.target).startswith(METADATA_ONLY_PREFIX) for node in module.graph.nodes)
    name = f"{METADATA_ONLY_PREFIX}{number}"
    with detect_fake_mode(like) or nullcontext():
        stand_in = torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device=like.device)
    module.register_buffer(name, stand_in, persistent=False)
    node = module.graph.get_attr(name)
    node.meta = {"val": stand_in, STANDS_FOR: original}
    return node


def drop_clones(module: fx.GraphModule) -> None:
    """Replaces clones by their source where neither is returned and source and clone have the same layout."""
    graph = module.graph
    returned = returned_storages(graph)
    given = {storage_key(node) for node in graph.find_nodes(op="placeholder")}  # the caller may overwrite its own
    for node in graph.find_nodes(op="call_function", target=_aten.clone.default):
        source = node.args[0]
        value, original = node.meta["val"], source.meta["val"]
        if (
            value.stride() == original.stride()
            and value.untyped_storage().nbytes() == original.untyped_storage().nbytes()
            and storage_key(node) not in returned
            and storage_key(source) not in returned | given
        ):
            replace_uses(node, source)
            graph.erase_node(node)


def mask_before_unpooling(module: fx.GraphModule) -> None:
    """Applies the mask of a ReLU before a max-pooling to the pooled gradient; zeros stay zeros either way."""
    graph = module.graph
    returned = returned_storages(graph)
    unpoolings: list[Any] = graph.find_nodes(op="call_function", target=_aten.max_pool2d_with_indices_backward.default)
    for unpooled in unpoolings:
        masked: Any = next(iter(unpooled.users), None)
        if len(unpooled.users) != 1 or masked.target is not _aten.threshold_backward.default:
            continue
        active, pooling = original(masked.args[1]), original(unpooled.args[-1]).args[0]
        results = {user.args[1]: user for user in pooling.users if user.target is operator.getitem}
        if (
            masked.args[0] is not unpooled
            or masked.args[2] != 0
            or active.target is not _aten.relu.default
            or original(pooling.args[0]) is not active
            or not {0, 1} <= results.keys()
            or storage_key(results[0]) in returned  # the caller may overwrite it before the backward pass
            or masked.meta["val"].stride() != unpooled.meta["val"].stride()
        ):
            continue
        gradient, pooled = unpooled.args[0], results[0]
        with graph.inserting_before(unpooled):
            early = graph.call_function(masked.target, (gradient, pooled, 0))
        values = [gradient.meta["val"], pooled.meta["val"]]
        with detect_fake_mode(values) or nullcontext():
            early.meta = {**masked.meta, "val": masked.target(*values, 0)}
        unpooled.update_arg(0, early)
        replace_uses(masked, unpooled)
        graph.erase_node(masked)


def metadata_only_shape_operands(module: fx.GraphModule) -> None:
    """Replaces operands that an op uses only for their shape by metadata-only tensors."""
    for node in [node for node in module.graph.nodes if isinstance(node.target, OpOverload)]:
        for position in rule_of(node.target).shape_only:
            operand = cast(fx.Node, node.args[position])
            if str(operand.target).startswith(METADATA_ONLY_PREFIX) or not _takes_metadata_only(operand.meta["val"]):
                continue
            with module.graph.inserting_before(node):
                node.update_arg(position, metadata_only_attribute(module, operand))


def hoist_weight_gradients(module: fx.GraphModule) -> None:
    """Moves ops that only make returned gradients to right after the last of their operands."""
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    position = {node: i for i, node in enumerate(graph.nodes)}

    def only_returned(node: fx.Node) -> bool:
        return bool(node.users) and all(
            user is output or (user.op == "call_function" and is_view(user) and only_returned(user))
            for user in node.users
        )

    for node in list(graph.nodes):
        if node.op != "call_function" or node.is_impure() or not only_returned(node):
            continue
        if all(a.op == "placeholder" for a in node.all_input_nodes):
            continue
        last = max((a for a in node.all_input_nodes), key=lambda a: position[a], default=None)
        if last is not None and last.op != "placeholder" and last.next is not node:
            last.append(node)
            # Keep positions comparable without renumbering: just after its last operand.
            position[node] = position[last]


def _over_first(target: Any) -> Callable[..., Any]:
    def run(first: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        return target(first, *rest, **kwargs)

    return run


def in_place_arguments(
    node: fx.Node, storages: Any, storage_of: dict[fx.Node, int], written: tuple[int, ...]
) -> list[int]:
    """Indices of operands that the node may overwrite: same shape, strides, dtype and storage size as the result."""
    rule = rule_of(node.target)
    value = node.meta.get("val")
    result = value[0] if isinstance(value, list | tuple) else value
    if not written or not isinstance(result, torch.Tensor):
        return []
    found: list[int] = []
    for position in rule.in_place:
        operand = node.args[position] if position < len(node.args) else None
        if not isinstance(operand, fx.Node) or operand not in storage_of:
            continue
        if rule.in_place_if is not None and not rule.in_place_if(node, position):
            continue
        if _may_overwrite(node, operand, result, storages, storage_of, written[0]):
            found.append(position)
    return found


def _may_overwrite(
    node: fx.Node, operand: fx.Node, result: torch.Tensor, storages: Any, storage_of: dict[fx.Node, int], written: int
) -> bool:
    value, storage = operand.meta.get("val"), storage_of[operand]
    # An input belongs to the caller; so does a tangent, which autograd may pass to several nodes and hooks at once.
    if not isinstance(value, torch.Tensor) or storages[storage].kind in ("static", "tangent"):
        return False
    alone = sum(1 for a in node.args if isinstance(a, fx.Node) and storage_of.get(a) == storage) == 1
    return (
        alone
        and value.shape == result.shape
        and value.stride() == result.stride()
        and value.dtype == result.dtype
        and not (value.is_conj() or value.is_neg())  # the written storage would hold the conjugate, with its flag
        and storages[storage].nbytes == storages[written].nbytes
    )
