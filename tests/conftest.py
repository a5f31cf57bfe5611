"""Settings shared by all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine is no bug: examples may be slow, only the time of a whole test is limited (pyproject.toml).
settings.register_profile("memfit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("memfit")
