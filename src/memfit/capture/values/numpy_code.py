"""NumPy in a forward pass, which Dynamo writes into its graph as ops of torch.

A sum, a mean or an exponential of torch is rounded otherwise than NumPy's: other orders of addition, other
approximations. A step that is planned with them is not the plain one.

*Idea*: a call on plain numbers (`np.sqrt(width)`) is made by NumPy once, while the graph is made, and its result is a
constant of the graph. Calls on arrays are planned where they are rounded in one way only, which is the correct one:
calls that move elements, compare them, or take one correctly rounded step for each. Where a graph holds any other call,
the model is captured anew with NumPy left alone; Dynamo's graphs break there, and the subgraphs around them are
planned. A graph that was not planned and runs as plain code calls NumPy itself.

Known limits: the list is by name; what it does not know breaks graphs, and so do complex numbers, whose products and
absolute values are sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import fx
from torch._dynamo.utils import numpy_method_wrapper, numpy_operator_wrapper, numpy_to_tensor_wrapper
from torch.utils import _pytree as pytree

from memfit.fxir.refused import UnplannableGraphError
from memfit.fxir.user_lines import user_line

__all__ = ["NumpyCodeError", "call_numpy", "numbers_by_numpy", "refuse_rounding_numpy"]

_WRAPPERS: tuple[Any, ...] = (numpy_to_tensor_wrapper, numpy_method_wrapper, numpy_operator_wrapper)

_MOST_NUMBERS = 4096
"""Of a constant, which is written into the code of the graph."""

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
    """NumPy computes in a graph what torch rounds otherwise."""


def numbers_by_numpy(gm: fx.GraphModule) -> None:
    """Makes calls of NumPy on plain numbers in a graph of Dynamo's constants, computed by NumPy.

    Args:
        gm: the graph; changed in place.
    """
    changed = False
    for node in gm.graph.nodes:
        if not isinstance(node.target, numpy_to_tensor_wrapper) or node.all_input_nodes:
            continue
        try:
            value = np.asarray(getattr(np, _name(node))(*node.args, **node.kwargs))
        except Exception:  # whatever NumPy says to arguments that are torch's own
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
    """Raises if calls of NumPy in a graph of Dynamo's would have other bits as ops of torch.

    Raises:
        NumpyCodeError: if there is one.
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
    """Lets a graph of Dynamo's that runs as plain code call NumPy where it would call torch in its place.

    Args:
        gm: the graph; changed in place.

    Raises:
        NumpyCodeError: if it calls what NumPy has under another name.
    """
    calls = [node for node in gm.graph.nodes if isinstance(node.target, _WRAPPERS)]
    for node in calls:
        node.target = _called(node)
    if calls:
        gm.recompile()


def _called(node: fx.Node) -> Callable[..., Any]:
    """The call of NumPy that a node stands for, on tensors."""
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
    """Of the function or method in NumPy."""
    return str(cast(Any, node.target).__name__).removeprefix("wrapped_")


def _counts_in_floats(name: str, node: fx.Node) -> bool:
    """Whether it is a range of floating-point numbers, which NumPy makes of another step than torch."""
    return name == "arange" and any(isinstance(a, float | fx.Node) for a in (*node.args, *node.kwargs.values()))


def _is_complex(node: fx.Node) -> bool:
    """Whether it makes or takes complex numbers."""
    values = [n.meta.get("example_value") for n in (node, *node.all_input_nodes)]
    return any(bool(getattr(getattr(value, "dtype", None), "is_complex", False)) for value in values)
