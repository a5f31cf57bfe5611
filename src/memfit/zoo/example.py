"""Example that is built from a spec: a model with one batch to train it on.

All random numbers here come from torch's CPU generator, whose state `memfit.zoo.build` seeds and afterwards restores,
so the same spec and seed give the same weights, inputs and labels on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.errors import SpecError
from memfit.zoo.query import Option

__all__ = [
    "Example",
    "Request",
    "as_text",
    "class_targets",
    "classifier",
    "classifier_loss",
    "finish",
    "language_model",
    "mean_squared_error",
    "random_batch",
    "sample_shape",
    "sequence_loss",
    "token_batch",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request for an example: a model with its options, and the batch, dtype, device and seed.

    Attributes:
        title: the spec in words, such as `torchvision resnet50`.
        name: part of the spec between the source and the options.
        options: options after the `?`.
        batch: samples in a batch.
        shape: of one sample, without the batch; `None` for the model's own.
        dtype: of parameters, buffers and floating inputs.
        device: device of the parameters, buffers and inputs.
        seed: of weights, inputs and labels.
    """

    title: str
    name: str
    options: Mapping[str, Option]
    batch: int
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A model and one batch to train it on.

    Attributes:
        model: in train mode.
        args: positional arguments of `model`; the batch is the first dimension of each.
        kwargs: keyword arguments of `model`.
        loss_fn: from the output of `model` to a scalar; `None` where `output.loss` is the loss.
        label: text for people, such as `torchvision resnet50 · 16×3×224×224 float32`.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], Tensor] | None = None
    label: str = ""

    def loss_and_target(self) -> tuple[Callable[..., Tensor] | None, Any]:
        """The loss and its target apart, if the target is a keyword of a `partial`; else the loss alone."""
        if isinstance(self.loss_fn, partial) and "target" in self.loss_fn.keywords:
            given, function = dict(self.loss_fn.keywords), self.loss_fn.func
            target = given.pop("target")
            return lambda output, target: function(output, target=target, **given), target
        return self.loss_fn, None


def finish(
    request: Request,
    model: nn.Module,
    args: tuple[Tensor, ...],
    kwargs: Mapping[str, Tensor] | None = None,
    loss_fn: Callable[[Any], Tensor] | None = None,
) -> Example:
    """Moves the model to the requested device and dtype, puts it in train mode and writes the label."""
    label = f"{request.title} · {as_text(args[0].shape)} {str(request.dtype).removeprefix('torch.')}"
    model = model.to(device=request.device, dtype=request.dtype).train()
    return Example(model=model, args=args, kwargs=dict(kwargs or {}), loss_fn=loss_fn, label=label)


def as_text(shape: tuple[int, ...]) -> str:
    """A shape for people: `16×3×224×224`."""
    return "×".join(map(str, shape))


def sample_shape(request: Request, default: tuple[int, ...], axes: str) -> tuple[int, ...]:
    """The shape of one sample: the requested shape, else the default.

    Args:
        request: request for the example.
        default: the model's own shape.
        axes: names of its axes, such as `C×H×W`.

    Raises:
        SpecError: if the number of dimensions is wrong.
    """
    shape = default if request.shape is None else request.shape
    if len(shape) != len(default):
        raise SpecError(f"{request.title} takes samples of shape {axes}, such as {default} (shape: {shape})")
    return shape


def random_batch(request: Request, shape: tuple[int, ...]) -> Tensor:
    """Normally distributed samples [batch, *shape] of the requested dtype."""
    return torch.randn(request.batch, *shape).to(request.device, request.dtype)


def token_batch(request: Request, length: int, vocabulary: int) -> Tensor:
    """Uniform token ids, int64 [batch, length], in [0, vocabulary)."""
    return torch.randint(vocabulary, (request.batch, length)).to(request.device)


def class_targets(request: Request, classes: int, *sites: int) -> Tensor:
    """Uniform class labels, int64 [batch, *sites]: one for each sample, or one for each pixel of a sample."""
    return torch.randint(classes, (request.batch, *sites)).to(request.device)


def classifier(request: Request, model: nn.Module, shape: tuple[int, ...], classes: int) -> Example:
    """An example that classifies one batch of images or vectors."""
    inputs = random_batch(request, shape)
    return finish(request, model, (inputs,), loss_fn=partial(classifier_loss, target=class_targets(request, classes)))


def language_model(request: Request, model: nn.Module, *, vocabulary: int, positions: int) -> Example:
    """An example that predicts each next token; a sample has one token per position unless a shape is requested.

    Raises:
        SpecError: if more tokens are requested than the model has positions.
    """
    (length,) = sample_shape(request, (positions,), "T")
    if length > positions:
        raise SpecError(
            f"{request.title} takes up to {positions} tokens; ask for fewer or add positions={length} to its options "
            f"(shape: ({length},))"
        )
    tokens = token_batch(request, length + 1, vocabulary)
    inputs, target = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    return finish(request, model, (inputs,), loss_fn=partial(sequence_loss, target=target))


def classifier_loss(output: Any, *, target: Tensor) -> Tensor:
    """Mean cross-entropy, with the auxiliary heads that some models have during training.

    Weights of the auxiliary heads: GoogLeNet 0.3 each (Szegedy et al. 2015, section 5), Inception v3 0.4 and
    segmentation models 0.5 (torchvision's training references).

    Args:
        output: logits [N, classes, ...], a named tuple with `logits` and `aux_logits` or `aux_logits1`,
            `aux_logits2` (any may be `None`), or a dict with `out` and perhaps `aux`.
        target: class labels, int64 [N, ...].
    """
    heads = [(weight, logits) for weight, logits in _heads(output) if logits is not None]
    losses = [weight * F.cross_entropy(logits, target) for weight, logits in heads[1:]]
    return sum(losses, start=F.cross_entropy(heads[0][1], target))


def _heads(output: Any) -> list[tuple[float, Any]]:
    """The weight and the logits of each head, the main one first."""
    if isinstance(output, Tensor):
        return [(1.0, output)]
    if isinstance(output, dict):
        return [(1.0, output["out"]), (0.5, output.get("aux"))]
    weights = {"logits": 1.0, "aux_logits": 0.4, "aux_logits2": 0.3, "aux_logits1": 0.3}
    return [(weight, getattr(output, name, None)) for name, weight in weights.items()]


def sequence_loss(output: Tensor, *, target: Tensor) -> Tensor:
    """Mean cross-entropy of logits [N, T, vocabulary] with the next tokens, int64 [N, T]."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def mean_squared_error(output: Tensor, *, target: Tensor) -> Tensor:
    """Mean squared error of two tensors of one shape."""
    return F.mse_loss(output, target)
