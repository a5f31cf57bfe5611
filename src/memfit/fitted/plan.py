"""The plan that users apply.

A plan made in this process can be applied at once. A plan from a file is applied with the inputs of the first call: the
step is captured again, and a step that differs from the planned one is refused with the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from torch import nn

from memfit.capture.loss.reading import LossFunction
from memfit.capture.optimizer.unwrapped import OptimizerLike
from memfit.compiler.carried_plan import KnownSizes
from memfit.compiler.driver import make_plan
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.request import Request
from memfit.fitted.installation import install

__all__ = ["Plan", "replanned"]

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(CompiledPlan):
    """How one training step runs within a budget. The attributes are those of `CompiledPlan`."""

    @classmethod
    def of(cls, plan: CompiledPlan) -> Plan:
        """The same plan, to be applied."""
        return plan if isinstance(plan, Plan) else cls(**{f.name: getattr(plan, f.name) for f in fields(plan)})

    def apply(
        self,
        model: M,
        *,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerLike | None = None,
    ) -> M:
        """Makes `model` run this plan; `memfit.release` undoes it.

        Args:
            model: the module the plan was made for, or one just like it.
            loss_fn: as for `memfit.plan`; needed only for a plan from a file.
            optimizer: as for `memfit.plan`; needed only for a plan from a file.

        Returns:
            The same object.

        Raises:
            PlanMismatchError: now or at the first training step, if the plan is for something else.
        """
        return install(model, self, replanned, loss_fn=loss_fn, optimizer=optimizer)


def replanned(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], request: Request, known: KnownSizes | None = None
) -> Plan:
    """Makes a plan for inputs of another signature; `known` tells of steps for other sizes of these inputs."""
    return Plan.of(make_plan(model, args, kwargs, request, keep_call=True, known=known))
