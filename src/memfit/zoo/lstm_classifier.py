"""`zoo:lstm-classifier`: embedding, LSTM, one class for a sequence.

A recurrent step is a long chain of small equal ops. `nn.LSTM` is one opaque call for Dynamo, which refuses it unless
`torch._dynamo.config.allow_rnn` is set (torch 2.15), so the captured graph breaks there; `?unrolled=true` writes the
same recurrence as `nn.LSTMCell` calls, which form one graph without a break.

Source: Hochreiter and Schmidhuber 1997, as in `nn.LSTM`.

Known limits: unrolled, the graph grows with layers × tokens.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from memfit.zoo.example import Example, Request, class_targets, classifier_loss, finish, sample_shape, token_batch

__all__ = ["LSTMClassifier", "UnrolledLSTM", "make_lstm_classifier"]


class UnrolledLSTM(nn.Module):
    """`nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)` as a loop over cells."""

    def __init__(self, *, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """From [N, T, width] to the outputs of the last layer [N, T, width]."""
        steps = list(x.unbind(1))
        for layer, cell in enumerate(self.cells):
            hidden = state = torch.zeros_like(steps[0])
            for t, step in enumerate(steps):
                hidden, state = cell(step, (hidden, state))
                steps[t] = hidden
            if layer < len(self.cells) - 1:
                steps = list(self.dropout(torch.stack(steps, dim=1)).unbind(1))
        return torch.stack(steps, dim=1)


class LSTMClassifier(nn.Module):
    """Classifies a sequence by the last output of an LSTM.

    Args:
        vocabulary: tokens.
        classes: outputs.
        width: features of a token and of the state.
        layers: of the LSTM.
        dropout: probability, between layers.
        unrolled: whether to write the recurrence as a loop over cells.
    """

    def __init__(
        self, *, vocabulary: int, classes: int, width: int, layers: int, dropout: float, unrolled: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm: nn.Module
        if unrolled:
            self.lstm = UnrolledLSTM(width=width, layers=layers, dropout=dropout)
        else:
            between = dropout if layers > 1 else 0.0
            self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=between)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """From token ids, int64 [N, T], to logits [N, classes]."""
        outputs = self.lstm(self.tokens(tokens))
        if isinstance(outputs, tuple):
            outputs = outputs[0]
        logits: Tensor = self.head(outputs[:, -1])
        return logits


def make_lstm_classifier(
    request: Request,
    *,
    vocabulary: int = 256,
    classes: int = 2,
    width: int = 256,
    layers: int = 2,
    dropout: float = 0.1,
    unrolled: bool = False,
) -> Example:
    """The classifier with tokens and labels."""
    (length,) = sample_shape(request, (128,), "T")
    model = LSTMClassifier(
        vocabulary=vocabulary, classes=classes, width=width, layers=layers, dropout=dropout, unrolled=unrolled
    )
    inputs, target = token_batch(request, length, vocabulary), class_targets(request, classes)
    return finish(request, model, (inputs,), loss_fn=partial(classifier_loss, target=target))
