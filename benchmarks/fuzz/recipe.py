"""Recipes of random models: what a seed stands for, chosen so that each block fits what comes before it.

A recipe is data; the model is assembled from it as often as one is needed, each time from the same random numbers. So
two copies share nothing, not even what cannot be copied, such as a generator.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from benchmarks.fuzz.block import IMAGE, SEQUENCE, VECTOR, VOLUME, Shape
from benchmarks.fuzz.catalogue import BLOCKS
from benchmarks.fuzz.losses import FORMS, LOSSES, Loss
from benchmarks.fuzz.modes import Mode, autocast

__all__ = ["TOKENS", "Recipe", "Step", "choose", "laid_out", "module_of"]


MOST_ELEMENTS = 40_000
TOKENS = 30
"""Of the vocabulary of models that begin with an embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One block of a recipe: which, from which seed, for inputs of which shape."""

    block: str
    seed: int
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A random model, its loss and its loop.

    Attributes:
        seed: it was chosen by.
        mode: see `modes`.
        stem: `none`, `layer`, or a kind of embedding where the input is tokens.
        shape: of the input.
        steps: its blocks.
        skips: from the index of a block to an earlier one whose result is added to its own, if the shapes allow.
        shape_after: of the last block.
        form: of the output.
        loss: by name.
        optimizer: by name.
        counts_optimizer: whether `fit` is told of the optimizer.
        frozen: share of the parameters that are not trained.
        input_gradient: whether the input gets a gradient.
        keywords: which keyword inputs there are.
        strides: layout of the input: `plain`, `last` or `transposed`.
    """

    seed: int
    mode: Mode
    stem: str
    shape: Shape
    steps: tuple[Step, ...]
    skips: dict[int, int]
    shape_after: Shape
    form: str
    loss: str
    optimizer: str
    counts_optimizer: bool
    frozen: float
    input_gradient: bool
    keywords: tuple[str, ...]
    strides: str


def choose(seed: int, mode: Mode, only: tuple[str, ...] = ()) -> Recipe:
    """The recipe of a seed.

    Args:
        seed: any number.
        mode: in which the model will run; blocks that cannot are left out.
        only: names of the blocks to take, in this order, instead of random ones.
    """
    torch.manual_seed(seed)
    rng = random.Random(f"{seed} {mode.name if mode.channels_last else ''}")
    tokens = not mode.channels_last and not only and rng.random() < 0.2
    dims = _dims(rng, mode, only)
    shape = _input_shape(rng, SEQUENCE if tokens else dims)
    stem = rng.choice(["plain", "padding", "norm", "frequency"]) if tokens else rng.choice(["none", "layer"])
    strides = "last" if mode.channels_last else rng.choice(["plain", "plain", "last", "transposed"])
    x = _after_stem(shape, stem, "plain" if tokens else strides, mode.dtype)
    wanted = list(only) or [""] * rng.randint(3, 8)
    steps: list[Step] = []
    tries = 0
    while wanted and tries < 80:
        tries += 1
        name = wanted[0] or rng.choice(sorted(n for n, b in BLOCKS.items() if x.dim() in b.dims))
        step = Step(block=name, seed=rng.randrange(2**31), shape=tuple(x.shape))
        after = _after(step, x, mode) if x.dim() in BLOCKS[name].dims else None
        if after is not None:
            steps.append(step)
            x = after
        if after is not None or (wanted[0] and tries % 8 == 0):  # a block asked for by name gets eight seeds
            wanted.pop(0)
    skips = {}
    if len(steps) > 3 and rng.random() < 0.6:
        late = rng.randrange(1, len(steps))
        skips[late] = rng.randrange(late)
    return Recipe(
        seed=seed,
        mode=mode,
        stem=stem,
        shape=shape[:2] if tokens else shape,
        steps=tuple(steps),
        skips=skips,
        shape_after=tuple(x.shape),
        form=rng.choice(FORMS),
        loss=rng.choice([name for name in sorted(LOSSES) if _takes(name, mode)]),
        optimizer=rng.choice(["sgd", "momentum", "adam", "adamw"]),
        counts_optimizer=rng.random() < 0.4,
        frozen=rng.choice([0.0, 0.0, 0.0, 0.3]),
        input_gradient=not tokens and rng.random() < 0.4,
        keywords=tuple(name for name in ("scale", "more") if rng.random() < 0.2),
        strides="plain" if tokens else strides,
    )


def module_of(step: Step, dtype: torch.dtype) -> torch.nn.Module | None:
    """The module of a recipe's block, the same each time."""
    torch.manual_seed(step.seed)
    made = BLOCKS[step.block].make(random.Random(step.seed), step.shape)
    return None if made is None else made._apply(lambda t: t.to(dtype) if t.is_floating_point() else t).train()


def _dims(rng: random.Random, mode: Mode, only: tuple[str, ...]) -> int:
    if only:
        return rng.choice(BLOCKS[only[0]].dims)
    return rng.choice(
        [IMAGE, IMAGE, VOLUME] if mode.channels_last else [IMAGE, IMAGE, SEQUENCE, SEQUENCE, VECTOR, VOLUME]
    )


def _input_shape(rng: random.Random, dims: int) -> Shape:
    batch = rng.choice([3, 4, 6])
    match dims:
        case 2:
            return batch, rng.choice([16, 24])
        case 3:
            return batch, rng.choice([6, 8, 12]), rng.choice([8, 16, 24])
        case 4:
            return batch, rng.choice([3, 4, 8]), rng.choice([8, 12, 15, 16]), rng.choice([8, 12, 16])
    return batch, rng.choice([2, 4]), rng.choice([4, 6]), rng.choice([6, 8]), rng.choice([6, 8])


def _after_stem(shape: Shape, stem: str, strides: str, dtype: torch.dtype) -> torch.Tensor:
    kept = stem != "layer" or len(shape) == IMAGE
    return laid_out(torch.randn(shape if kept else (*shape[:-1], 16), dtype=dtype), strides if kept else "plain")


def _after(step: Step, x: torch.Tensor, mode: Mode) -> torch.Tensor | None:
    """What a block makes of its input, None where it does not fit, does not run or makes nonsense."""
    try:
        module = module_of(step, mode.dtype)
        if module is None:
            return None
        with autocast(mode):
            made = module(x.detach().requires_grad_() * 1.0)
        made.float().sum().backward()
    except Exception:
        return None
    fits = made.dim() in (VECTOR, SEQUENCE, IMAGE, VOLUME) and len(made) == step.shape[0] and min(made.shape) > 0
    right = made.is_floating_point() and (mode.autocast is not None or made.dtype is mode.dtype)
    sane = 4 <= made.numel() <= MOST_ELEMENTS and bool(torch.isfinite(made).all()) and made.abs().max().item() < 1e4
    return made.detach() if fits and right and sane else None


def _takes(name: str, mode: Mode) -> bool:
    """Whether a loss has kernels for what a model gives it in a mode."""
    logits = torch.randn(6, 7, dtype=mode.autocast or mode.dtype).requires_grad_()
    try:
        with autocast(mode):
            Loss(name, "tensor", torch.arange(6))(logits).backward()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def laid_out(x: torch.Tensor, strides: str) -> torch.Tensor:
    """The same values in the layout `plain`, `last` (channels) or `transposed`."""
    if strides == "last" and x.dim() == IMAGE:
        return x.contiguous(memory_format=torch.channels_last)
    if strides == "last" and x.dim() == VOLUME:
        return x.contiguous(memory_format=torch.channels_last_3d)
    if strides == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x
