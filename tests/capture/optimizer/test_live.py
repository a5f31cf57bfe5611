"""The optimizers that train a module are found, each once, also inside wrappers."""

from __future__ import annotations

import torch
from torch import nn

from memfit.capture.optimizer.live import live_optimizer


def test_the_optimizer_of_a_module_is_found() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer, another = torch.optim.AdamW(model.parameters()), torch.optim.SGD(other.parameters(), lr=0.1)
    assert live_optimizer(model, "cpu") is optimizer
    assert live_optimizer(nn.Sequential(other), "cpu") is another


def test_there_may_be_none() -> None:
    assert live_optimizer(nn.Linear(4, 4), "cpu") is None


def test_the_states_of_several_are_added_up() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 32, bias=False))
    first, second = (torch.optim.AdamW(layer.parameters()) for layer in model)
    found = live_optimizer(model, "cpu")
    assert isinstance(found, int) and 2 * 4 * (256 + 512) <= found <= 2 * 4 * (256 + 512) + 64
    assert live_optimizer(model[0], "cpu") is first and live_optimizer(model[1], "cpu") is second


def test_a_wrapper_counts_once() -> None:
    from accelerate import Accelerator

    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    wrapper = Accelerator(cpu=True).prepare(optimizer)
    assert live_optimizer(model, "cpu") is optimizer and wrapper.optimizer is optimizer
