from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import benchmarks.fuzz
from benchmarks.fuzz.catalogue import BLOCKS
from benchmarks.fuzz.compare import plain_run
from benchmarks.fuzz.losses import LOSSES
from benchmarks.fuzz.modes import MODES
from benchmarks.fuzz.recipe import choose

SOURCES = sorted(Path(benchmarks.fuzz.__file__).parent.glob("*.py"))

ELSEWHERE = {
    "nn": {
        # Losses are functions there; these classes call them.
        *(name for name in dir(nn) if name.endswith(("Loss", "Loss2d"))),
        *(name for name in dir(nn) if name.startswith("Lazy")),  # have no weights before their first call
        *("Module", "Container", "RNNBase", "RNNCellBase", "DataParallel", "SyncBatchNorm"),
    },
    "F": {
        # The module of that name is in a block and calls the function.
        *(
            "avg_pool1d",
            "avg_pool2d",
            "avg_pool3d",
            "lp_pool1d",
            "lp_pool2d",
            "lp_pool3d",
            "group_norm",
            "instance_norm",
        ),
        *("adaptive_avg_pool1d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d"),
        *("adaptive_max_pool3d", "conv1d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("fractional_max_pool2d", "fractional_max_pool3d", "layer_norm", "rms_norm", "local_response_norm", "prelu"),
        *("max_unpool1d", "max_unpool2d", "max_unpool3d"),
        # The same function under a longer name.
        *("adaptive_max_pool1d_with_indices", "adaptive_max_pool3d_with_indices", "fractional_max_pool3d_with_indices"),
        *("max_pool1d_with_indices", "max_pool3d_with_indices"),
        # No gradient, no kernel on a CPU for what is trained here, or no function of a model at all.
        *("native_channel_shuffle", "grouped_mm", "scaled_grouped_mm", "scaled_mm", "linear_cross_entropy"),
        *("assert_int_or_pair", "boolean_dispatch", "handle_torch_function", "has_torch_function"),
        *("has_torch_function_unary", "has_torch_function_variadic"),
    },
}
"""Names of torch.nn and of torch.nn.functional that no block need have."""


def used(root: str) -> set[str]:
    """What the sources of the fuzz read from `nn` or `F`."""
    nodes = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())))
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == root
    }


def test_every_module_is_in_a_block() -> None:
    public = {
        name
        for name in dir(nn)
        if not name.startswith("_") and isinstance(getattr(nn, name), type) and issubclass(getattr(nn, name), nn.Module)
    }
    assert public - used("nn") <= ELSEWHERE["nn"]


def test_every_function_is_in_a_block_or_a_loss() -> None:
    names = [name for name in dir(nn.functional) if name[0].islower()]
    functions = {name for name in names if callable(getattr(nn.functional, name))}
    assert functions - used("F") <= ELSEWHERE["F"]


@pytest.mark.parametrize("family", sorted({block.family for block in BLOCKS.values()}))
def test_blocks_run(family: str) -> None:
    """Each of a family's blocks fits some input: asked for by name it is in the model."""
    for name, block in BLOCKS.items():
        if block.family == family:
            assert any(choose(seed, MODES["bitwise"], (name,)).steps for seed in range(8)), name


def test_a_recipe_is_the_same_each_time() -> None:
    for seed in range(5):
        assert choose(seed, MODES["bitwise"]) == choose(seed, MODES["bitwise"])
        assert plain_run(choose(seed, MODES["hooks"])).status != "not deterministic"


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_have_gradients(name: str) -> None:
    from benchmarks.fuzz.losses import Loss

    logits = torch.randn(6, 7, generator=torch.Generator().manual_seed(random.Random(name).randrange(99)))
    logits.requires_grad_()
    Loss(name, "tensor", torch.arange(6))(logits).backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    assert logits.grad.abs().sum() > 0
