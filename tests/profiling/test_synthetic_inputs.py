"""Kernels take the operands that are made up for them; on a CUDA device one that does not ends the process's work."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.profiling.synthetic_inputs import operand_values, operands_of


class Alone(TorchDispatchMode):
    """Runs each call a second time with made-up operands."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        graph = fx.Graph()

        def node(tensor: Tensor) -> fx.Node:
            made = graph.placeholder("operand")
            made.meta["val"] = tensor.detach()
            return made

        shown: Any = SimpleNamespace(target=func, name=str(func))
        shown.args, shown.kwargs = pytree.tree_map_only(Tensor, node, (args, kwargs or {}))
        own, named = operands_of(shown, torch.device("cpu"))
        func(*own, **named)
        self.ran.add(str(func))
        return func(*args, **(kwargs or {}))


def draw(name: str) -> Callable[[Tensor], Tensor]:
    return lambda x: getattr(torch, name)(x.sigmoid())


def solved(x: Tensor) -> Tensor:
    return torch.linalg.solve(x[:, :8], x)


def unpacked(x: Tensor) -> Tensor:
    return sum(part.sum() for part in torch.lu_unpack(*torch.linalg.lu_factor(x)))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("op", "run"),
    [
        ("aten.bernoulli.default", draw("bernoulli")),
        ("aten.poisson.default", draw("poisson")),
        ("aten.multinomial.default", lambda x: torch.multinomial(x.exp(), 2)),
        ("aten.normal.Tensor_Tensor", lambda x: torch.normal(x, x.abs())),
        ("aten.normal.float_Tensor", lambda x: torch.normal(0.0, x.abs())),
        ("aten.binomial.default", lambda x: torch.binomial(torch.full_like(x, 5), x.detach().sigmoid())),
        ("aten.binary_cross_entropy.default", lambda x: F.binary_cross_entropy(x.sigmoid(), x.tanh().abs())),
        ("aten.binary_cross_entropy_backward.default", lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach() * 0)),
        ("aten.multilabel_margin_loss_backward.default", lambda x: F.multilabel_margin_loss(x, (x > 0).long())),
        ("aten.nll_loss_backward.default", lambda x: F.cross_entropy(x, x.argmax(-1))),
        ("aten.embedding_dense_backward.default", lambda x: F.embedding(x.argmax(-1) % 8, x)),
        ("aten.max_pool2d_with_indices_backward.default", lambda x: F.max_pool2d(x[None], 2)),
        ("aten._linalg_solve_ex.default", solved),
        ("aten.lu_unpack.default", unpacked),
    ],
)
def test_a_kernel_takes_operands_made_up_for_it(op: str, run: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 12, requires_grad=True)
    with Alone() as alone:
        made = run(x)
        if made.requires_grad:
            made.sum().backward()
    assert op in alone.ran


def test_operands_of_one_call_are_others_and_the_same_each_time() -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder("operand") for _ in range(2)]
    for node in nodes:
        node.meta["val"] = torch.empty(4, 4)
    call: Any = SimpleNamespace(target=torch.ops.aten.add.Tensor, args=tuple(nodes), kwargs={}, name="add")
    first, second = (operand_values(call, torch.device("cpu")) for _ in range(2))
    assert all(torch.equal(first[node], second[node]) for node in nodes)
    assert not torch.equal(*first.values())
