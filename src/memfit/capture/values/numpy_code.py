"""NumPy calls in a forward pass, which Dynamo writes into its graph as torch ops.

A sum, a mean or an exponential of torch rounds differently from NumPy's: the order of addition or the approximation
differs. A step that is planned with torch's ops is not the baseline step.

*Idea*: NumPy makes a call on plain numbers (`np.sqrt(width)`) once, while the graph is made, and the result is a
constant of the graph. Calls on arrays are planned if they can round in only one way, the correct one: calls that move
elements, compare them, or make one correctly rounded operation per element. If a graph holds any other call, the model
is captured again with NumPy left untraced; Dynamo breaks the graph at NumPy calls, and the subgraphs around them are
planned. A graph that was not planned and runs as plain code calls NumPy itself.

Known limits: the list is by name; calls that are not on it break graphs, and so do complex numbers, whose products and
absolute values are sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from memfit.fxir.refused import UnplannableGraphError
from memfit.fxir.user_lines import user_line
from memfit.torch_compat.compiler import numpy_method_wrapper, numpy_operator_wrapper, numpy_to_tensor_wrapper
from memfit.torch_compat.core import pytree

__all__ = ["NumpyCodeError", "call_numpy", "numbers_by_numpy", "refuse_rounding_numpy"]

_WRAPPERS: tuple[Any, ...] = (numpy_to_tensor_wrapper, numpy_method_wrapper, numpy_operator_wrapper)

_MOST_NUMBERS = 4096
"""The most numbers of a constant, which is written into the code of the graph."""

_ROUNDED_ONE_WAY = frozenset(
    {
        *("abs", "absolute", "add", "divide", "mul", "multiply", "neg", "negative", "square", "sub"),
        *("subtract", "true_divide", "truediv", "ceil", "clip", "floor", "maximum", "minimum", "rint", "sign", "where"),
        *("eq", "equal", "ge", "greater", "greater_equal", "gt", "le", "less", "less_equal", "lt", "ne", "not_equal"),
        *("all", "amax", "amin", "any", "argmax", "argmin", "max", "min", "nonzero"),
        *("arange", "array", "asarray", "astype", "copy", "empty", "eye", "full", "full_like", "ones", "ones_like"),
        *("zeros", "zeros_like", "float16", "float32", "float64", "int32", "int64"),
        *("broadcast_to", "concatenate", "expand_dims", "flatten", "flip", "getitem", "item", "moveaxis", "ravel"),
        *("repeat", "reshape", "roll", "squeeze", "stack", "swapaxes", "take", "tile", "transpose"),
    }
)
"""Calls whose results are the same however they are computed, by their names in NumPy."""


class NumpyCodeError(UnplannableGraphError):
    """A graph holds a NumPy call that torch rounds differently."""


def numbers_by_numpy(gm: fx.GraphModule) -> None:
    """Replaces NumPy calls on plain numbers in a Dynamo graph by constants that NumPy computes.

    Args:
        gm: the graph; changed in place.
    """
    changed = False
    for node in gm.graph.nodes:
        if not isinstance(node.target, numpy_to_tensor_wrapper) or node.all_input_nodes:
            continue
        try:
            value = np.asarray(getattr(np, _name(node))(*node.args, **node.kwargs))
        except Exception:  # NumPy raises any kind of error for arguments that are torch's own
            continue
        like = node.meta.get("example_value")
        is_short = value.dtype.kind in "fiub" and value.size <= _MOST_NUMBERS
        made = torch.from_numpy(value.copy()) if is_short else None
        if made is None or not isinstance(like, torch.Tensor) or (made.shape, made.dtype) != (like.shape, like.dtype):
            continue
        node.target, node.args, node.kwargs = torch.tensor, (value.tolist(),), {"dtype": made.dtype, "device": "cpu"}
        changed = True
    if changed:
        gm.recompile()


def refuse_rounding_numpy(graph: fx.Graph) -> None:
    """Raises an error if a NumPy call in a Dynamo graph would have different bits as a torch op.

    Raises:
        NumpyCodeError: if there is such a call.
    """
    for node in graph.nodes:
        if not isinstance(node.target, _WRAPPERS):
            continue
        name = _name(node)
        if name not in _ROUNDED_ONE_WAY or _counts_in_floats(name, node) or _is_complex(node):
            place = user_line(node.meta.get("stack_trace") or "")
            raise NumpyCodeError(
                f"NumPy computes `{name}`{f' at {place}' if place else ''}, which torch rounds otherwise; mark that "
                "function with @torch.compiler.disable, which leaves it plain code between planned subgraphs"
            )


def call_numpy(gm: fx.GraphModule) -> None:
    """Makes a Dynamo graph that runs as plain code call NumPy itself instead of torch.

    Args:
        gm: the graph; changed in place.

    Raises:
        NumpyCodeError: if the graph calls a function that NumPy has under another name.
    """
    calls = [node for node in gm.graph.nodes if isinstance(node.target, _WRAPPERS)]
    for node in calls:
        node.target = _called(node)
    if calls:
        gm.recompile()


def _called(node: fx.Node) -> Callable[..., Any]:
    """The NumPy call that a node stands for, as a function of tensors."""
    target, name = cast(Any, node.target), _name(node)
    if isinstance(target, numpy_to_tensor_wrapper):
        function = next((getattr(m, name) for m in (np, np.linalg, np.fft) if hasattr(m, name)), None)
    elif isinstance(target, numpy_method_wrapper):
        function = functools.partial(_method, name)
    else:
        function = target.op
    if function is None:
        raise NumpyCodeError(f"NumPy's `{name}` is in a graph that was not planned, and memfit cannot call it")

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.numpy(), (args, kwargs))
        return pytree.tree_map_only((np.ndarray, np.generic), torch.as_tensor, function(*args, **kwargs))

    return call


def _method(name: str, array: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(array, name)(*args, **kwargs)


def _name(node: fx.Node) -> str:
    """The name of the function or method in NumPy."""
    return str(cast(Any, node.target).__name__).removeprefix("wrapped_")


def _counts_in_floats(name: str, node: fx.Node) -> bool:
    """Whether a call makes a range of floating-point numbers, for which NumPy uses another step than torch."""
    return name == "arange" and any(isinstance(a, float | fx.Node) for a in (*node.args, *node.kwargs.values()))


def _is_complex(node: fx.Node) -> bool:
    """Whether a node makes or takes complex numbers."""
    values = [n.meta.get("example_value") for n in (node, *node.all_input_nodes)]
    return any(bool(getattr(getattr(value, "dtype", None), "is_complex", False)) for value in values)
