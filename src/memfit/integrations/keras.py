"""A callback for `model.fit` of Keras, with torch as its backend.

The model is fitted when training begins, and planned at its first training call. The figures of the newest plan are
added to the log of each epoch, which Keras hands on to the history and to TensorBoard.

Known limits: with other backends of Keras the callback raises an error.
"""

from __future__ import annotations

import logging
from typing import Any

import keras

from memfit.api import fit, release
from memfit.errors import SpecError
from memfit.integrations.figures import figures

__all__ = ["Memfit"]

log = logging.getLogger(__name__)


class Memfit(keras.callbacks.Callback):
    """Makes a model train within a budget.

    Args:
        budget: as for `memfit.fit`.
        options: further arguments of `memfit.fit`, such as `levers` or `search_seconds`.
    """

    def __init__(self, budget: int | str = "auto", **options: Any) -> None:
        super().__init__()
        self.budget = budget
        self.options = options
        self._was_compiled = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Fits the model; its compilation by torch is turned off, since the plan takes its place.

        Raises:
            SpecError: if Keras runs with another backend than torch.
        """
        if keras.backend.backend() != "torch":
            raise SpecError(
                f"the callback plans models of Keras with torch as backend (backend: {keras.backend.backend()}); set "
                "KERAS_BACKEND=torch before keras is imported"
            )
        model = self.model
        self._was_compiled = bool(model.jit_compile)
        if self._was_compiled:
            self._compile(jit=False)
            log.warning("jit_compile of %s is turned off: its plan takes its place", type(model).__name__)
        optimizer = model.optimizer
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        state_bytes = sum(state.value.nbytes for state in optimizer.variables)
        fit(model, budget=self.budget, optimizer=state_bytes, **self.options)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the figures of the newest plan to the log of an epoch."""
        if logs is not None:
            logs.update(figures(self.model))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the model's own call."""
        release(self.model)
        if self._was_compiled:
            self._compile(jit=True)

    def _compile(self, *, jit: bool) -> None:
        self.model.jit_compile = jit
        self.model.make_train_function(force=True)
