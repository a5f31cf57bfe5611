"""`zoo:llama`: a small Llama-style decoder: RMSNorm, rotary positions, SwiGLU, grouped keys and values, no bias.

Without dropout, a step has no random op. Its cheap pointwise ops (norms, rotations, gates) hold much memory, and their
recomputation is nearly free.

Source: Touvron et al. 2023; rotary positions Su et al. 2021; grouped attention Ainslie et al. 2023.

Known limits: in a low precision, the table of rotations is rounded like every other buffer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.errors import SpecError
from memfit.zoo.example import Example, Request, language_model

__all__ = ["Llama", "make_llama"]


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + d/2]) of heads [N, H, T, d] by the angles whose cos and sin are [2, T, d/2]."""
    cos, sin = table[:, : x.shape[2]]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _rotations(positions: int, size: int) -> Tensor:
    """Cos and sin [2, positions, size/2] of position · 10000^(-2i/size)."""
    frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(positions), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


class _Attention(nn.Module):
    def __init__(self, *, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = _rotate(q, table), _rotate(k, table)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class _Block(nn.Module):
    def __init__(self, *, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = _Attention(width=width, heads=heads, kv_heads=kv_heads)
        self.norm2 = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), table)
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """A Llama-style decoder.

    Args:
        layers: blocks.
        width: features of a token.
        heads: of queries; they divide `width`.
        kv_heads: of keys and values; they divide `heads`.
        hidden: features inside the SwiGLU.
        positions: longest sequence.
        vocabulary: tokens.
    """

    def __init__(
        self, *, layers: int, width: int, heads: int, kv_heads: int, hidden: int, positions: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            _Block(width=width, heads=heads, kv_heads=kv_heads, hidden=hidden) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.table: Tensor
        self.register_buffer("table", _rotations(positions, width // heads), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """From token ids, int64 [N, T], to logits of the next token [N, T, vocabulary]."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.table)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_llama(
    request: Request,
    *,
    layers: int = 6,
    width: int = 384,
    heads: int = 6,
    kv_heads: int = 2,
    hidden: int = 0,
    positions: int = 256,
    vocabulary: int = 256,
) -> Example:
    """A small Llama that predicts the next token; `hidden=0` is 8/3 of the width, rounded up to a multiple of 64."""
    if width % heads or heads % kv_heads or (width // heads) % 2:
        raise SpecError(
            f"in {request.title} kv_heads divide heads, heads divide the width, and the width of a head is even "
            f"({width=}, {heads=}, {kv_heads=})"
        )
    model = Llama(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        hidden=hidden or -(-8 * width // 192) * 64,
        positions=positions,
        vocabulary=vocabulary,
    )
    return language_model(request, model, vocabulary=vocabulary, positions=positions)
