"""Models of torchvision: `torchvision:resnet50`, `torchvision:vit_b_16?dropout=0.1`.

Known limits: image and video classification and segmentation; detection, optical flow and quantized models need
other targets than labels, so they are refused (a `file.py:factory` can build them).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from memfit.errors import SpecError
from memfit.zoo.example import Example, Request, class_targets, classifier_loss, finish, random_batch, sample_shape
from memfit.zoo.lazy import require
from memfit.zoo.query import unknown

__all__ = ["make"]

_REFUSED = ("detection", "optical_flow", "quantization")


def make(request: Request) -> Example:
    """Builds a torchvision model with random weights.

    Raises:
        SpecError: if torchvision or the model is missing, or the model is of a kind that is not supported.
    """
    models = require("torchvision.models", extra="vision")
    name, known = request.name, models.list_models()
    if name not in known:
        raise unknown("torchvision model", name, known)
    module = models.get_model_builder(name).__module__
    kind = module.removeprefix("torchvision.models.").partition(".")[0]
    for key in request.options:
        if key.startswith("weights"):
            raise SpecError(f"nothing is downloaded: leave {key!r} out (spec: {request.title!r})")
    if kind in _REFUSED:
        raise SpecError(
            f"{request.title} is for {kind.replace('_', ' ')}; write a file.py:factory that makes its inputs and loss"
        )
    shape = _shape(request, kind)
    options = {**_size_options(name, shape), **dict(request.options)}
    if kind == "segmentation":
        options = {"weights_backbone": None, "num_classes": 21, **options}
    elif name in ("googlenet", "inception_v3"):
        options = {"init_weights": True, **options}
    model = models.get_model(name, weights=None, **options)
    classes = int(options.get("num_classes") or (400 if kind == "video" else 1000))
    sites = shape[1:] if kind == "segmentation" else ()
    inputs, target = random_batch(request, shape), class_targets(request, classes, *sites)
    return finish(request, model, (inputs,), loss_fn=partial(classifier_loss, target=target))


def _shape(request: Request, kind: str) -> tuple[int, ...]:
    if kind == "video":
        size = 112 if request.name in ("r3d_18", "mc3_18", "r2plus1d_18") else 224
        shape = sample_shape(request, (3, 16, size, size), "C×T×H×W")
    else:
        size = 299 if request.name == "inception_v3" else 224
        shape = sample_shape(request, (3, size, size), "C×H×W")
    if shape[0] != 3:
        raise SpecError(f"{request.title} takes 3 channels; timm's models take others too (shape: {shape})")
    return shape


def _size_options(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Transformers with a fixed grid must be told the size of the input."""
    if name.startswith("vit_"):
        return {"image_size": shape[-1]}
    if name.startswith("maxvit_"):
        return {"input_size": shape[-2:]}
    return {}
