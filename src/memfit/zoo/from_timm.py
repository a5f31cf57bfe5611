"""Models of timm: `timm:vit_small_patch16_224`, `timm:inception_v4?drop_rate=0.2`.

Known limits: image classifiers; a feature extractor, which has no classes of its own, gets a head of 1000.
"""

from __future__ import annotations

from typing import Any

from memfit.errors import SpecError
from memfit.zoo.example import Example, Request, classifier, sample_shape
from memfit.zoo.lazy import require
from memfit.zoo.query import unknown

__all__ = ["make"]


def make(request: Request) -> Example:
    """Builds a timm model with random weights, for timm's input size of the model unless a shape is requested.

    Raises:
        SpecError: if timm or the model is missing.
    """
    timm = require("timm", extra="timm")
    if not timm.is_model(request.name):
        raise unknown("timm model", request.name, timm.list_models())
    for key in request.options:
        if key.startswith("pretrained"):
            raise SpecError(f"nothing is downloaded: leave {key!r} out (spec: {request.title!r})")
    config = timm.get_pretrained_cfg(request.name)
    own = tuple(config.input_size)
    shape = sample_shape(request, own, "C×H×W")
    options: dict[str, Any] = {"num_classes": config.num_classes or 1000}
    if shape[0] != own[0]:
        options["in_chans"] = shape[0]
    if shape[1:] != own[1:] and config.fixed_input_size:
        options["img_size"] = shape[1:]
    options.update(request.options)
    model = timm.create_model(request.name, pretrained=False, **options)
    return classifier(request, model, shape, options["num_classes"])
