"""The joint graph is handed over and nothing else is made of it; logs that somebody asked for are written."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from memfit.capture.dynamo.trace_joint import hand_over_joint


def handed_over(model: nn.Module, read: Any) -> None:
    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        hand_over_joint(gm, inputs, strides={}, read=read)
        return gm.forward

    torch.compile(model, backend=backend)(torch.randn(2, 3))


def test_a_joint_graph_is_handed_over_with_the_number_of_outputs_of_its_forward_pass() -> None:
    found: list[tuple[set[Any], int]] = []
    handed_over(nn.Linear(3, 2), lambda joint, number: found.append(({n.target for n in joint.graph.nodes}, number)))
    ((targets, number),) = found
    assert torch.ops.aten.addmm.default in targets and torch.ops.aten.mm.default in targets
    assert number == 1


def test_without_a_gradient_nothing_is_handed_over() -> None:
    found: list[Any] = []
    handed_over(nn.Linear(3, 2).requires_grad_(False), lambda *joint: found.append(joint))
    assert found == []


def test_an_error_while_reading_comes_out() -> None:
    def read(joint: fx.GraphModule, number: int) -> None:
        raise LookupError("not among these")

    with pytest.raises(Exception, match="not among these"):
        handed_over(nn.Linear(3, 2), read)


def test_logs_of_graphs_that_were_asked_for_are_written() -> None:
    log = logging.getLogger("torch._functorch._aot_autograd.graph_compile.__aot_joint_graph")
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    level = log.level
    log.addHandler(handler)
    try:
        handed_over(nn.Linear(3, 2), lambda *joint: None)
        assert text.getvalue() == ""
        log.setLevel(logging.INFO)
        handed_over(nn.Linear(3, 2), lambda *joint: None)
        assert "addmm" in text.getvalue()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
