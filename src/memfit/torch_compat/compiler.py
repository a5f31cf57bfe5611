"""Private interfaces of Dynamo and AOTAutograd; importing them takes seconds.

Modules are exported where memfit replaces one of their functions for the time of a capture.
"""

from __future__ import annotations

from typing import Any

import torch._dynamo
import torch._dynamo.config
import torch._dynamo.exc
import torch._dynamo.guards
import torch._functorch.aot_autograd as aot
import torch._inductor.config
import torch.fx.experimental._config
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import decorators, symbolic_convert, trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import skip
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, Unsupported
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.guards import install_guard
from torch._dynamo.utils import counters, numpy_method_wrapper, numpy_operator_wrapper, numpy_to_tensor_wrapper
from torch._dynamo.variables import (
    ConstantVariable,
    ListVariable,
    TensorVariable,
    TupleVariable,
    UserFunctionVariable,
)
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable, tracing_state_functions
from torch._dynamo.variables.user_defined import UserDefinedListVariable as _UserDefinedListVariable
from torch._functorch._aot_autograd import graph_compile

__all__ = [
    "BackendCompilerFailed",
    "ConstantVariable",
    "ListVariable",
    "SymNodeVariable",
    "TensorVariable",
    "TorchDynamoException",
    "TorchInGraphFunctionVariable",
    "TupleVariable",
    "UnspecializedNNModuleVariable",
    "UserDefinedListVariable",
    "Unsupported",
    "UserFunctionVariable",
    "aot",
    "aot_autograd",
    "counters",
    "decorators",
    "disable",
    "dynamo_config",
    "dynamo_guards",
    "forget_compiled_code",
    "graph_compile",
    "inductor_config",
    "install_guard",
    "numpy_method_wrapper",
    "numpy_operator_wrapper",
    "numpy_to_tensor_wrapper",
    "reset_code",
    "skip",
    "symbol_config",
    "symbolic_convert",
    "trace_rules",
    "tracing_state_functions",
    "wrap_inline",
]

dynamo_config = torch._dynamo.config
dynamo_guards = torch._dynamo.guards
inductor_config = torch._inductor.config
symbol_config: Any = torch.fx.experimental._config
disable: Any = torch._dynamo.disable
UserDefinedListVariable: Any = _UserDefinedListVariable


def forget_compiled_code() -> None:
    """Makes Dynamo compile all code anew, in the releases of torch that can."""
    forget = getattr(torch._dynamo, "reset_code_caches", None)
    if forget is not None:
        forget()
