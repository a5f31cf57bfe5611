"""`zoo:gpt` and `zoo:seed-gpt2`: a plain GPT with dropout.

With dropout in every block, it is the model on which recomputation has to replay the random stream. `zoo:gpt` is small,
and its vocabulary of 256 fits the bytes of `memfit.zoo.text_windows`; `zoo:seed-gpt2` is the model on which torchgpipe
was measured: 12 layers, width 768, 128 positions, vocabulary 3000 and an output layer of its own, 89,762,304
parameters.

Source: Radford et al. 2019 (normalisation before each half of a block, GELU, learned positions, weights of standard
deviation 0.02). Its record states the sizes; the dropout is not recorded, so it is GPT-2's 0.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.errors import SpecError
from memfit.zoo.example import Example, Request, language_model

__all__ = ["GPT", "make_gpt", "make_seed_gpt2"]


class _Attention(nn.Module):
    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class _Block(nn.Module):
    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = _Attention(width=width, heads=heads, dropout=dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        y: Tensor = self.dropout(self.mlp(self.norm2(x)))
        return x + y


class GPT(nn.Module):
    """A decoder-only transformer.

    Args:
        layers: blocks.
        width: features of a token.
        heads: of attention; they divide `width`.
        positions: longest sequence.
        vocabulary: tokens.
        dropout: probability, in attention, after both halves of a block and after the embedding.
        tied: whether the output layer shares its weight with the token embedding; the output layer has no bias in both
            cases.
    """

    def __init__(
        self, *, layers: int, width: int, heads: int, positions: int, vocabulary: int, dropout: float, tied: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width=width, heads=heads, dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialise)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """From token ids, int64 [N, T], to logits of the next token [N, T, vocabulary]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def make_gpt(
    request: Request,
    *,
    layers: int = 6,
    width: int = 384,
    heads: int = 6,
    positions: int = 256,
    vocabulary: int = 256,
    dropout: float = 0.1,
    tied: bool = True,
) -> Example:
    """A small GPT that predicts the next token."""
    if width % heads:
        raise SpecError(f"{request.title} splits its width among its heads; heads divide it ({width=}, {heads=})")
    model = GPT(
        layers=layers,
        width=width,
        heads=heads,
        positions=positions,
        vocabulary=vocabulary,
        dropout=dropout,
        tied=tied,
    )
    return language_model(request, model, vocabulary=vocabulary, positions=positions)


def make_seed_gpt2(
    request: Request,
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    positions: int = 128,
    vocabulary: int = 3000,
    dropout: float = 0.1,
    tied: bool = False,
) -> Example:
    """The GPT-2 on which torchgpipe was measured."""
    return make_gpt(
        request,
        layers=layers,
        width=width,
        heads=heads,
        positions=positions,
        vocabulary=vocabulary,
        dropout=dropout,
        tied=tied,
    )
