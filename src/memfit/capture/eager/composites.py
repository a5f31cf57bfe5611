"""Composite calls whose rounding or result layout depends on the layout of an intermediate, while a graph is made.

Kernels on CPU compute full vectors with one code path and the elements left at the end of a run of memory with another:
an exponential may differ there in its last bit. So a sigmoid written in place over a part of each row rounds
differently from a sigmoid over a tensor without gaps. Eager `nn.GRUCell` makes its gates in place, while a graph has
tensors without gaps. Here the gates get rows with a gap of one element, so that kernels run row by row as in eager
mode.

Randomized leaky ReLU makes its result and draws its noise in contiguous layout, whatever the layout of its operand; the
functional op in a graph keeps the operand's layout. So the functional op gets a contiguous operand.

Singular values and eigenvalues come from a kernel that also computes vectors where a gradient may need them, and from
another one, with other bits, where none does. torch takes every tensor under a mode for one that may need a gradient
(`isTensorSubclassLike`), and a graph is traced under modes. Here the tensor itself decides, as in eager mode.

Known limits: on CPU only; GPUs have kernels for whole cells. Other chains of in-place ops over parts of rows are not
recognised; the proof compares the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from memfit.capture.eager.python_kernels import kernels_in_place
from memfit.torch_compat.core import DispatchKey, OpOverload

__all__ = ["composites_of_eager"]

_aten = torch.ops.aten
_KEY = DispatchKey.CompositeImplicitAutograd


def composites_of_eager() -> AbstractContextManager[None]:
    """While active, these calls are traced so that rounding and layout are those of eager mode."""
    kernels: dict[OpOverload, Callable[..., Any]] = {
        _aten.gru_cell.default: _gru_cell,
        _aten.rrelu.default: _rrelu,
        _aten.linalg_svdvals.default: _singular_values,
        _aten.linalg_eigvalsh.default: _real_eigenvalues,
        _aten.linalg_eigvals.default: _eigenvalues,
    }
    return kernels_in_place(kernels, _KEY)


def _gru_cell(
    x: torch.Tensor,
    hidden: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor:
    if x.device.type != "cpu":
        # `decompose` would look up the kernel registered here and call this function again.
        found: torch.Tensor = _aten.gru_cell.default._op_dk(_KEY, x, hidden, w_ih, w_hh, b_ih, b_hh)
        return found
    from_x = torch.nn.functional.linear(x, w_ih, b_ih).unsafe_chunk(3, 1)
    from_hidden = torch.nn.functional.linear(hidden, w_hh, b_hh).unsafe_chunk(3, 1)
    reset = _in_rows(from_hidden[0] + from_x[0]).sigmoid()
    update = _in_rows(from_hidden[1] + from_x[1]).sigmoid()
    new = (from_x[2] + from_hidden[2] * reset).tanh()
    return (hidden - new) * update + new


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same rows, with a gap in memory after each."""
    return torch.nn.functional.pad(tensor, (0, 1))[:, :-1]


def _rrelu(
    x: torch.Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    noise = torch.empty_like(x, memory_format=torch.contiguous_format)
    if training:
        x = x.contiguous()
    made: torch.Tensor = _aten.rrelu_with_noise.default(x, noise, lower, upper, training, generator)
    return made


def _singular_values(matrix: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    _, values, _ = _aten._linalg_svd.default(matrix, False, _may_need_gradient(matrix), driver=driver)
    return cast(torch.Tensor, values)


def _real_eigenvalues(matrix: torch.Tensor, uplo: str = "L") -> torch.Tensor:
    values, _ = _aten._linalg_eigh.default(matrix, uplo, _may_need_gradient(matrix))
    return cast(torch.Tensor, values)


def _eigenvalues(matrix: torch.Tensor) -> torch.Tensor:
    if _may_need_gradient(matrix):
        return cast(torch.Tensor, _aten.linalg_eig.default(matrix)[0])
    return cast(torch.Tensor, _aten._linalg_eigvals.default(matrix))


def _may_need_gradient(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad
