"""Budgets of devices: what is planned with where a proof found too much."""

from __future__ import annotations

from memfit.pipelining.search.device_budgets import above_budget, corrected


def test_a_plan_that_took_too_much_is_not_found_again() -> None:
    """What was predicted may be well below the budget: taking off what was above it would give the same plan."""
    budgets, predicted, measured = (100, 100, 100), (90, 100, 90), (101, 103, 99)
    targets = corrected(budgets, budgets, predicted, measured)
    assert targets == (89, 97, 100)
    assert corrected(targets, budgets, (89, 97, 90), (100, 104, 99)) == (89, 93, 100)
    assert corrected(budgets, budgets, (105,) * 3, (102, 100, 90)) == (98, 100, 100)


def test_a_device_that_stays_above_its_budget_is_named_with_what_it_takes() -> None:
    error = above_budget((1 << 20, 5 << 20), (2 << 20, 4 << 20))
    assert (error.budget_bytes, error.least_bytes) == (4 << 20, 5 << 20)
    assert f"device 1 stays at 5.0 MiB ({5 << 20} bytes)" in str(error) and "give that device as much" in str(error)
