"""Calls that log are no reason to break a graph."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import Tensor, nn

from memfit.capture.dynamo.logging_calls import logs_left_out
from memfit.capture.training_step import capture_step
from memfit.pipelining.partition.forward_graph import capture_forward

log = logging.getLogger(__name__)


class Logging(nn.Module):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.method = method

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.method == "warning_once":
            log.warning_once("told once")  # type: ignore[attr-defined]
        else:
            log.warning("told every time")
        return self.second(torch.tanh(y))


@pytest.mark.smoke
@pytest.mark.parametrize(("method", "subgraphs"), [("warning_once", 1), ("warning", 2)])
def test_what_is_logged_once_is_left_out(method: str, subgraphs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is logged every time is still logged by a fitted model."""
    monkeypatch.setattr(logging.Logger, "warning_once", lambda self, message: None, raising=False)
    model, x = Logging(method), torch.randn(3, 8)
    capture = capture_step(model, (x,), {}, loss_fn=lambda output: output.square().sum())
    assert len(capture.subgraphs.subgraphs) == subgraphs
    forward = capture_forward(model, [x], {}, None, lambda output: output.square().sum())
    assert len(forward.calls) == 5


@pytest.mark.smoke
def test_torch_can_record_the_options() -> None:
    """It sorts sets among its options and writes them as JSON, and tells the user if it cannot."""
    (functions,) = logs_left_out(all_calls=True).values()
    assert "Logger.info" in json.loads(json.dumps(sorted(functions)))
    assert logging.Logger.info in functions and logging.Logger.setLevel not in functions
    with torch._dynamo.config.patch(logs_left_out(all_calls=True)):
        (nested,) = logs_left_out().values()
    assert logging.Logger.info in nested
