"""Sequences and tokens: linear layers, attention, recurrent cells, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.estimate.cases.step import Step, step_of

__all__ = ["CASES", "self_attention"]


def linear_layers() -> Step:
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 512))
    return step_of(model, torch.randn(1024, 512))


def self_attention(dropout: float, **more: Any) -> Step:
    layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout, batch_first=True) for _ in range(2)]
    return step_of(nn.Sequential(*layers), torch.randn(8, 128, 128), **more)


def attention() -> Step:
    return self_attention(0.0)


def attention_with_dropout() -> Step:
    return self_attention(0.1)


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
    return step_of(nn.Sequential(_Written(), _Written()), torch.randn(8, 128, 128))


class _Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.cells, self.head = kind(64, 128, batch_first=True, **settings), nn.LazyLinear(16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.cells(x)[0])


def _recurrent(kind: Callable[..., nn.RNNBase], **settings: Any) -> Step:
    model, x = _Recurrent(kind, **settings), torch.randn(16, 100, 64)
    model(x)
    return step_of(model, x)


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
    return step_of(_Cell(), torch.randn(64, 24, 64))


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
    return step_of(_Tokens(), tokens, loss=lambda y: F.cross_entropy(y.flatten(0, 1), targets))


def tied_embedding() -> Step:
    model = _Tokens()
    model.head.weight = model.words.weight
    tokens, targets = torch.randint(0, 8000, (4, 64)), torch.randint(0, 8000, (4 * 64,))
    return step_of(model, tokens, loss=lambda y: F.cross_entropy(y.flatten(0, 1), targets))


def embedding_bag() -> Step:
    model = nn.Sequential(nn.EmbeddingBag(20000, 128), nn.Linear(128, 2048), nn.ReLU(), nn.Linear(2048, 256))
    return step_of(model, torch.randint(0, 20000, (512, 20)))


def ctc_loss() -> Step:
    length, batch, classes = 200, 16, 512
    model = nn.Sequential(nn.Linear(80, 512), nn.ReLU(), nn.Linear(512, classes), nn.LogSoftmax(-1))
    targets, sizes = torch.randint(1, classes, (batch, 30)), torch.full((batch,), length)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(y, targets, sizes, torch.full((batch,), 30))

    return step_of(model, torch.randn(length, batch, 80), loss=loss)


CASES = (
    linear_layers,
    attention,
    attention_with_dropout,
    attention_by_einsum,
    gru,
    lstm,
    lstm_of_two_layers,
    gru_cells,
    embedding,
    tied_embedding,
    embedding_bag,
    ctc_loss,
)
