"""`model.fit` of Keras with the callback: the weights of a run without it, and figures in its history."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memfit

IMAGES = (24, 16, 16, 3)


@pytest.fixture(autouse=True)
def with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.delenv("MEMFIT_PLAN")


def trained(*callbacks: Any, jit: bool = False) -> tuple[list[torch.Tensor], Any, Any]:
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    inputs = keras.layers.Input(IMAGES[1:])
    hidden = keras.layers.Conv2D(16, 3, activation="relu")(inputs)
    for _ in range(2):
        more = keras.layers.BatchNormalization()(keras.layers.Conv2D(16, 3, padding="same")(hidden))
        hidden = keras.layers.add([hidden, keras.layers.Activation("gelu")(more)])
    pooled = keras.layers.Dropout(0.1)(keras.layers.GlobalAveragePooling2D()(hidden))
    model = keras.Model(inputs, keras.layers.Dense(10)(pooled))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"], jit_compile=jit)
    images, labels = np.random.rand(*IMAGES).astype("float32"), np.random.randint(0, 10, IMAGES[0])
    data = {"validation_data": (images[:8], labels[:8]), "verbose": 0, "batch_size": 8, "epochs": 2}
    history = model.fit(images, labels, callbacks=list(callbacks), **data)
    return [w.value.detach().clone() for w in model.weights], history.history, model


def test_the_weights_and_the_history() -> None:
    from memfit.integrations.keras import Memfit

    plain, before, _ = trained()
    planned, history, model = trained(Memfit("0.8MiB", search_seconds=0.1))
    assert all(map(torch.equal, plain, planned))
    assert {name: history[name] for name in before} == before
    assert history["memfit/plans"][-1] >= 1 and history["memfit/peak_measured"][-1] <= 0.8 * 2**20
    with pytest.raises(memfit.MemfitError, match="is not fitted"):
        memfit.plan_of(model)


def test_a_model_that_fits_runs_as_it_is_and_is_not_compiled(told: list[str]) -> None:
    from memfit.integrations.keras import Memfit

    plain, _, _ = trained()
    fitted, history, model = trained(Memfit("1GiB"), jit=True)
    assert all(map(torch.equal, plain, fitted))
    assert any("jit_compile of Functional is turned off: its plan takes its place" in line for line in told)
    assert model.jit_compile and history["memfit/plans"] == [0.0, 0.0]
    states = 2 * sum(tensor.nbytes for tensor in plain)
    assert history["memfit/peak_predicted"][-1] > states
