"""NumPy in a forward pass, which Dynamo writes into its graph as ops of torch.

A sum, a mean or an exponential of torch is rounded otherwise than NumPy's: other orders of addition, other
approximations. A step that is planned with them is not the plain one.

*Idea*: NumPy's code is planned where it is rounded in one way only, which is the correct one: what moves or makes
elements, compares them, or takes one correctly rounded step for each. Where a graph holds any other call, the model is
captured anew with NumPy left alone; Dynamo's graphs break there, and the pieces around them are planned.

Known limits: the list is by name; what it does not know breaks graphs.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._dynamo.utils import numpy_method_wrapper, numpy_operator_wrapper, numpy_to_tensor_wrapper

from memfit.capture.plain_parts import UnplannableGraphError

__all__ = ["NumpyCodeError", "refuse_rounding_numpy"]

_WRAPPERS: tuple[Any, ...] = (numpy_to_tensor_wrapper, numpy_method_wrapper, numpy_operator_wrapper)

_ROUNDED_ONE_WAY = frozenset(
    {
        *("abs", "absolute", "add", "divide", "mul", "multiply", "neg", "negative", "sqrt", "square", "sub"),
        *("subtract", "true_divide", "truediv", "ceil", "clip", "floor", "maximum", "minimum", "rint", "sign", "where"),
        *("eq", "equal", "ge", "greater", "greater_equal", "gt", "le", "less", "less_equal", "lt", "ne", "not_equal"),
        *("all", "amax", "amin", "any", "argmax", "argmin", "argsort", "max", "min", "nonzero", "sort"),
        *("arange", "array", "asarray", "astype", "copy", "empty", "eye", "full", "full_like", "ones", "ones_like"),
        *("zeros", "zeros_like", "float16", "float32", "float64", "int32", "int64"),
        *("broadcast_to", "concatenate", "expand_dims", "flatten", "flip", "getitem", "item", "moveaxis", "ravel"),
        *("repeat", "reshape", "roll", "squeeze", "stack", "swapaxes", "take", "tile", "transpose"),
    }
)
"""Calls whose results are the same however they are computed, by their names in NumPy."""


class NumpyCodeError(UnplannableGraphError):
    """NumPy computes in a graph what torch rounds otherwise."""


def refuse_rounding_numpy(graph: fx.Graph) -> None:
    """Raises if calls of NumPy in a graph of Dynamo's would have other bits as ops of torch.

    Raises:
        NumpyCodeError: if there is one.
    """
    for node in graph.nodes:
        if not isinstance(node.target, _WRAPPERS):
            continue
        name = str(getattr(node.target, "__name__", "")).removeprefix("wrapped_")
        if name not in _ROUNDED_ONE_WAY:
            raise NumpyCodeError(f"NumPy computes `{name}`, which torch rounds otherwise")
