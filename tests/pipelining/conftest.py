"""Short searches: a pipeline plans each stage several times."""

from __future__ import annotations

import pytest

from memfit.pipelining.search import search


@pytest.fixture(autouse=True)
def short_stage_search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("full_search") is None:
        monkeypatch.setenv("MEMFIT_SEARCH_SECONDS", "0.05")
    monkeypatch.setattr(search, "_ROUNDS", 2)
