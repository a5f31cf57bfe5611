"""Budgets of the devices of a pipeline, in bytes, one number for each device; the budgets may differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.compiler.correction import lowered
from memfit.compiler.stages import resolve_budget
from memfit.errors import BudgetError, SpecError
from memfit.planner.pipeline.schedule import Schedule
from memfit.units import format_bytes

__all__ = [
    "Amount",
    "above_budget",
    "budget_text",
    "corrected",
    "extended",
    "fits",
    "resolve_budgets",
    "scaled",
    "shares",
]

Amount = int | str
"""Bytes, or a string such as `"8GiB"` or `"60%"`."""


def resolve_budgets(
    asked: Amount | Sequence[Amount] | None, num_devices: int, device: torch.device
) -> tuple[int, ...] | None:
    """The budget of each device in bytes; None if no budget is given.

    Raises:
        SpecError: if a budget cannot be parsed, or a list does not have one budget for each device.
    """
    if asked is None:
        return None
    if isinstance(asked, Amount):
        return (resolve_budget(asked, device),) * num_devices
    if len(asked) != num_devices:
        raise SpecError(
            f"there is one budget for each device, or one for all (devices: {num_devices}, budgets: {list(asked)})"
        )
    return tuple(resolve_budget(one, device) for one in asked)


def shares(budgets: Sequence[int] | None, schedule: Schedule) -> list[int | None]:
    """The share of its device's budget that each stage may take."""
    device_of = schedule.device_of()
    stages_on = list(device_of.values())
    return [
        None if budgets is None else budgets[device_of[stage]] // stages_on.count(device_of[stage])
        for stage in range(schedule.num_stages)
    ]


def scaled(budgets: Sequence[int], largest: int) -> tuple[int, ...]:
    """Budgets in the same proportion, scaled so that the largest is `largest`."""
    most = max(budgets)
    return tuple(-(-budget * largest // most) for budget in budgets)


def extended(budgets: Sequence[int] | None, num_devices: int) -> tuple[int, ...] | None:
    """Budgets for more devices; added devices have the smallest budget."""
    if budgets is None:
        return None
    return (*budgets, *[min(budgets)] * (num_devices - len(budgets)))


def fits(peaks: Sequence[int], budgets: Sequence[int]) -> bool:
    """Whether no peak exceeds the budget of its device."""
    return all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True))


def corrected(
    targets: Sequence[int], budgets: Sequence[int], predicted: Sequence[int], measured: Sequence[int]
) -> tuple[int, ...]:
    """Budgets for the next plan, lower for the devices that took more than their budgets."""
    return tuple(
        lowered(target, budget, measured_bytes=real, predicted_bytes=planned) if real > budget else target
        for target, budget, planned, real in zip(targets, budgets, predicted, measured, strict=True)
    )


def above_budget(peaks: Sequence[int], budgets: Sequence[int]) -> BudgetError:
    """Error for plans whose measured peak stays above the budget after corrections."""
    over = [peak - budget for peak, budget in zip(peaks, budgets, strict=True)]
    worst = over.index(max(over))
    return BudgetError(
        f"the measured peak of device {worst} stays at {format_bytes(peaks[worst])} ({peaks[worst]} bytes) in plans "
        f"made for less and less; budget: {budget_text(budgets)}; give that device as much, or take more stages",
        budget_bytes=budgets[worst],
        least_bytes=peaks[worst],
    )


def budget_text(budgets: Sequence[int]) -> str:
    """Budgets as text for people, such as `8.0 GiB a device`."""
    if len(set(budgets)) == 1:
        return f"{format_bytes(budgets[0])} a device"
    return ", ".join(f"{format_bytes(one)} for device {device}" for device, one in enumerate(budgets))
