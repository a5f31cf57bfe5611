"""A callback for `Trainer` of transformers, and for trainers that derive from it (`SFTTrainer`, `DPOTrainer`).

The model is fitted when training begins, and planned at its first training step, as the trainer calls it. The figures
of the plan are added to what the trainer logs.

Known limits: a trainer calls its own reporters before callbacks that are given to it, so they see the figures only if
the callback is put in front of them (`attach`).
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import Trainer, TrainerCallback

from memfit.api import fit, release
from memfit.integrations.figures import figures

__all__ = ["MemfitCallback", "attach"]

log = logging.getLogger(__name__)


class MemfitCallback(TrainerCallback):
    """Makes a trainer's model train within a budget.

    Args:
        budget: as for `memfit.fit`.
        options: further arguments of `memfit.fit`, such as `levers` or `search_seconds`.
    """

    def __init__(self, budget: int | str = "auto", **options: Any) -> None:
        self.budget = budget
        self.options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Fits the model; its own checkpoints are turned off, since the plan decides what is recomputed."""
        if getattr(model, "is_gradient_checkpointing", False):
            model.gradient_checkpointing_disable()
            log.warning("gradient checkpointing of %s is turned off: its plan takes its place", type(model).__name__)
        fit(model, budget=self.budget, optimizer=more.get("optimizer"), **self.options)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **more: Any) -> None:
        """Adds the figures of the plan to a log entry."""
        found = figures(model)
        for entry in (logs, state.log_history[-1] if state.log_history else None):
            if entry is not None:
                entry.update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Restores the model's own call."""
        release(model)


def attach(trainer: Trainer, budget: int | str = "auto", **options: Any) -> MemfitCallback:
    """Puts a callback in front of a trainer's others, so that TensorBoard and similar reporters show its figures.

    Args:
        trainer: of transformers.
        budget: as for `memfit.fit`.
        options: further arguments of `memfit.fit`.
    """
    callback = MemfitCallback(budget, **options)
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback
