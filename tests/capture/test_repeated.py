"""What is computed twice from the same operands is computed once."""

from __future__ import annotations

from collections import Counter

import torch

from memfit.capture.trace import capture_step
from tests.models import Masked


def test_masks_are_built_once() -> None:
    capture = capture_step(Masked(), (torch.randn(2, 8, 32),), {}, loss_fn=torch.Tensor.sum)
    targets = Counter(op.target for op in capture.graph.ops)
    assert targets["aten.tril.default"] == 1
    assert targets["aten.native_dropout.default"] == 3  # random: each is its own
