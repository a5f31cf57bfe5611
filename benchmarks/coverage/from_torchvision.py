"""The smallest member of every family of torchvision, a family being a file of `torchvision.models`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.coverage.script import NotBuilt, Sample, Script, loss_of, train

__all__ = ["group", "names", "script"]

SMALLER = (
    "_s",
    "small",
    "tiny",
    "_t",
    "18",
    "11",
    "121",
    "x0_5",
    "0_5",
    "b0",
    "_400mf",
    "b_16",
    "resnext50",
    "squeezenet1_1",
)
"""What names of smaller members have in them."""


def names() -> Iterator[str]:
    from torchvision import models

    families: dict[str, list[str]] = {}
    for name in models.list_models():
        families.setdefault(models.get_model_builder(name).__module__, []).append(name)
    for members in families.values():
        yield min(members, key=lambda name: (not any(part in name for part in SMALLER), len(name), name))


def group(name: str) -> str:
    from torchvision import models

    parts = models.get_model_builder(name).__module__.split(".")
    return parts[2] if len(parts) > 3 else "classification"


def script(name: str) -> Script:
    return train(lambda: sample(name))


def sample(name: str) -> Sample:
    """Tiny inputs of the kind a model takes; the smallest images with which it runs."""
    from torchvision import models

    kind, last = group(name), ""
    more: dict[str, Any] = {"weights_backbone": None} if kind in ("detection", "segmentation") else {}
    if name in ("googlenet", "inception_v3"):
        more["init_weights"] = False
    for size in (64, 96, 224, 299):
        torch.manual_seed(0)
        try:
            made = _sample(kind, models.get_model(name, weights=None, **more), size)
            state = torch.get_rng_state()
            made.model.train()(*made.args)
        except (RuntimeError, ValueError, AssertionError) as error:
            last = str(error)
            continue
        torch.set_rng_state(state)
        torch.manual_seed(0)
        return _sample(kind, models.get_model(name, weights=None, **more), size)
    raise NotBuilt(last[:200])


def _sample(kind: str, model: torch.nn.Module, size: int) -> Sample:
    match kind:
        case "detection":
            if model.transform.fixed_size is None:  # else it makes each image one of 800 pixels
                model.transform.min_size, model.transform.max_size = (size,), size
            boxes = torch.tensor([[4.0, 4.0, 30.0, 40.0], [10.0, 8.0, 50.0, 60.0]])
            target: dict[str, torch.Tensor] = {"boxes": boxes, "labels": torch.tensor([1, 2])}
            target["masks"] = torch.ones(2, size, size, dtype=torch.uint8)
            target["keypoints"] = torch.ones(2, 17, 3) * 20
            target["labels"] = torch.ones(2, dtype=torch.long)
            images = [torch.rand(3, size, size) for _ in range(2)]
            return Sample(
                model=model, args=(images, [dict(target) for _ in range(2)]), loss_fn=lambda out: sum(out.values())
            )
        case "optical_flow":
            images = [torch.rand(1, 3, max(size, 128), max(size, 128)) for _ in range(2)]
            return Sample(model=model, args=tuple(images), loss_fn=loss_of)
        case "video":
            return Sample(model=model, args=(torch.rand(2, 3, 16 if size > 100 else 8, size, size),), loss_fn=loss_of)
    return Sample(model=model, args=(torch.rand(2, 3, size, size),), loss_fn=loss_of)
