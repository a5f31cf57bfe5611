"""Measuring a tier leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memfit.ir.tiers import Tier
from memfit.runtime.offload import link_benchmark


def test_random_numbers_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))  # nothing is known of this machine
    before = torch.get_rng_state()
    link_benchmark.calibrate(Tier.DISK, torch.device("cpu"), seconds=0.02)
    assert torch.equal(before, torch.get_rng_state())
