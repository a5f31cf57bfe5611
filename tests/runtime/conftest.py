"""The notices of a test, as a fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notices import notices


@pytest.fixture
def told() -> Iterator[list[str]]:
    """Texts of the warnings that memfit logs in the test."""
    with notices() as texts:
        yield texts
