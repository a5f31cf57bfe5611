"""Recurrence: RNN, LSTM and GRU, their cells, packed sequences, and loops over time written by hand."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.fuzz.block import SEQUENCE, VECTOR, Apply, Shape, block


@block(SEQUENCE)
def recurrent(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice([nn.RNN, nn.LSTM, nn.GRU])
    inner = kind(
        *(shape[-1], 8),
        num_layers=rng.choice([1, 2]),
        batch_first=True,
        bidirectional=rng.random() < 0.3,
        dropout=rng.choice([0.0, 0.0, 0.2]),
        **({"proj_size": 6} if kind is nn.LSTM and rng.random() < 0.2 else {}),
    )
    return Apply(lambda self, x: self.inner(x)[0], kind.__name__, inner=inner)


@block(SEQUENCE)
def recurrent_over_packed(rng: random.Random, shape: Shape) -> nn.Module | None:
    lengths = torch.arange(shape[0]) % shape[1] + 1

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, self.lengths.cpu(), batch_first=True, enforce_sorted=False)
        made, _ = pad_packed_sequence(self.inner(packed)[0], batch_first=True, total_length=x.shape[1])
        return made

    return Apply(function, inner=rng.choice([nn.LSTM, nn.GRU])(shape[-1], 8, batch_first=True), lengths=lengths)


@block(SEQUENCE)
def cell_over_time(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice([nn.RNNCell, nn.GRUCell, nn.LSTMCell])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        hidden = x.new_zeros(len(x), 8)
        state = (hidden, hidden) if kind is nn.LSTMCell else hidden
        made = []
        for t in range(min(4, x.shape[1])):
            state = self.inner(x[:, t], state)
            made.append(state[0] if kind is nn.LSTMCell else state)
        return torch.stack(made, 1)

    return Apply(function, kind.__name__, inner=kind(shape[-1], 8))


@block(VECTOR)
def cell_once(rng: random.Random, shape: Shape) -> nn.Module | None:
    return Apply(lambda self, x: self.inner(x), inner=rng.choice([nn.RNNCell, nn.GRUCell])(shape[-1], 12))


@block(SEQUENCE)
def scan(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A state space by hand: the state of each moment from the last, with a decay that depends on the input."""

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        decay, made = torch.sigmoid(self.decay(x)), []
        state = torch.zeros_like(x[:, 0])
        for t in range(min(6, x.shape[1])):
            state = decay[:, t] * state + (1 - decay[:, t]) * x[:, t]
            made.append(state)
        return torch.stack(made, 1)

    return Apply(function, decay=nn.Linear(shape[-1], shape[-1]))


@block(SEQUENCE)
def carried_state(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A recurrence whose state goes over from step to step, detached, as in truncated backpropagation through time."""

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        made, state = self.inner(x, self.state)
        self.state = state.detach()
        return made

    inner = nn.GRU(shape[-1], 8, batch_first=True)
    return Apply(function, inner=inner, state=torch.zeros(1, shape[0], 8))
