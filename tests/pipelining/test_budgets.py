"""Budgets of devices: what is planned with where a proof found too much."""

from __future__ import annotations

from memfit.pipelining.budgets import corrected


def test_a_plan_that_took_too_much_is_not_found_again() -> None:
    """What was predicted may be well below the budget: taking off what was above it would give the same plan."""
    budgets, predicted, measured = (100, 100, 100), (90, 100, 90), (101, 103, 99)
    targets = corrected(budgets, budgets, predicted, measured)
    assert targets == (89, 97, 100)
    assert corrected(targets, budgets, (89, 97, 90), (100, 104, 99)) == (89, 90, 100)
    assert corrected(budgets, budgets, (105,) * 3, (102, 100, 90)) == (98, 100, 100)
