"""Forty random modules over all modes, plain against fitted.

Those that the plain loop does not run, or not twice alike, prove nothing, so none of them may be among these. A module
may be refused or not fit; it may not differ, go over its budget, be changed by `fit`, or raise what is not memfit's.
"""

from __future__ import annotations

import pytest

from benchmarks.fuzz.compare import FAILURES, compare, plain_run
from benchmarks.fuzz.modes import MODES
from benchmarks.fuzz.recipe import choose

SEEDS = {
    "bitwise": (*range(0, 7), *range(8, 13)),
    "all": range(20, 23),
    "disk": range(30, 33),
    "bf16": range(40, 43),
    "fp16": range(50, 52),
    "pure-bf16": range(60, 63),
    "channels-last": range(70, 74),
    "accumulate": range(80, 83),
    "hooks": range(90, 94),
    "twice": range(100, 103),
}
"""By mode; forty in all."""


@pytest.fixture(autouse=True)
def quick_links(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_SWAP_DIR", str(tmp_path))
    monkeypatch.setattr("memfit.runtime.offload.link_benchmark._SECONDS", 0.02)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mode", "seed"), [(mode, seed) for mode, seeds in SEEDS.items() for seed in seeds])
def test_plain_and_fitted(mode: str, seed: int) -> None:
    recipe = choose(seed, MODES[mode])
    plain = plain_run(recipe)
    assert not plain.status, f"{plain.status}: {plain.error}"
    shares = recipe.mode.shares
    row = compare(recipe, plain, shares[seed % len(shares)], search_seconds=0.3)
    said = "\n".join([*row["problems"], row.get("trace", ""), row.get("error", "")])
    assert row["status"] not in FAILURES, f"{', '.join(row['blocks'])}\n{said}"


def test_there_are_forty() -> None:
    assert sum(map(len, SEEDS.values())) == 40


@pytest.mark.filterwarnings("ignore")
def test_an_auxiliary_loss_that_only_the_loop_adds_settles_within_the_budget() -> None:
    """Zeros in place of its gradient have other bits here, so the first plan is made without it."""
    recipe = choose(67010, MODES["disk"])
    assert any(step.block == "auxiliary_loss" for step in recipe.steps), "another seed shows it now"
    row = compare(recipe, plain_run(recipe), 0.0, search_seconds=0.3)
    assert row["status"] == "ok", row["problems"]


@pytest.mark.filterwarnings("ignore")
def test_a_normalisation_in_chunks_is_viewed_as_its_kernels_result() -> None:
    """The kernel lays its result out anew, pointwise parts of it would lie as the data, which cannot be viewed so."""
    recipe = choose(71082, MODES["all"])
    assert any(step.block == "batch_norm" for step in recipe.steps), "another seed shows it now"
    row = compare(recipe, plain_run(recipe), 0.0, search_seconds=0.3)
    assert row["status"] == "ok", row.get("error")
