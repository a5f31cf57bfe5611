"""Models of transformers, from their configuration alone: `hf:gpt2`, `hf:gpt2?n_layer=6&n_embd=256`.

The name is a model type (`gpt2`, `llama`, `bert`, `t5`, `vit`), not a repository of the hub: nothing is downloaded. The
options are fields of its configuration; `head` picks the task for which the model is trained, and with `loss_only=true`
the model returns the loss without the logits, which then need not exist whole.

Known limits: text and image-classification models with one input; the defaults of a configuration can be large
(`hf:llama` has 6.7 billion parameters).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from memfit.errors import SpecError
from memfit.zoo.example import Example, Request, class_targets, finish, random_batch, sample_shape, token_batch
from memfit.zoo.lazy import require
from memfit.zoo.query import check_known, unknown

__all__ = ["make"]

_HEADS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}

_BESIDES_FIELDS = {"attn_implementation", "head", "loss_only", "num_labels"}

_DEFAULT_TOKENS = 512


def make(request: Request) -> Example:
    """Builds a transformers model with random weights; its own `output.loss` is the loss.

    Raises:
        SpecError: if transformers is missing, or the model type, the head, an option or its value is unknown.
    """
    auto = require("transformers.models.auto", extra="hf")
    known = auto.configuration_auto.CONFIG_MAPPING_NAMES
    if request.name not in known:
        raise unknown("transformers model type", request.name, known)
    config = _config(request, auto.configuration_auto.CONFIG_MAPPING[request.name])
    head = str(request.options.get("head") or _default_head(request, config, auto.modeling_auto))
    if head not in _HEADS:
        raise unknown("head", head, _HEADS)
    mapping = getattr(auto.modeling_auto, _HEADS[head])
    if type(config) not in mapping:
        raise SpecError(f"{request.title} has no {head} head; leave head= out for its own one")
    if head == "image-classification":
        inputs = _images(request, config)
    else:
        inputs = _tokens(request, config)
    labels = class_targets(request, config.num_labels) if head.endswith("classification") else inputs.clone()
    found = mapping[type(config)]
    model = (found[0] if isinstance(found, tuple) else found)(config)
    if head == "causal-lm" and getattr(model, "loss_type", None) is None:
        model.loss_type = "ForCausalLM"  # else the same loss is used with a warning, at which Dynamo breaks the graph
    if request.options.get("loss_only") is True:
        model = _LossOnly(model)
    return finish(request, model, (inputs,), {"labels": labels})


class _LossOnly(nn.Module):
    """Returns the loss and nothing else, so that nothing holds the projection onto the vocabulary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {"loss": self.model(*args, **kwargs).loss}


def _config(request: Request, config_class: Any) -> Any:
    own = config_class()
    known = own.to_dict().keys() | own.attribute_map.keys() | _BESIDES_FIELDS
    check_known(request.title, request.options, known)
    options = {key: value for key, value in request.options.items() if key not in ("head", "loss_only")}
    if isinstance(vocabulary := options.get("vocab_size"), int):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(own, key, None)
            if isinstance(token, int) and token >= vocabulary:
                options.setdefault(key, vocabulary - 1)
    try:
        config = config_class(**options)
    except Exception as error:  # the defaults work, so the options are at fault, whatever the type of the error
        raise SpecError(f"{request.title} cannot be configured: {' '.join(str(error).split())}") from error
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    return config


def _default_head(request: Request, config: Any, modeling: Any) -> str:
    """The usual head of a model type; for an encoder, classification comes before the masked-word objective."""
    order = ["seq2seq-lm", "causal-lm", "masked-lm", "image-classification", "sequence-classification"]
    if not getattr(config, "is_encoder_decoder", False):
        order.remove("seq2seq-lm")
        if type(config) in modeling.MODEL_FOR_MASKED_LM_MAPPING:
            order.insert(0, "sequence-classification")
    for head in order:
        if type(config) in getattr(modeling, _HEADS[head]):
            return head
    raise SpecError(f"{request.title} has none of the heads {', '.join(_HEADS)}; write a file.py:factory for it")


def _tokens(request: Request, config: Any) -> Tensor:
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    (length,) = sample_shape(request, (min(_DEFAULT_TOKENS, limit or _DEFAULT_TOKENS),), "T")
    if limit and length > limit:
        field = text.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        raise SpecError(
            f"{request.title} takes up to {limit} tokens; ask for fewer or add {field}={length} to its options "
            f"(shape: ({length},))"
        )
    return token_batch(request, length, text.vocab_size)


def _images(request: Request, config: Any) -> Tensor:
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shape = sample_shape(request, (getattr(config, "num_channels", 3), height, width), "C×H×W")
    config.num_channels = shape[0]
    if hasattr(config, "image_size"):
        config.image_size = shape[1] if shape[1] == shape[2] else list(shape[1:])
    return random_batch(request, shape)
