from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from memfit.runtime.dispatch import call_cheaply

_aten = torch.ops.aten


def rewritten(run: Callable[..., Any], *operands: torch.Tensor) -> fx.GraphModule:
    module = make_fx(run)(*operands)
    call_cheaply(module.graph)
    module.recompile()
    return module


def metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: _aten.view.default(x, [12, 2]),
        lambda x: _aten.view.default(_aten.view.default(x, [12, 2]), [2, -1]),
        lambda x: _aten.expand.default(_aten.unsqueeze.default(x, 0), [5, -1, -1, -1]),
        lambda x: _aten.t.default(_aten.select.int(x, 1, 2)),
        lambda x: _aten.transpose.int(x, 0, 2),
        lambda x: _aten.transpose.int(_aten.transpose.int(x, 0, 2), 0, 1),
        lambda x: _aten.permute.default(x, [2, 0, 1]),
        lambda x: _aten.as_strided.default(x, [3, 2], [1, 4], 3),
        lambda x: _aten.t.default(_aten.view.default(_aten.detach.default(x), [6, 4])),
    ],
)
def test_views_are_what_they_were(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    module = rewritten(call, x)
    assert metadata(module(x)) == metadata(call(x))
    kept = [n for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert not kept


def test_products_are_bitwise_the_same() -> None:
    def run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = _aten.mm.default(a, b), _aten.addmm.default(bias, a, b), _aten.addmm.default(bias, a, b, beta=0.5)
        return (*made, _aten.bmm.default(a[None], b[None]))

    operands = torch.randn(5, 7), torch.randn(7, 3), torch.randn(3)
    module = rewritten(run, *operands)
    for ours, theirs in zip(module(*operands), run(*operands), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.mm in {n.target for n in module.graph.nodes}


X, W = torch.randn(2, 6, 5, 5), torch.rand(6)
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (_aten.convolution.default, (X, torch.randn(4, 3, 3, 3), W[:4], [2, 1], [1, 0], [1, 2], False, [0, 0], 2)),
    (_aten.convolution.default, (X, torch.randn(6, 2, 3, 3), None, [2, 2], [1, 1], [1, 1], True, [1, 0], 1)),
    (_aten.native_batch_norm.default, (X, W, W, W.clone(), W.clone(), True, 0.1, 1e-5)),
    (_aten.native_batch_norm.default, (X, None, None, W, W, False, 0.1, 1e-5)),
    (_aten.native_layer_norm.default, (X, [5, 5], torch.rand(5, 5), None, 1e-6)),
    (_aten.native_group_norm.default, (X, W, None, 2, 6, 25, 3, 1e-5)),
    (_aten.native_dropout.default, (X, 0.3, True)),
    (_aten.embedding.default, (torch.randn(9, 4), torch.randint(9, (3, 2)), 1)),
    (_aten.relu.default, (X,)),
    (_aten.relu_.default, (X.clone(),)),
    (_aten.tanh.default, (X,)),
    (_aten.sigmoid.default, (X,)),
    *((op, (X, W[:5])) for op in (_aten.add.Tensor, _aten.mul.Tensor, _aten.sub.Tensor, _aten.div.Tensor)),
    *((op, (X.bfloat16(), 0.7)) for op in (_aten.add.Tensor, _aten.mul.Tensor, _aten.sub.Tensor, _aten.div.Tensor)),
    (_aten.add.Tensor, (torch.arange(3), 2)),
    (_aten.add_.Tensor, (X.clone(), X)),
    (_aten.mul_.Tensor, (X.clone(), 0.5)),
    (_aten.where.self, (X > 0, X, torch.tensor(0.0))),
    (_aten.sum.dim_IntList, (X, [0, 2, 3])),
    (_aten.sum.dim_IntList, (X.half(), [-1], True)),
    (_aten.mean.dim, (X, [2, 3], True)),
]


@pytest.mark.parametrize(("op", "operands"), CALLS)
def test_python_s_binding_is_the_same_op(op: Any, operands: tuple[Any, ...]) -> None:
    graph = fx.Graph()
    made = graph.call_function(op, tuple(map(graph.placeholder, [f"x{i}" for i in range(len(operands))])))
    graph.output(made)
    call_cheaply(graph)
    assert not any(isinstance(node.target, torch._ops.OpOverload) for node in graph.nodes)
    results = []
    for run in (op, fx.GraphModule({}, graph)):
        own = [operand.clone() if isinstance(operand, torch.Tensor) else operand for operand in operands]
        torch.manual_seed(0)
        made = run(*own)
        results.append([*(made if isinstance(made, tuple) else (made,)), *own])
    for ours, theirs in zip(*results, strict=True):
        if isinstance(ours, torch.Tensor):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_views_that_cancel_are_not_made() -> None:
    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        twice = _aten.t.default(_aten.t.default(a))
        there_and_back = _aten.transpose.int(_aten.transpose.int(b, 0, 1), 0, 1)
        return _aten.mm.default(_aten.detach.default(twice), there_and_back)

    operands = torch.randn(5, 7), torch.randn(7, 3)
    module = rewritten(run, *operands)
    assert [n.target for n in module.graph.nodes if n.op == "call_function"] == [torch.mm]
    assert torch.equal(module(*operands), run(*operands))


def test_what_is_no_view_is_none_for_the_caller() -> None:
    def run(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = _aten._unsafe_view.default(_aten.mm.default(a, a), [3, 1, 3])
        return _aten._unsafe_view.default(_aten.mm.default(a, a), [1, 3, 3]), _aten.add.Tensor(inner, 1.0)

    module = rewritten(run, torch.randn(3, 3))
    returned, _ = module(torch.randn(3, 3))
    assert not returned._is_view()
    assert [n.target for n in module.graph.nodes].count(torch.Tensor.view) == 1


def test_what_the_caller_gets_is_a_tensor_of_its_own() -> None:
    def run(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made = operator.add(a, 1.0)
        return made, _aten.t.default(_aten.t.default(made)), _aten.detach.default(made)

    made = rewritten(run, torch.randn(3, 4))(torch.randn(3, 4))
    assert len({id(tensor) for tensor in made}) == 3
    assert len({metadata(tensor) for tensor in made}) == 1
