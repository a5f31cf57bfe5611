"""The largest size: found in few looks, whatever the law by which memory grows, and confirmed by a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memfit.errors import BudgetError, SpecError
from memfit.tools.max_size import _largest, max_size


@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.floats(0.8, 3.0),
    st.integers(1, 500),
    st.integers(0, 10**6),
    st.integers(0, 10**8),
)
def test_the_largest_size_within_a_budget(
    start: int, step: int, power: float, factor: int, fixed: int, room: int
) -> None:
    budget = fixed + room

    def bytes_at(size: int) -> tuple[int, int]:
        return fixed + int(factor * size**power), fixed

    found = _largest(bytes_at, budget, start, step, 10_000)
    sizes = range(start, 10_001, step)
    assert found == max((n for n in sizes if bytes_at(n)[0] <= budget), default=None)


def test_a_known_law_takes_few_looks() -> None:
    looked: set[int] = set()

    def bytes_at(size: int) -> tuple[int, int]:
        looked.add(size)
        return 1000 + 7 * size * size, 1000

    assert _largest(bytes_at, 1000 + 7 * 1234 * 1234, 64, 32, 1 << 16) == 1216
    assert len(looked) <= 7


def trunk(size: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    torch.manual_seed(0)
    convolutions = [nn.Sequential(nn.Conv2d(n, 8, 3, padding=1), nn.ReLU()) for n in (3, 8)]
    model = nn.Sequential(*convolutions, nn.Conv2d(8, 8, 3, 4), nn.Flatten())
    return model, (torch.randn(1, 3, size, size),), {}, lambda output: output.square().mean()


def test_a_planned_image_is_larger_than_a_plain_one_and_larger_still_in_tiles() -> None:
    bitwise, tiled = (
        max_size(trunk, budget="4MiB", levers=levers, start=64, step=64, prove=False) for levers in ("bitwise", "all")
    )
    assert 0 < bitwise.plain <= bitwise.planned < tiled.planned
    assert tiled.plain == bitwise.plain
    assert tiled.predicted_peak_bytes <= tiled.budget_bytes
    assert "largest planned" in str(tiled)


def test_bad_input() -> None:
    with pytest.raises(SpecError, match="from start to limit"):
        max_size(trunk, budget="4MiB", start=64, limit=32)
    with pytest.raises(BudgetError, match=r"not even size 32 fits 1000 B; .* KiB \(\d+ bytes\)$"):
        max_size(trunk, budget=1000, start=32)
