"""A callback for Lightning's `Trainer`.

The model is fitted when training begins, and planned at its first training call, as the training step makes it. The
figures of the plan are logged beside those of the module.
"""

from __future__ import annotations

from typing import Any

import lightning
from torch import nn

from memfit.api import fit, release
from memfit.capture.optimizer.state import optimizer_cost
from memfit.errors import SpecError
from memfit.integrations.figures import figures

__all__ = ["Memfit"]


class Memfit(lightning.Callback):
    """Makes the model of a `LightningModule` train within a budget.

    Args:
        budget: as for `memfit.fit`.
        module: name of the submodule that the training step calls, `""` for the `LightningModule` itself; by default
            the only child that is trained.
        options: further arguments of `memfit.fit`, such as `levers` or `search_seconds`.
    """

    def __init__(self, budget: int | str = "auto", *, module: str | None = None, **options: Any) -> None:
        self.budget = budget
        self.module = module
        self.options = options

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Fits the model.

        Raises:
            SpecError: if it must be named.
        """
        model, optimizers = self._model(pl_module), trainer.optimizers
        of_all: Any = optimizers[0] if len(optimizers) == 1 else None
        if len(optimizers) > 1:  # `fit` takes one, or the bytes that the states of all take
            of_all = sum(optimizer_cost(one, pl_module.device.type).state_bytes for one in optimizers)
        fit(model, budget=self.budget, optimizer=of_all, **self.options)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *rest: Any, **more: Any
    ) -> None:
        """Logs the figures of the newest plan."""
        pl_module.log_dict(figures(self._model(pl_module)))

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Restores the model's own call."""
        release(self._model(pl_module))

    def _model(self, pl_module: lightning.LightningModule) -> nn.Module:
        if self.module is not None:
            return pl_module.get_submodule(self.module)
        trained = [
            name for name, child in pl_module.named_children() if any(p.requires_grad for p in child.parameters())
        ]
        if len(trained) != 1:
            raise SpecError(
                "name the module that the training step calls, Memfit(module=...), or '' for the LightningModule "
                f"itself (children that are trained: {trained})"
            )
        return pl_module.get_submodule(trained[0])
