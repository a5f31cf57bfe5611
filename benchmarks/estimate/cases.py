"""Training steps whose memory is estimated: each block, loss and loop that memory models tend to get wrong.

Every step is large enough (8 MiB and more of activations) that a percent of it is not a rounding of small allocations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

__all__ = ["CASES", "Step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is estimated and measured.

    Attributes:
        model: in training mode.
        args: positional inputs.
        kwargs: keyword inputs.
        loss_fn: takes the output; None where the model returns its own loss or every output is differentiated.
        optimizer: of the trained parameters, if there is one.
        autocast: the dtype of an autocast region around the forward pass and the loss, if there is one.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    autocast: torch.dtype | None = None


def _mean(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def _step(
    model: nn.Module, *args: torch.Tensor, loss: Callable[[Any], torch.Tensor] | None = _mean, **more: Any
) -> Step:
    return Step(model=model.train(), args=args, loss_fn=loss, **more)


def _image(batch: int = 8, channels: int = 3, size: int = 64) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def _trunk(width: int = 32, norm: bool = True, **settings: Any) -> nn.Sequential:
    """Three convolutions of one width, with normalisation and activation."""
    made: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(3):
        made += [*([nn.BatchNorm2d(width)] if norm else []), nn.ReLU()]
        made.append(nn.Conv2d(width, width, 3, **{"padding": 1, **settings}))
    return nn.Sequential(*made)


def convolutions() -> Step:
    return _step(_trunk(), _image())


def convolutions_of_one_image() -> Step:
    return _step(_trunk(), _image(1, size=192))


def in_place_activations() -> Step:
    conv = nn.Conv2d
    model = nn.Sequential(conv(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(True), conv(32, 32, 3), nn.ReLU(True))
    return _step(model, _image())


def strided_convolutions() -> Step:
    model = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU())
    return _step(model, _image(8, size=128))


def channels_last() -> Step:
    return _step(_trunk().to(memory_format=torch.channels_last), _image().to(memory_format=torch.channels_last))


def dilated_convolutions() -> Step:
    return _step(_trunk(padding=2, dilation=2), _image())


def grouped_convolutions() -> Step:
    return _step(_trunk(groups=4), _image())


def depthwise_convolutions() -> Step:
    return _step(_trunk(groups=32), _image())


def transposed_convolutions() -> Step:
    up = nn.ConvTranspose2d
    return _step(nn.Sequential(up(3, 32, 4, 2, 1), nn.ReLU(), up(32, 16, 4, 2, 1), nn.ReLU()), _image(8, size=32))


def convolutions_1d() -> Step:
    conv = nn.Conv1d
    model = nn.Sequential(
        conv(4, 64, 9, padding=4), nn.BatchNorm1d(64), nn.GELU(), conv(64, 64, 9, padding=4), nn.GELU()
    )
    return _step(model, torch.randn(8, 4, 2048))


def convolutions_1d_dilated() -> Step:
    conv = nn.Conv1d
    model = nn.Sequential(conv(4, 64, 3, dilation=4), nn.Tanh(), conv(64, 64, 3, dilation=8), nn.Tanh())
    return _step(model, torch.randn(8, 4, 2048))


def convolutions_3d() -> Step:
    conv = nn.Conv3d
    model = nn.Sequential(
        conv(2, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), conv(16, 16, 3, padding=1), nn.ReLU()
    )
    return _step(model, torch.randn(2, 2, 24, 24, 24))


class UNet3d(nn.Module):
    """Two levels, a transposed convolution and a skip."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv3d(1, width, 3, padding=1), nn.InstanceNorm3d(width), nn.LeakyReLU(0.01, True)
        )
        self.down = nn.Sequential(
            nn.Conv3d(width, 2 * width, 3, 2, 1), nn.InstanceNorm3d(2 * width), nn.LeakyReLU(0.01)
        )
        self.up = nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.last = nn.Sequential(nn.Conv3d(2 * width, width, 3, padding=1), nn.LeakyReLU(0.01), nn.Conv3d(width, 3, 1))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        return self.last(torch.cat([self.up(self.down(x)), x], 1))


def u_net_3d() -> Step:
    target = torch.randint(0, 3, (2, 24, 24, 24))
    return _step(UNet3d(), torch.randn(2, 1, 24, 24, 24), loss=lambda y: F.cross_entropy(y, target))


def frozen_convolutions() -> Step:
    """The trunk is frozen, only a head is trained."""
    model = nn.Sequential(_trunk().requires_grad_(False), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
    return _step(model, _image())


def frozen_under_trained() -> Step:
    """A frozen trunk between trained layers: its inputs need not be kept, gradients pass through it."""
    frozen = nn.Sequential(*(m for _ in range(3) for m in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())))
    return _step(nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), frozen.requires_grad_(False)), _image())


