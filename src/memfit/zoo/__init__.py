"""Models by name, with a batch to train them on, and a little real data.

`build("torchvision:resnet50", batch=16)` returns the model, its inputs and its loss; `photo_crops` and `text_windows`
yield endless batches of data that is already installed, `whole_photographs` returns two of its images. An import of
this package imports torch and nothing larger.
"""

from __future__ import annotations

from memfit.zoo.data import photo_crops, standard_library_text, text_windows, whole_photographs
from memfit.zoo.example import Example
from memfit.zoo.own import MAKERS as ZOO_MODELS
from memfit.zoo.spec import build

__all__ = [
    "ZOO_MODELS",
    "Example",
    "build",
    "photo_crops",
    "standard_library_text",
    "text_windows",
    "whole_photographs",
]
