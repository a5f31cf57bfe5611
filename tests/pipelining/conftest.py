"""Short searches."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.pipelining.search import search, stage_planner


@pytest.fixture(autouse=True)
def short_stage_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def briefly(*args: Any, seconds: float, **rest: Any) -> Any:
        return plan_stage(*args, seconds=min(seconds, 0.05), **rest)

    plan_stage = stage_planner.plan_stage
    monkeypatch.setattr(stage_planner, "plan_stage", briefly)
    monkeypatch.setattr(search, "_ROUNDS", 2)
