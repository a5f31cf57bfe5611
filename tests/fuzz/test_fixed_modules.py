"""Forty random modules over all modes, plain against fitted.

Those that the plain loop does not run, or not twice alike, prove nothing, so none of them may be among these. A module
may be refused or not fit; it may not differ, go over its budget, be changed by `fit`, or raise what is not memfit's.
"""

from __future__ import annotations

import pytest

from benchmarks.fuzz.compare import FAILURES, compare, plain_run
from benchmarks.fuzz.modes import MODES
from benchmarks.fuzz.recipe import choose
from tests.small_disk import keep_disk

SEEDS = {
    "bitwise": (1005, 1014, 1017, 1021, 1025, 1030, 1032, 1033, 1089, 1094, 1107, 1117),
    "all": (1207, 1226, 1252),
    "disk": (1413, 1414, 1467),
    "bf16": (1604, 1612, 1661),
    "fp16": (1814, 1849),
    "pure-bf16": (2001, 2012, 2016),
    "channels-last": (2201, 2202, 2203, 2214, 2262),
    "accumulate": (2402, 2406, 2427),
    "hooks": (2601, 2604, 2635),
    "twice": (2805, 2808, 2818),
}
"""By mode; forty in all, quick ones of many blocks among those from 1000 on."""


@pytest.fixture(autouse=True)
def quick_links(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_SWAP_DIR", str(tmp_path))
    keep_disk(1e9)


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
    """The kernel lays its result out anew, pointwise parts of it would lie as the data, which cannot be viewed so.

    It fits from 69 % of the baseline peak on; at 80 % nothing runs in chunks.
    """
    recipe = choose(71082, MODES["all"])
    assert any(step.block == "batch_norm" for step in recipe.steps), "another seed shows it now"
    row = compare(recipe, plain_run(recipe), 0.7, search_seconds=0.3)
    assert row["status"] == "ok", row.get("error")
