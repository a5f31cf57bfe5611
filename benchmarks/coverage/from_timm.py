"""One small member of every file of timm's models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.coverage.script import NotBuilt, Sample, Script, loss_of, train

__all__ = ["group", "names", "script"]

SMALLER = (
    "test_",
    "femto",
    "atto",
    "pico",
    "nano",
    "xxs",
    "xx_small",
    "zepto",
    "tiny",
    "_xt",
    "mini",
    "050",
    "_t0",
    "xs",
    "x_small",
    "18",
    "small",
    "_s",
    "_t",
    "_b0",
    "_0",
    "s12",
    "_26",
    "lite",
    "121",
    "_base",
    "b",
)
"""What names of small members have in them, smallest first."""


def names() -> Iterator[str]:
    import timm
    from timm.models._registry import _module_to_models

    known = set(timm.list_models())
    for _, members in sorted(_module_to_models.items()):
        found = sorted(name for name in members if name in known)
        if found:
            yield min(found, key=lambda name: (_rank(name), len(name), name))


def _rank(name: str) -> int:
    return next((rank for rank, part in enumerate(SMALLER) if part in name), len(SMALLER))


def group(name: str) -> str:
    return "all"


def script(name: str) -> Script:
    return train(lambda: sample(name))


def sample(name: str) -> Sample:
    """The model, of two layers where it takes a depth, for the smallest images with which it is built and runs."""
    import timm

    config = timm.get_pretrained_cfg(name)
    own = config.input_size[-1]
    last = ""
    sizes = [size for size in sorted({32, 64, 96, 128, own}) if size <= own]
    for shallow, size in itertools.product(({"depth": 2}, {}), sizes):
        options: dict[str, Any] = {"num_classes": 10, **shallow}
        if config.fixed_input_size and size != own:
            options["img_size"] = size
        torch.manual_seed(0)
        try:
            model = timm.create_model(name, pretrained=False, **options).train()
            x = torch.rand(2, config.input_size[0], size, size)
            loss_of(model(x)).backward()
        except Exception as error:
            last = f"{type(error).__name__}: {error}"
            continue
        torch.manual_seed(0)
        return Sample(model=timm.create_model(name, pretrained=False, **options), args=(x,))
    raise NotBuilt(last[:200])
