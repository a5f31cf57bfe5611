"""Searches take their time here: these tests are about how good plans are."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def whole_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes away the limit of other tests."""
    monkeypatch.delenv("MEMFIT_SEARCH_SECONDS", raising=False)
