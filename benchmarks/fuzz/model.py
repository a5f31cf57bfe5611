"""Random models: stem, blocks with a skip, head, loss, optimizer and inputs, assembled from a recipe."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.fuzz.block import IMAGE, VOLUME, Apply
from benchmarks.fuzz.losses import Loss, output_of
from benchmarks.fuzz.recipe import TOKENS, Recipe, laid_out, module_of

__all__ = ["Case", "RandomModel", "assemble"]


class RandomModel(nn.Module):
    """Stem, blocks one after the other, and a head; one result may be added to a later one."""

    def __init__(
        self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module, skips: dict[int, int], form: str
    ) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head
        self.skips, self.form = skips, form

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, more: dict[str, torch.Tensor] | None = None
    ) -> Any:
        x = self.stem(x)
        if scale is not None:
            x = x * scale
        results = {}
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index in self.skips.values():
                results[index] = x
            if index in self.skips and results[self.skips[index]].shape == x.shape:
                x = x + results[self.skips[index]]
        if more is not None:
            x = x + more["bias"]
        return output_of(self.form, self.head(x), x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with what is needed to train it.

    Attributes:
        recipe: it was assembled from.
        model: in training mode.
        loss: takes the output.
        optimizer: of the trained parameters.
    """

    recipe: Recipe
    model: RandomModel
    loss: Loss
    optimizer: torch.optim.Optimizer

    def inputs(self, number: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """Positional and keyword inputs of the n-th forward pass, made anew each time."""
        recipe, dtype = self.recipe, self.recipe.mode.dtype
        generator = torch.Generator().manual_seed(1000 + number)
        device = torch.device(recipe.mode.device)
        is_text = recipe.stem in ("plain", "padding", "norm", "frequency")
        shape = _smaller(recipe.shape, number, is_text=is_text) if recipe.mode.sizes else recipe.shape
        if is_text:
            return (torch.randint(0, TOKENS, shape, generator=generator).to(device),), {}
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
        x = laid_out(x, "last" if recipe.mode.channels_last else recipe.strides)
        if recipe.input_gradient:
            x.requires_grad_()
        keywords: dict[str, Any] = {}
        if "scale" in recipe.keywords:
            keywords["scale"] = torch.full((1,), 0.8, dtype=dtype, device=device)
        if "more" in recipe.keywords:
            keywords["more"] = {"bias": torch.full((1,), 0.1, dtype=dtype, device=device)}
        return (x,), keywords

    def described(self) -> list[str]:
        """The blocks by name, with the kind where one has several."""
        steps = zip(self.recipe.steps, self.model.blocks, strict=True)
        return [f"{s.block}[{b.extra_repr() or ''}]" if isinstance(b, Apply) else f"{s.block}[{type(b).__name__}]"
                for s, b in steps]  # fmt: skip


def _smaller(shape: tuple[int, ...], number: int, *, is_text: bool) -> tuple[int, ...]:
    """The shape of the inputs of the n-th pass: whole, with fewer samples, shorter, and so on."""
    turn = number % 3
    rows = max(2, shape[0] - 1) if turn == 1 or (turn == 2 and not is_text) else shape[0]
    if turn == 2 and is_text and len(shape) == 2:
        return (rows, max(2, shape[1] - 1))
    return (max(2, rows - 1) if turn == 2 else rows, *shape[1:])


def assemble(recipe: Recipe) -> Case:
    """The model of a recipe, with its loss and its optimizer; equal each time, sharing nothing with the last."""
    with torch.device(recipe.mode.device):
        return _assembled(recipe)


def _assembled(recipe: Recipe) -> Case:
    rng = random.Random(recipe.seed)
    torch.manual_seed(recipe.seed)
    dtype = recipe.mode.dtype
    stem = _stem(recipe).to(dtype)
    blocks = [module_of(step, dtype) for step in recipe.steps]
    torch.manual_seed(recipe.seed)
    head = _head(recipe, rng).to(dtype)
    made = [block for block in blocks if block is not None]
    model = RandomModel(stem, made, head, recipe.skips, recipe.form).train()
    if recipe.mode.channels_last and len(recipe.shape) == IMAGE:
        model._apply(lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == IMAGE else t)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in rng.sample(parameters, int(recipe.frozen * (len(parameters) - 1))):
        parameter.requires_grad_(False)
    targets = torch.randint(0, 1000, (MOST_ROWS,))
    optimizer = OPTIMIZERS[recipe.optimizer]([p for p in parameters if p.requires_grad])
    if recipe.mode.tolerance:
        # Adam makes whole steps of gradients that are zero but for rounding, as that of a bias before a normalisation.
        # The gradients themselves are compared too, as they are.
        for group in optimizer.param_groups:
            group.update({"eps": LARGE_EPS} if "eps" in group else {})
    return Case(
        recipe=recipe,
        model=model,
        loss=Loss(recipe.loss, recipe.form, targets),
        optimizer=optimizer,
    )


MOST_ROWS = 4000

LARGE_EPS = 1e-5
"""Of Adam, where rounding may differ; torch's own is 1e-8."""

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
}


def _stem(recipe: Recipe) -> nn.Module:
    shape = recipe.shape
    if recipe.stem == "none":
        return nn.Identity()
    if recipe.stem == "layer":
        return nn.Conv2d(shape[1], shape[1], 3, padding=1) if len(shape) == IMAGE else nn.Linear(shape[-1], 16)
    more = {"padding": {"padding_idx": 0}, "norm": {"max_norm": 2.0}, "frequency": {"scale_grad_by_freq": True}}
    width = recipe.steps[0].shape[-1] if recipe.steps else recipe.shape_after[-1]
    return nn.Embedding(TOKENS, width, **more.get(recipe.stem, {}))


def _head(recipe: Recipe, rng: random.Random) -> nn.Module:
    shape = recipe.shape_after
    if len(shape) in (IMAGE, VOLUME):
        ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "mean": lambda x: x.flatten(2).mean(2),
            "max": lambda x: x.flatten(2).amax(2),
            "flat": lambda x: x.flatten(1),
        }
        way = rng.choice(sorted(ways))
        width = shape[1] if way != "flat" else math.prod(shape[1:])
        return nn.Sequential(Apply(lambda self, x: ways[way](x), way), nn.Linear(width, 7))
    if len(shape) == 3 and rng.random() < 0.5:
        return nn.Sequential(Apply(lambda self, x: x.mean(1), "mean"), nn.Linear(shape[-1], 7))
    return nn.Linear(shape[-1], 7)
