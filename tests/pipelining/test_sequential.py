"""Models as lists of layers, for systems that take nothing else."""

from __future__ import annotations

import pytest
import torch

from memfit import zoo
from memfit.tools.sequential_pipeline import as_sequential, equal_ends


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("torchvision:resnet18", (3, 32, 32)),
        ("zoo:seed-gpt2?layers=3&width=24&heads=2&vocabulary=50&dropout=0.0", (8,)),
    ],
)
def test_layers_are_the_model_and_run_apart(name: str, shape: tuple[int, ...]) -> None:
    """Any layer may be the first of a stage, whose input is a leaf."""
    example = zoo.build(name, batch=2, shape=shape)
    layers = as_sequential(example.model)
    assert equal_ends(layers, 2)[-1] == len(layers)
    (x,) = example.args
    whole = example.model(x)
    whole = getattr(whole, "logits", whole)
    for layer in layers:
        x = layer(x).detach().requires_grad_()
    torch.testing.assert_close(x, whole)
