"""Settings shared by all tests."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

# A busy machine is no bug: examples may be slow, only the time of a whole test is limited (pyproject.toml).
settings.register_profile("memfit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("memfit")

# Measured costs belong to the tests, not to the user who runs them; all workers share them.
os.environ["MEMFIT_CACHE"] = str(Path(tempfile.gettempdir()) / f"memfit-tests-{os.getuid()}")
