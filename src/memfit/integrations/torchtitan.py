"""A policy for torchtitan's trainer, in the place of `FullAC`, `SelectiveAC` and `MemoryBudgetAC`.

A policy is applied while the model has no data, before its parameters are sharded, so the model is fitted without
inputs, and planned at its first training call. The optimizer is made later; it is found at that call.

Known limits: torchtitan's attention for language models, FlexAttention, has no backward pass on CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from memfit.api import fit

__all__ = ["BudgetAC"]


class BudgetAC(ActivationCheckpointing):
    """Makes a model train within a budget: `config.activation_checkpoint = BudgetAC.Config(budget="40GiB")`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """How the model is planned.

        Attributes:
            budget: as for `memfit.fit`.
            levers: as for `memfit.fit`.
            tiers: as for `memfit.fit`.
            search_seconds: as for `memfit.fit`.
        """

        budget: str = "auto"
        levers: str = "bitwise"
        tiers: str | None = None
        search_seconds: float = 8.0

    def apply(self, model: nn.Module) -> None:
        """Fits the model.

        Raises:
            SpecError: if the budget or another option is invalid.
        """
        of = cast("BudgetAC.Config", self.config)
        options: dict[str, Any] = {"levers": of.levers, "tiers": of.tiers, "search_seconds": of.search_seconds}
        fit(model, budget=of.budget, **options)