def frozen_batch_norm() -> Step:
    """Statistics and weights of the normalisations are frozen, as detectors do."""
    model = _trunk().train()
    for part in model:
        if isinstance(part, nn.BatchNorm2d):
            part.eval().requires_grad_(False)
    return Step(model=model, args=(_image(),), loss_fn=_mean)


def frozen_linear() -> Step:
    """A frozen transformer with low-rank trained additions."""
    return _step(nn.Sequential(*(_LowRank(256) for _ in range(4))), torch.randn(16, 128, 256))


class _LowRank(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.whole = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return F.gelu(self.whole(x) + self.up(self.down(x)))


def weight_norm() -> Step:
    norm = torch.nn.utils.parametrizations.weight_norm
    conv = nn.Conv1d
    model = nn.Sequential(*(m for _ in range(3) for m in (norm(conv(64, 64, 5, padding=2)), nn.LeakyReLU(0.1))))
    return _step(model, torch.randn(4, 64, 2048))


def weight_norm_old() -> Step:
    norm = torch.nn.utils.weight_norm
    model = nn.Sequential(*(m for _ in range(3) for m in (norm(nn.Linear(1024, 1024)), nn.Tanh())))
    return _step(model, torch.randn(256, 1024))


def spectral_norm() -> Step:
    norm = torch.nn.utils.parametrizations.spectral_norm
    conv = nn.Conv2d
    model = nn.Sequential(
        norm(conv(3, 32, 3, padding=1)), nn.LeakyReLU(0.1), norm(conv(32, 64, 4, 2, 1)), nn.LeakyReLU(0.1)
    )
    return _step(model, _image(8))


class _Ternary(nn.Module):
    def forward(self, weight: torch.Tensor) -> Any:
        return weight + (weight.sign() * weight.abs().mean() - weight).detach()


def quantised_weights() -> Step:
    """Weights rounded in the forward pass, straight through in the backward pass."""
    layers = [nn.Linear(1024, 1024) for _ in range(3)]
    for layer in layers:
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", _Ternary())
    return _step(nn.Sequential(*layers), torch.randn(256, 1024))


class _PerSample(nn.Module):
    """Gradients of a small network, sample by sample, inside the forward pass, with a loss on their norms."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 32))

    def forward(self, x: torch.Tensor) -> Any:
        values: dict[str, Any] = dict(self.inner.named_parameters())

        def loss(values: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
            return _mean(functional_call(self.inner, values, (sample,)))

        found = vmap(grad(loss), in_dims=(None, 0))(values, x)
        return sum(g.flatten(1).square().sum(1) for g in found.values())


def per_sample_gradients() -> Step:
    return _step(_PerSample(), torch.randn(64, 128), loss=lambda y: y.mean())


def linear_layers() -> Step:
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 512))
    return _step(model, torch.randn(1024, 512))


def _self_attention(dropout: float, **more: Any) -> Step:
    layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout, batch_first=True) for _ in range(2)]
    return _step(nn.Sequential(*layers), torch.randn(8, 128, 128), **more)


def attention() -> Step:
    return _self_attention(0.0)


def attention_with_dropout() -> Step:
    return _self_attention(0.1)


class _Written(nn.Module):
    """Attention as it is written by hand, with einsum and a mask."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        scores = torch.einsum("blhd,bmhd->bhlm", q, k) / 8
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return x + self.out(torch.einsum("bhlm,bmhd->blhd", scores, v).reshape(batch, length, width))


def attention_by_einsum() -> Step:
    return _step(nn.Sequential(_Written(), _Written()), torch.randn(8, 128, 128))


class _Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.cells, self.head = kind(64, 128, batch_first=True, **settings), nn.LazyLinear(16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.cells(x)[0])


def _recurrent(kind: Callable[..., nn.RNNBase], **settings: Any) -> Step:
    model, x = _Recurrent(kind, **settings), torch.randn(16, 100, 64)
    model(x)
    return _step(model, x)


def gru() -> Step:
    return _recurrent(nn.GRU)


def lstm() -> Step:
    return _recurrent(nn.LSTM)


def lstm_of_two_layers() -> Step:
    return _recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.1)


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(64, 128), nn.Linear(128, 16)

    def forward(self, x: torch.Tensor) -> Any:
        state = x.new_zeros(x.shape[0], 128)
        states = []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            states.append(state)
        return self.head(torch.stack(states, 1))


