"""Gradients made under a trace are laid out, and have the bits, as those that autograd makes without one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit.bits import same_bits
from memfit.capture.eager.gradient_fills import fills_in_gradients
from tests.capture.eager.test_layouts_of_kernels import calls_of, database

SELECTING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "clamp": lambda a, b: torch.clamp(a, b - 1, b + 1),
    "clamp_min": lambda a, b: torch.clamp(a, min=b),
    "clamp_max_in_place": lambda a, b: (a * 1).clamp_(max=b),
    "numbers": lambda a, b: torch.clamp(a, torch.tensor(-1.0), torch.tensor(1.0)) + b,
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 0.5) * b,
}

KNOWN = {"masked_select"}
"""Its gradient is contiguous in eager, whatever the data."""

ELSEWHERE = {"prod", "max", "min", "median", "nanmedian", "masked_fill"}
"""They are ops of their own in a trace; see test_gradients_on_values.py and test_masked_fills.py."""


class Permuted(nn.Module):
    """An op on tensors that lie as after a convolution over time, and a weight whose gradient sums over them."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor], *, both: bool) -> None:
        super().__init__()
        self.layer, self.last, self.weight = nn.Linear(64, 48), nn.Linear(48, 48), nn.Parameter(torch.rand(48) + 0.5)
        self.op, self.both = op, both

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layer(x), self.layer(x * 0.7).tanh()
        first = first.transpose(1, 2).contiguous().transpose(1, 2)
        second = second.transpose(1, 2).contiguous().transpose(1, 2) if self.both else second
        return self.last(self.op(first * self.weight, second) * self.weight)


class AllOf(nn.Module):
    """Every second op, side by side."""

    def __init__(self, *, both: bool) -> None:
        super().__init__()
        self.of = nn.ModuleDict({name: Permuted(op, both=both) for name, op in [*SELECTING.items()][both::2]})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([permuted(x) for permuted in self.of.values()])


@pytest.mark.parametrize("both", [False, True], ids=["one permuted", "both permuted"])
def test_bits_of_eager(both: bool) -> None:
    torch.manual_seed(0)
    plain, x = AllOf(both=both), torch.randn(2, 20, 64)
    fitted = copy.deepcopy(plain)
    memfit.fit(fitted, (x,), budget="1GiB", loss_fn=lambda o: o.square().mean(), search_seconds=0.1)
    for model in (plain, fitted):
        model(x).square().mean().backward()
    for (name, p), q in zip(plain.named_parameters(), fitted.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and same_bits(p.grad, q.grad), name


class _Through(TorchDispatchMode):
    """What makes autograd take the formulas that it takes in a trace."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _gradients(op: Any, operands: Any) -> list[Tensor | None]:
    made = pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), operands)
    torch.manual_seed(0)
    outputs = [t for t in pytree.tree_leaves(op(made[0], *made[1], **made[2])) if isinstance(t, Tensor)]
    ends = [t for t in outputs if t.requires_grad]
    leaves = [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor) and t.requires_grad]
    if not ends or not leaves:
        return []
    return list(torch.autograd.grad(ends, leaves, [torch.ones_like(t) * 0.3 for t in ends], allow_unused=True))


def test_gradients_of_all_ops_lie_as_without_a_trace() -> None:
    plain: list[tuple[Any, Any, list[Tensor | None]]] = []
    for op in database():
        for operands in calls_of(op, ("transposed",)) if op.supports_autograd else ():
            try:
                plain.append((op, operands, _gradients(op, operands)))
            except Exception:  # it takes no such operands
                continue
    differing: set[str] = set()
    with fills_in_gradients(), enable_python_dispatcher(), _Through():
        for op, operands, gradients in plain:
            for a, b in zip(gradients, _gradients(op, operands), strict=True):
                dense = a is not None and a.layout is torch.strided and b is not None
                if (a is None) != (b is None) or (dense and not (a.stride() == b.stride() and same_bits(a, b))):
                    differing.add(op.name)
    assert sum(len(gradients) for _, _, gradients in plain) > 600
    assert differing <= KNOWN | ELSEWHERE
