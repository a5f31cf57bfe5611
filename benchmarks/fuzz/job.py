"""One seed in one mode at all its budgets: what the fuzz does in a process of its own."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import Any

import torch

from benchmarks.fuzz.compare import REFUSED, compare, plain_run
from benchmarks.fuzz.device import same_bits_each_time
from benchmarks.fuzz.modes import MODES
from benchmarks.fuzz.recipe import choose

__all__ = ["run"]


def run(job: tuple[int, str, tuple[str, ...], tuple[float, ...], str]) -> list[dict[str, Any]]:
    """Rows of results of a job: seed, name of the mode, blocks asked for, shares if not the mode's own, device."""
    seed, name, only, shares, device = job
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger().addHandler(logging.NullHandler())  # nothing is printed; what memfit tells is compared
    recipe = choose(seed, MODES[name], only)
    recipe = replace(recipe, mode=replace(recipe.mode, device=device))
    if device != "cpu":
        same_bits_each_time()
    plain = plain_run(recipe)
    if plain.status:
        kept = {"seed": seed, "mode": name, "blocks": [step.block for step in recipe.steps], "share": None}
        return [kept | {"status": plain.status, "error": plain.error, "problems": [], "seconds": 0.0}]
    rows: list[dict[str, Any]] = []
    for share in shares or recipe.mode.shares:
        rows.append(compare(recipe, plain, share))
        if rows[-1]["status"] == REFUSED:
            break
    return rows