def gru_cells() -> Step:
    return _step(_Cell(), torch.randn(64, 24, 64))


class _Tokens(nn.Module):
    def __init__(self, words: int = 8000, width: int = 128, **settings: Any) -> None:
        super().__init__()
        self.words, self.inner, self.head = (
            nn.Embedding(words, width, **settings),
            nn.Linear(width, width),
            nn.Linear(width, words),
        )

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(F.gelu(self.inner(self.words(tokens))))


def embedding() -> Step:
    tokens, targets = torch.randint(0, 8000, (4, 64)), torch.randint(0, 8000, (4 * 64,))
    return _step(_Tokens(), tokens, loss=lambda y: F.cross_entropy(y.flatten(0, 1), targets))


def tied_embedding() -> Step:
    model = _Tokens()
    model.head.weight = model.words.weight
    tokens, targets = torch.randint(0, 8000, (4, 64)), torch.randint(0, 8000, (4 * 64,))
    return _step(model, tokens, loss=lambda y: F.cross_entropy(y.flatten(0, 1), targets))


def embedding_bag() -> Step:
    model = nn.Sequential(nn.EmbeddingBag(20000, 128), nn.Linear(128, 2048), nn.ReLU(), nn.Linear(2048, 256))
    return _step(model, torch.randint(0, 20000, (512, 20)))


def ctc_loss() -> Step:
    length, batch, classes = 200, 16, 512
    model = nn.Sequential(nn.Linear(80, 512), nn.ReLU(), nn.Linear(512, classes), nn.LogSoftmax(-1))
    targets, sizes = torch.randint(1, classes, (batch, 30)), torch.full((batch,), length)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(y, targets, sizes, torch.full((batch,), 30))

    return _step(model, torch.randn(length, batch, 80), loss=loss)


def _with_target(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], **more: Any) -> Step:
    target = torch.rand(8, 16, 128, 128)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Sigmoid())
    return _step(model, _image(8, size=128), loss=lambda y: loss(y, target), **more)


def mse_loss() -> Step:
    return _with_target(F.mse_loss)


def smooth_l1_loss() -> Step:
    return _with_target(F.smooth_l1_loss)


def binary_cross_entropy() -> Step:
    return _with_target(F.binary_cross_entropy)


def bce_with_logits() -> Step:
    return _with_target(F.binary_cross_entropy_with_logits)


def soft_margin_loss() -> Step:
    return _with_target(lambda y, target: F.soft_margin_loss(y, target.round() * 2 - 1))


def kl_div() -> Step:
    return _with_target(lambda y, target: F.kl_div(y.log(), target, reduction="batchmean"))


def dice_loss() -> Step:
    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        both = (y * target).sum((2, 3))
        return 1 - ((2 * both + 1) / (y.sum((2, 3)) + target.sum((2, 3)) + 1)).mean()

    return _with_target(loss)


def segmentation_loss() -> Step:
    target = torch.randint(0, 21, (4, 128, 128))
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 21, 1))
    return _step(model, _image(4, size=128), loss=lambda y: F.cross_entropy(y, target))


def contrastive_loss() -> Step:
    def loss(y: torch.Tensor) -> torch.Tensor:
        y = F.normalize(y)
        return F.cross_entropy(y @ y.T / 0.1, torch.arange(len(y)).roll(len(y) // 2))

    return _step(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 128)), torch.randn(1024, 64), loss=loss)


def outputs_without_a_loss() -> Step:
    return _step(_trunk(), _image(), loss=None)


def pooling_and_resizing() -> Step:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1), nn.Upsample(scale_factor=2),
        nn.Conv2d(32, 16, 3, padding=1), nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear"),
    )  # fmt: skip
    return _step(model, _image(8))


def normalisations() -> Step:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 1), nn.GroupNorm(4, 32), nn.SiLU(), nn.InstanceNorm2d(32, affine=True), nn.Conv2d(32, 32, 1),
        nn.LocalResponseNorm(3), nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32),
    )  # fmt: skip
    return _step(model, _image(8))


def activations() -> Step:
    kinds = (nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.ELU, nn.PReLU, nn.Hardswish, nn.LogSigmoid, nn.Softmax)
    return _step(nn.Sequential(*(m for kind in kinds for m in (nn.Linear(256, 256), kind()))), torch.randn(1024, 256))


def dropouts() -> Step:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 1), nn.Dropout(0.5), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(32, 32, 1), nn.Dropout(0.3, True)
    )
    return _step(model, _image(8))


class _Skips(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + width * i, width, 3, padding=1) for i in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], 1)
        return x


