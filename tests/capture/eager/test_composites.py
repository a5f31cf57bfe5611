"""Recurrent cells and randomized activations round as in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.bits import same_bits


class Unrolled(nn.Module):
    """A cell in a loop over time."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for step in x:
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs)


class Randomized(nn.Module):
    """Randomized leaky ReLU between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(functional.rrelu(self.before(x), training=self.training))


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    output = model(x)
    output.float().square().mean().backward()
    return [output, *(p.grad for p in model.parameters() if p.grad is not None)]


def _fitted_steps_are_plain(model: nn.Module, x: Tensor) -> None:
    plain = copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=lambda o: o.float().square().mean())
    for _ in range(2):
        found, expected = _step(model, x), _step(plain, x)
        assert len(found) == len(expected) > 4
        assert all(map(same_bits, found, expected))


@pytest.mark.parametrize(
    ("kind", "width", "dtype"),
    [
        (nn.GRUCell, 20, torch.float32),
        (nn.GRUCell, 33, torch.bfloat16),
        (nn.LSTMCell, 20, torch.float32),
        (nn.RNNCell, 20, torch.float32),
    ],
)
def test_cells_round_as_in_eager_mode(kind: type[nn.Module], width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Unrolled(kind(12, width)).to(dtype)  # type: ignore[call-arg]
    _fitted_steps_are_plain(model, torch.randn(2, 7, 12, dtype=dtype))


def test_wide_gates_round_as_in_eager_mode() -> None:
    torch.manual_seed(0)
    _fitted_steps_are_plain(Unrolled(nn.GRUCell(5, 257)), torch.randn(2, 300, 5))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_rrelu_is_exact_in_every_layout(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    _fitted_steps_are_plain(Randomized(), torch.randn(2, 3, 9, 10).contiguous(memory_format=layout))


@pytest.mark.parametrize("layer", [nn.GRU(4, 4, 2), nn.Sequential(nn.LSTM(4, 2, bidirectional=True)), nn.RNN(4, 4)])
def test_a_recurrent_layer_alone_is_told_to_have_nothing_to_plan(layer: nn.Module) -> None:
    with pytest.raises(memfit.CaptureError, match=r"can be planned: nn\.(GRU|LSTM|RNN) runs as one kernel"):
        memfit.fit(layer, (torch.randn(3, 2, 4),), budget="1GiB", loss_fn=lambda o: o[0].square().mean())


class Spectral(nn.Module):
    """Scales by values of matrices, of which no gradient is needed, or one is."""

    def __init__(self, values: Callable[[Tensor], Tensor], *, detach: bool) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(24, 24), nn.Linear(24, 24)
        self.values, self.detach = values, detach

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x).tanh()
        matrix = y.mT @ y + torch.eye(24)
        values = self.values(matrix.detach() if self.detach else matrix)
        return self.after(y * values.mean())


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "svdvals": torch.linalg.svdvals,
    "eigvalsh": torch.linalg.eigvalsh,
    "eigvalsh of the upper half": lambda matrix: torch.linalg.eigvalsh(matrix, UPLO="U"),
    "eigvals": lambda matrix: torch.linalg.eigvals(matrix).abs(),
    "largest singular value": lambda matrix: torch.linalg.matrix_norm(matrix, 2),
    "nuclear norm": lambda matrix: torch.linalg.matrix_norm(matrix, "nuc"),
    "condition": torch.linalg.cond,
}


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_values_of_matrices_come_from_the_kernel_of_eager_mode(name: str, detach: bool) -> None:
    torch.manual_seed(0)
    _fitted_steps_are_plain(Spectral(VALUES[name], detach=detach), torch.randn(40, 24))


def test_values_of_matrices_without_gradients_have_bits_of_their_own() -> None:
    """The kernels differ; otherwise the test above would show nothing."""
    torch.manual_seed(0)
    y = torch.randn(40, 24)
    matrix = y.mT @ y
    assert not torch.equal(torch.linalg.eigvalsh(matrix), torch.linalg.eigvalsh(matrix.clone().requires_grad_()))
