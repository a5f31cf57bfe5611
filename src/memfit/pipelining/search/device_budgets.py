"""Budgets of the devices of a pipeline, which need not be equal: in bytes, a number for each device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
    """The bytes of each device; None where no budget is asked for.

    Raises:
        SpecError: if a budget cannot be understood, or there is not one for each device.
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
    """Of its device's budget, what each stage may take."""
    device_of = schedule.device_of()
    stages_on = list(device_of.values())
    return [
        None if budgets is None else budgets[device_of[stage]] // stages_on.count(device_of[stage])
        for stage in range(schedule.num_stages)
    ]


def scaled(budgets: Sequence[int], largest: int) -> tuple[int, ...]:
    """Budgets in the same proportion, of which the largest is so large."""
    most = max(budgets)
    return tuple(-(-budget * largest // most) for budget in budgets)


def extended(budgets: Sequence[int] | None, num_devices: int) -> tuple[int, ...] | None:
    """Budgets of more devices; those that come in are like the smallest."""
    if budgets is None:
        return None
    return (*budgets, *[min(budgets)] * (num_devices - len(budgets)))


def fits(peaks: Sequence[int], budgets: Sequence[int]) -> bool:
    """Whether no device takes more than its budget."""
    return all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True))


def corrected(
    targets: Sequence[int], budgets: Sequence[int], predicted: Sequence[int], measured: Sequence[int]
) -> tuple[int, ...]:
    """With what to plan again where devices took more than their budgets: less by what the prediction missed."""
    return tuple(
        target - (real - min(planned, budget) if real > budget else 0)
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
    """As people read it, such as `8.0 GiB a device`."""
    if len(set(budgets)) == 1:
        return f"{format_bytes(budgets[0])} a device"
    return ", ".join(f"{format_bytes(one)} for device {device}" for device, one in enumerate(budgets))
