"""Settings shared by all tests."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.notices import notices

# A busy machine is no bug: examples may be slow, only the time of a whole test is limited (pyproject.toml). Tests whose
# examples are quick ask for more of them.
settings.register_profile("memfit", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("memfit")

# Measured costs belong to the tests, not to the user who runs them; all workers share them.
os.environ["MEMFIT_CACHE"] = str(Path(tempfile.gettempdir()) / f"memfit-tests-{os.getuid()}")

# Most tests are about any plan; how good plans are is tested in tests/planner and measured in benchmarks.
os.environ["MEMFIT_SEARCH_SECONDS"] = "0.1"

# Tests are about plans, also where small models fit without one; tests/fitted/test_plain_steps.py is about these.
os.environ["MEMFIT_PLAN"] = "always"

# A test must not depend on what an earlier one planned; tests/compiler/test_plan_cache.py is about this.
os.environ["MEMFIT_KEEP_PLANS"] = "no"

# The same for Dynamo, which looks for garbage after each graph; it reads this when it is imported.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")


def pytest_collection_finish() -> None:
    """What is imported by now is no garbage; every collection of a long run would look through it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)  # by default a tenth of the time goes to looking for cycles in graphs


@pytest.fixture(autouse=True)
def whole_search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets searches take their time in tests that ask for it."""
    if request.node.get_closest_marker("full_search") is not None:
        monkeypatch.delenv("MEMFIT_SEARCH_SECONDS", raising=False)


@pytest.fixture(autouse=True)
def nothing_compiled_stays() -> Iterator[None]:
    """Dynamo keeps what it compiled; over a thousand tests that makes every garbage collection take seconds.

    The shapes and dtypes that fake tensors found for calls of ops stay, as in a process that compiles many models: to
    find them anew takes a seventh of the time of `fit`.
    """
    yield
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        cache = sys.modules["torch._subclasses.fake_tensor"].FakeTensorMode.cache
        known = dict(cache)
        dynamo.reset()
        cache.update(known)


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Pipelines of one process make a group, which the next test would find."""
    yield
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def told() -> Iterator[list[str]]:
    """Texts of the warnings that memfit logs in the test."""
    with notices() as texts:
        yield texts
