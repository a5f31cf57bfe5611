"""Attention: the fused function with every kind of mask, the modules of torch.nn, and attention written by hand."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.fuzz.block import IMAGE, SEQUENCE, Apply, Shape, block, weight


@block(SEQUENCE)
def fused_attention(rng: random.Random, shape: Shape) -> nn.Module | None:
    _, length, width = shape
    if width % 4:
        return None
    heads = rng.choice([1, 2, 4])
    kind = rng.choice(["causal", "bias", "mask", "dropout", "nothing", "grouped", "scale"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        n, t, d = x.shape
        q, k, v = self.project(x).view(n, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
        match kind:
            case "causal":
                made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            case "bias":
                made = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
            case "mask":
                made = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
            case "dropout":
                made = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
            case "grouped":
                made = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
            case "scale":
                made = F.scaled_dot_product_attention(q, k, v, scale=0.1)
            case _:
                made = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(made.transpose(1, 2).reshape(n, t, d))

    return Apply(
        function,
        kind,
        project=nn.Linear(width, 3 * width),
        out=nn.Linear(width, width),
        bias=weight(1, heads, length, length),
        mask=torch.rand(length, length).lt(0.8) | torch.eye(length, dtype=torch.bool),
    )


@block(SEQUENCE)
def multihead(rng: random.Random, shape: Shape) -> nn.Module | None:
    _, length, width = shape
    if width % 4:
        return None
    kind = rng.choice(["weights", "quick", "mask", "causal", "padding", "cross"])
    inner = nn.MultiheadAttention(
        width, 4, dropout=rng.choice([0.0, 0.2]), batch_first=True, add_bias_kv=kind == "quick" and rng.random() < 0.5
    )

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        more: dict[str, torch.Tensor] = {}
        if kind == "mask":
            more["attn_mask"] = self.mask
        if kind == "padding":
            more["key_padding_mask"] = self.mask[:1].expand(len(x), -1)
        other = x.flip(1) if kind == "cross" else x
        made, shares = self.inner(x, other, other, need_weights=kind == "weights", **more)
        return self.norm(x + made) if shares is None else self.norm(x + made) + shares.mean()

    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    return Apply(function, kind, inner=inner, norm=nn.LayerNorm(width), mask=mask)


@block(SEQUENCE)
def attention_function(rng: random.Random, shape: Shape) -> nn.Module | None:
    """The function behind `nn.MultiheadAttention`, with the batch in the middle."""
    width = shape[-1]
    if width % 2:
        return None

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        t = x.transpose(0, 1)
        made, _ = F.multi_head_attention_forward(
            *(t, t, t, width, 2, self.inward, None, None, None, False, 0.1, self.outward, None),
            training=self.training,
        )
        return made.transpose(0, 1)

    return Apply(function, inward=weight(3 * width, width, scale=0.2), outward=weight(width, width, scale=0.2))


@block(SEQUENCE)
def encoder(rng: random.Random, shape: Shape) -> nn.Module | None:
    if shape[-1] % 2:
        return None
    layer = nn.TransformerEncoderLayer(
        *(shape[-1], 2, 24),
        dropout=rng.choice([0.0, 0.1]),
        batch_first=True,
        activation=rng.choice(["relu", "gelu"]),
        norm_first=rng.random() < 0.5,
    )
    return layer if rng.random() < 0.7 else nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@block(SEQUENCE)
def decoder(rng: random.Random, shape: Shape) -> nn.Module | None:
    if shape[-1] % 2:
        return None
    layer = nn.TransformerDecoderLayer(shape[-1], 2, 24, dropout=rng.choice([0.0, 0.1]), batch_first=True)
    inner = layer if rng.random() < 0.7 else nn.TransformerDecoder(layer, 2)
    return Apply(lambda self, x: self.inner(x, x.flip(1)), inner=inner)


@block(SEQUENCE)
def encoder_decoder(rng: random.Random, shape: Shape) -> nn.Module | None:
    if shape[-1] % 2 or shape[-1] > 16:
        return None
    inner = nn.Transformer(shape[-1], 2, 1, 1, 16, dropout=0.1, batch_first=True)
    return Apply(lambda self, x: self.inner(x, x[:, :4]), inner=inner)


@block(SEQUENCE)
def attention_by_hand(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["causal", "linear", "softcap", "gated", "talking"])
    _, length, width = shape

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        q = self.query(x)
        if kind == "linear":
            k = F.elu(x) + 1
            return torch.einsum("btd,bde->bte", F.elu(q) + 1, torch.einsum("btd,bte->bde", k, x)) / length
        scores = torch.einsum("btd,bsd->bts", q, x) / width**0.5
        match kind:
            case "softcap":
                scores = 5 * torch.tanh(scores / 5)
            case "talking":
                scores = scores @ self.mix
            case "gated":
                scores = scores * torch.sigmoid(self.mix)
        scores = scores.masked_fill(self.later, float("-inf"))
        return torch.einsum("bts,bsd->btd", F.dropout(scores.softmax(-1), 0.1), x)

    later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    return Apply(function, kind, query=nn.Linear(width, width), later=later, mix=weight(length, length, scale=0.3))


@block(SEQUENCE)
def rotary(rng: random.Random, shape: Shape) -> nn.Module | None:
    if shape[-1] % 2:
        return None
    kind = rng.choice(["pairs", "halves"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        if kind == "pairs":
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return x * torch.cat([self.cos] * 2, -1) + torch.cat([-b, a], -1) * torch.cat([self.sin] * 2, -1)

    angles = torch.arange(shape[1])[:, None] * torch.rand(shape[2] // 2)[None]
    return Apply(function, kind, cos=angles.cos(), sin=angles.sin())


@block(IMAGE)
def attention_over_pixels(rng: random.Random, shape: Shape) -> nn.Module | None:
    if shape[2] * shape[3] > 200:
        return None

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        pixels = x.flatten(2).transpose(1, 2)
        shares = torch.softmax(pixels @ pixels.transpose(1, 2) / c**0.5, -1)
        return (shares @ pixels).transpose(1, 2).reshape(n, c, h, w) + x

    return Apply(function)


@block(IMAGE)
def window_attention(rng: random.Random, shape: Shape) -> nn.Module | None:
    """Shifted windows with a learned bias for each distance."""
    _, channels, height, width = shape
    if height % 4 or width % 4 or channels % 2:
        return None
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
    apart = (places[:, :, None] - places[:, None, :] + 3).permute(1, 2, 0)

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        shifted = x.roll((-2, -2), (2, 3))
        windows = shifted.view(n, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)
        q, k, v = self.project(windows).view(-1, 16, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index].view(16, 16, 2).permute(2, 0, 1).contiguous()
        shares = (q @ k.transpose(-2, -1) * 0.3 + bias).softmax(-1)
        made = (shares @ v).transpose(1, 2).reshape(n, h // 4, w // 4, 4, 4, c)
        return made.permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w).roll((2, 2), (2, 3)) + x

    index = (apart[..., 0] * 7 + apart[..., 1]).flatten()
    return Apply(function, project=nn.Linear(channels, 3 * channels), table=weight(49, 2), index=index)