def concatenations() -> Step:
    return _step(_Skips(), _image(8, size=48))


class _Experts(nn.Module):
    """Rows sorted to experts, with sizes that depend on data: the graph breaks."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(width, width), nn.Linear(width, 4)
        self.experts, self.last = nn.ModuleList(nn.Linear(width, width) for _ in range(4)), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        x = F.gelu(self.first(x))
        choice = self.gate(x).argmax(-1)
        counts = torch.bincount(choice, minlength=4).tolist()
        order = choice.argsort()
        parts = [expert(part) for expert, part in zip(self.experts, x[order].split(counts), strict=True)]
        return self.last(F.gelu(torch.cat(parts)[order.argsort()]))


def experts() -> Step:
    return _step(_Experts(), torch.randn(4096, 256))


def graph_break() -> Step:
    first, last = _trunk(16), _trunk(16)
    last[0] = nn.Conv2d(16, 16, 3, padding=1)
    return _step(_Broken(first, last), _image(8))


class _Broken(nn.Module):
    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


def shared_module() -> Step:
    layer = nn.Linear(512, 512)
    return _step(nn.Sequential(layer, nn.GELU(), layer, nn.GELU(), layer), torch.randn(2048, 512))


def complex_and_fft() -> Step:
    return _step(_Spectral(), torch.randn(8, 16, 64, 64))


class _Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, 64, 33, dtype=torch.complex64) * 0.05)
        self.beside = nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> Any:
        made = torch.einsum("bihw,iohw->bohw", torch.fft.rfft2(x), self.weight)
        return F.gelu(torch.fft.irfft2(made, s=x.shape[-2:]) + self.beside(x))


def double_precision() -> Step:
    return _step(_trunk(16).double(), _image(8).double())


def bf16_autocast() -> Step:
    return _step(_trunk(), _image(), autocast=torch.bfloat16)


def bf16_autocast_attention() -> Step:
    return _self_attention(0.1, autocast=torch.bfloat16)


def pure_bf16() -> Step:
    return _step(_trunk().bfloat16(), _image().bfloat16())


def input_gradient() -> Step:
    return _step(_trunk(), _image().requires_grad_())


def unused_output() -> Step:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.one, self.other = _trunk(), nn.Conv2d(32, 8, 1), nn.Conv2d(32, 64, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.trunk(x)
            return self.one(x), self.other(x)

    return _step(Two(), _image(), loss=lambda output: _mean(output[0]))


def _optimised(make: Callable[[Any], torch.optim.Optimizer], width: int = 1024) -> Step:
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(width, width), nn.ReLU())))
    return _step(model, torch.randn(64, width), optimizer=make(model.parameters()))


def sgd() -> Step:
    return _optimised(lambda p: torch.optim.SGD(p, 0.01))


def momentum() -> Step:
    return _optimised(lambda p: torch.optim.SGD(p, 0.01, momentum=0.9))


def adamw() -> Step:
    return _optimised(torch.optim.AdamW)


def adamw_foreach() -> Step:
    return _optimised(lambda p: torch.optim.AdamW(p, foreach=True))


def adafactor() -> Step:
    return _optimised(torch.optim.Adafactor)


def rmsprop() -> Step:
    return _optimised(lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9))


CASES: dict[str, Callable[[], Step]] = {
    made.__name__.replace("_", " "): made
    for made in (
        convolutions, convolutions_of_one_image, in_place_activations, strided_convolutions, channels_last,
        dilated_convolutions, grouped_convolutions, depthwise_convolutions, transposed_convolutions, convolutions_1d,
        convolutions_1d_dilated, convolutions_3d, u_net_3d, frozen_convolutions, frozen_under_trained,
        frozen_batch_norm, frozen_linear, weight_norm, weight_norm_old, spectral_norm, quantised_weights,
        per_sample_gradients, linear_layers, attention, attention_with_dropout, attention_by_einsum, gru, lstm,
        lstm_of_two_layers, gru_cells, embedding, tied_embedding, embedding_bag, ctc_loss, mse_loss, smooth_l1_loss,
        binary_cross_entropy, bce_with_logits, soft_margin_loss, kl_div, dice_loss, segmentation_loss,
        contrastive_loss, outputs_without_a_loss, pooling_and_resizing, normalisations, activations, dropouts,
        concatenations, experts, graph_break, shared_module, complex_and_fft, double_precision, bf16_autocast,
        bf16_autocast_attention, pure_bf16, input_gradient, unused_output, sgd, momentum, adamw, adamw_foreach,
        adafactor, rmsprop,
    )
}  # fmt: skip
"""By name."""
