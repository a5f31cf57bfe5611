"""A process group of one for each test that needs it, and short searches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from memfit.pipelining import search, stage_planner


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def short_stage_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def briefly(*args: Any, seconds: float, **rest: Any) -> Any:
        return plan_stage(*args, seconds=min(seconds, 0.05), **rest)

    plan_stage = stage_planner.plan_stage
    monkeypatch.setattr(stage_planner, "plan_stage", briefly)
    monkeypatch.setattr(search, "_ROUNDS", 2)
