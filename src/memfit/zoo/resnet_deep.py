"""`zoo:resnet-deep`: ResNet-200, the deepest model on which OME was measured; torchvision does not have it.

Bottleneck stages of 3, 24, 36 and 3 blocks from torchvision's own parts; other depths by options.

Source: He et al. 2016 (identity mappings) for the stages; the blocks are torchvision's (stride in the 3×3
convolution, normalisation after each convolution), as in its ResNet-50.
"""

from __future__ import annotations

from memfit.errors import SpecError
from memfit.zoo.example import Example, Request, classifier, sample_shape
from memfit.zoo.lazy import require

__all__ = ["make_resnet_deep"]


def make_resnet_deep(
    request: Request, *, stage1: int = 3, stage2: int = 24, stage3: int = 36, stage4: int = 3, classes: int = 1000
) -> Example:
    """The network with images and labels."""
    resnet = require("torchvision.models.resnet", extra="vision")
    shape = sample_shape(request, (3, 224, 224), "C×H×W")
    if shape[0] != 3:
        raise SpecError(f"{request.title} takes 3 channels (shape: {shape})")
    model = resnet.ResNet(resnet.Bottleneck, [stage1, stage2, stage3, stage4], num_classes=classes)
    return classifier(request, model, shape, classes)
