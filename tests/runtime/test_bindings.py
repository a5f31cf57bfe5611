from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from memfit.runtime.bindings import call_cheaply

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


def test_views_that_cancel_are_not_made() -> None:
    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        twice = _aten.t.default(_aten.t.default(a))
        there_and_back = _aten.transpose.int(_aten.transpose.int(b, 0, 1), 0, 1)
        return _aten.mm.default(_aten.detach.default(twice), there_and_back)

    operands = torch.randn(5, 7), torch.randn(7, 3)
    module = rewritten(run, *operands)
    assert [n.target for n in module.graph.nodes if n.op == "call_function"] == [torch.mm]
    assert torch.equal(module(*operands), run(*operands))


def test_what_the_caller_gets_is_a_tensor_of_its_own() -> None:
    def run(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made = operator.add(a, 1.0)
        return made, _aten.t.default(_aten.t.default(made)), _aten.detach.default(made)

    made = rewritten(run, torch.randn(3, 4))(torch.randn(3, 4))
    assert len({id(tensor) for tensor in made}) == 3
    assert len({metadata(tensor) for tensor in made}) == 1
