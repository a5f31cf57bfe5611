"""Measuring a tier leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memfit.errors import PlanFileError
from memfit.ir.tiers import SLOT_ALIGNMENT, Tier, TransferSizes
from memfit.runtime.offload import link_benchmark
from tests.small_disk import keep_disk


def test_random_numbers_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))  # nothing is known of this machine
    before = torch.get_rng_state()
    link_benchmark.calibrate(Tier.DISK, torch.device("cpu"), seconds=0.02)
    assert torch.equal(before, torch.get_rng_state())


def test_measuring_anew_keeps_the_chosen_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    sizes = TransferSizes(chunk_bytes=3 * SLOT_ALIGNMENT, least_bytes=7)
    keep_disk(1e12, sizes)
    found = link_benchmark.calibrate(Tier.DISK, torch.device("cpu"), seconds=0.02)
    assert found.sizes == sizes and found.out.bytes_per_second < 1e12
    assert link_benchmark.calibrated(Tier.DISK, torch.device("cpu")) == found


def test_chunks_are_multiples_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    with pytest.raises(PlanFileError, match="4096"):
        keep_disk(1e12, TransferSizes(chunk_bytes=5000))
