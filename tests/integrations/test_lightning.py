"""Lightning's `Trainer` with the callback: the weights of a run without it, and figures in its log."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import memfit


@pytest.fixture(autouse=True)
def plain_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMFIT_PLAN")


def classifier() -> Any:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            parts = [part for _ in range(4) for part in (nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1))]
            self.net = nn.Sequential(nn.Linear(64, 128), *parts, nn.Linear(128, 10))
            self.scale = nn.Identity()

        def training_step(self, batch: Any, number: int) -> Any:
            return F.cross_entropy(self.scale(self.net(batch[0])), batch[1])

        def validation_step(self, batch: Any, number: int) -> None:
            self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    torch.manual_seed(0)
    return Classifier()


def trained(model: Any, *callbacks: Any) -> Any:
    import lightning

    torch.manual_seed(1)
    data = TensorDataset(torch.randn(600, 64), torch.randint(0, 10, (600,)))
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
        callbacks=list(callbacks),
    )
    trainer.fit(model, DataLoader(data, 256, shuffle=True), DataLoader(data, 256))
    return trainer


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("budget", ["2.2MiB", "1GiB"])
def test_the_weights_and_the_log(budget: str) -> None:
    from memfit.integrations.lightning import Memfit

    plain, fitted = classifier(), classifier()
    trained(plain)
    trainer = trained(fitted, Memfit(budget, search_seconds=0.1))
    assert_same(plain, fitted)
    logged = trainer.logged_metrics
    assert (logged["memfit/plans"] > 0) == (budget != "1GiB")
    assert logged["memfit/peak_predicted"] <= (2.2 * 2**20 if budget != "1GiB" else 2**30)
    with pytest.raises(memfit.MemfitError, match="is not fitted"):
        memfit.plan_of(fitted.net)


def test_a_model_that_must_be_named() -> None:
    from memfit.integrations.lightning import Memfit

    model = classifier()
    model.other = nn.Linear(2, 2)
    with pytest.raises(memfit.SpecError, match=r"children that are trained: \['net', 'other'\]"):
        trained(model, Memfit("1GiB"))
    trained(model, Memfit("1GiB", module="net"))
