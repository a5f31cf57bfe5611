from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.options import CaptureOptions
from memfit.capture.training_step import capture_step
from memfit.ir.graph import StorageKind
from memfit.ops.accumulation import Accumulate, adding
from memfit.profiling.cost_cache import open_cache
from memfit.profiling.profiler import profile_ops

_aten = torch.ops.aten
_VOCABULARY, _WIDTH = 600, 64


@pytest.mark.parametrize(
    ("target", "operands"),
    [
        (_aten.mm.default, (torch.randn(7, 5, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64))),
        (_aten.mm.default, (torch.randn(5, 7, dtype=torch.float64).t(), torch.randn(5, 3, dtype=torch.float64))),
        (
            _aten.embedding_dense_backward.default,
            (torch.randn(4, 6, 3, dtype=torch.float64), torch.randint(7, (4, 6)), 7, -1, False),
        ),
        (
            _aten.embedding_dense_backward.default,
            (torch.randn(6, 4, 3, dtype=torch.float64).transpose(0, 1), torch.randint(7, (4, 6)), 7, -1, False),
        ),
    ],
)
def test_what_is_added_is_the_result(target: Any, operands: tuple[Any, ...]) -> None:
    before = torch.randn(7, 3, dtype=torch.float64)
    total = before.clone()
    adding(target)(total, *operands)
    torch.testing.assert_close(total, before + target(*operands), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [_aten.mm.default, _aten.embedding_dense_backward.default])
def test_what_is_written_over_memory_that_was_never_set_is_the_result(target: Any, dtype: torch.dtype) -> None:
    operands: tuple[Any, ...] = (torch.randn(7, 5, dtype=dtype), torch.randn(5, 3, dtype=dtype))
    if target is not _aten.mm.default:
        operands = (torch.randn(6, 3, dtype=dtype), torch.randperm(7)[:6], 7, -1, False)
    total = torch.full((7, 3), torch.nan, dtype=dtype)
    adding(target)(total, *operands, beta=0)
    torch.testing.assert_close(total, target(*operands))


class Words(nn.Module):
    def __init__(self, padding: int | None = None, *, tied: bool = False, transposed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH, padding_idx=padding)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)
        if tied:
            self.head.weight = self.embed.weight
        if transposed:
            self.head.weight = nn.Parameter(torch.randn(_WIDTH, _VOCABULARY).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.embed(x))
        return made


def held_gradients(model: nn.Module) -> list[int]:
    """Bytes of the gradients that are made before they are added to what is there."""
    capture = capture_step(
        model, (torch.randint(_VOCABULARY, (4, 6)),), {}, options=CaptureOptions(accumulate=Accumulate.AS_MADE)
    )
    reading = capture.subgraphs.subgraphs[0].reading
    kinds = [reading.storages[s] for s in reading.accumulated]
    assert all(storage.kind is StorageKind.BACKWARD for storage in kinds)
    return sorted(storage.nbytes for storage in kinds if storage.nbytes)


def test_only_what_nothing_else_reads_is_added_as_it_is_made() -> None:
    bias, weight = 4 * _VOCABULARY, 4 * _VOCABULARY * _WIDTH
    assert held_gradients(Words()) == [bias]
    assert held_gradients(Words(padding=0)) == [bias, weight]  # the padding's row takes no gradient
    assert held_gradients(Words(tied=True)) == [bias, weight]  # the sum of both
    assert held_gradients(Words(transposed=True)) == [bias, weight]  # laid out otherwise


def test_what_is_added_is_timed_as_it_runs() -> None:
    """Rows of a wide embedding are added in a fraction of the time in which a whole gradient is made."""
    model = nn.Sequential(nn.Embedding(20_000, 256), nn.Linear(256, 8))
    seconds = {}
    for how in Accumulate:
        capture = capture_step(model, (torch.randint(20_000, (2, 8)),), {}, options=CaptureOptions(accumulate=how))
        graph = profile_ops(capture, torch.device("cpu"), open_cache(torch.device("cpu")))
        (seconds[how],) = (op.seconds for op in graph.ops if "embedding_dense_backward" in op.target)
        assert all(op.workspace_bytes < 20_000 * 256 * 4 for op in graph.ops)
    assert seconds[Accumulate.AS_MADE] < 0.5 * seconds[Accumulate.WHOLE]


@pytest.mark.smoke
@pytest.mark.parametrize("options", [{}, {"padding": 0}, {"tied": True}, {"transposed": True}])
def test_a_wide_head_keeps_its_gradients_and_its_memory(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Words(**options).double()
    x, y = torch.randint(_VOCABULARY, (2, 8, 24))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    loss_fn(model(x), y).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    pipe = memfit.pipeline(model, (x,), target=y, loss_fn=loss_fn, num_stages=2, num_microbatches=4, schedule="1f1b")
    for measured, predicted in zip(pipe.plan.measured_peak_bytes, pipe.plan.peak_bytes, strict=True):
        assert 0.98 * predicted <= measured <= predicted
    pipe.step(x, target=y)
    for name, parameter in model.named_parameters():
        assert expected[name] is not None and parameter.grad is not None
        assert (parameter.grad - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max()
