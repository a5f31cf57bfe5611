"""The zoo's own models by name: `zoo:unet`, `zoo:gpt?layers=6&width=256`.

A maker takes the request and, as keyword-only parameters with defaults, the options that the spec may set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from memfit.zoo.example import Example, Request
from memfit.zoo.gpt import make_gpt, make_seed_gpt2
from memfit.zoo.keras_cnn import make_keras_cnn
from memfit.zoo.llama import make_llama
from memfit.zoo.lstm_classifier import make_lstm_classifier
from memfit.zoo.mlp import make_mlp
from memfit.zoo.query import check_for, unknown
from memfit.zoo.resnet_deep import make_resnet_deep
from memfit.zoo.unet import make_unet
from memfit.zoo.vgg16_trunk import make_vgg16_trunk

__all__ = ["MAKERS", "make"]

MAKERS: Mapping[str, Callable[..., Example]] = MappingProxyType(
    {
        "gpt": make_gpt,
        "keras-cnn": make_keras_cnn,
        "llama": make_llama,
        "lstm-classifier": make_lstm_classifier,
        "mlp": make_mlp,
        "resnet-deep": make_resnet_deep,
        "seed-gpt2": make_seed_gpt2,
        "unet": make_unet,
        "vgg16-trunk": make_vgg16_trunk,
    }
)


def make(request: Request) -> Example:
    """Builds one of the zoo's own models.

    Raises:
        SpecError: if the name or an option is unknown, or a value has the wrong type.
    """
    maker = MAKERS.get(request.name)
    if maker is None:
        raise unknown("zoo model", request.name, MAKERS.keys())
    check_for(maker, request.title, request.options)
    return maker(request, **request.options)
