"""`Trainer` of transformers with the callback: the weights of a run without it, and figures in its log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 14

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 300, (48,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def reporter(seen: list[dict[str, float]]) -> Any:
    """Stands for TensorBoard: it sees the log before callbacks that are given to the trainer after it."""
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            seen.append(dict(logs))

    return Reporter()


@pytest.fixture(autouse=True)
def plain_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMFIT_PLAN")


def trainer(folder: Path, *callbacks: Any, **more: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=48, n_head=2, vocab_size=300, n_positions=48))
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )
    return Trainer(model, arguments, train_dataset=Texts(), callbacks=list(callbacks))


def weights(made: Any) -> list[torch.Tensor]:
    made.train()
    return [p.detach().clone() for p in made.model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_weights_and_the_log(tmp_path: Path, told: list[str]) -> None:
    from memfit.integrations.transformers import attach

    plain, seen = weights(trainer(tmp_path)), list[dict[str, float]]()
    fitted = trainer(tmp_path, reporter(seen), gradient_checkpointing=True)
    attach(fitted, "2.6MiB", search_seconds=0.1)
    assert same(weights(fitted), plain)
    assert any("gradient checkpointing of GPT2LMHeadModel is turned off" in line for line in told)
    figures = seen[-2]
    assert figures["memfit/peak_measured"] <= 2.6 * 2**20 and figures["memfit/plans"] >= 1
    assert {"memfit/peak_predicted", "memfit/overhead"} <= figures.keys()
    assert "memfit/plans" in fitted.state.log_history[0]
    with pytest.raises(memfit.MemfitError, match="is not fitted"):
        memfit.plan_of(fitted.model)


def test_a_model_that_fits_is_not_planned(tmp_path: Path) -> None:
    from memfit.integrations.transformers import MemfitCallback

    plain = weights(trainer(tmp_path))
    fitted = trainer(tmp_path, MemfitCallback("1GiB"))
    assert same(weights(fitted), plain)
    entry = fitted.state.log_history[0]
    assert entry["memfit/plans"] == 0 and entry["memfit/peak_predicted"] < 2**30 and "memfit/overhead" not in entry


def test_a_budget_that_is_too_small_is_told_with_arguments_that_fit(tmp_path: Path) -> None:
    from memfit.integrations.transformers import MemfitCallback

    fitted = trainer(tmp_path, MemfitCallback("1.8MiB", search_seconds=0.1))
    with pytest.raises(memfit.BudgetError) as caught:
        fitted.train()
    said = re.search(r"per_device_train_batch_size=(\d) with gradient_accumulation_steps=(\d) keep", str(caught.value))
    assert said and "effective batch of 8 samples and fit, by prediction (now 4 and 2)" in str(caught.value)
    micro_batch, steps = map(int, said.groups())
    assert micro_batch * steps == 8 and micro_batch < 4
    smaller = trainer(tmp_path, MemfitCallback("1.8MiB", search_seconds=0.1))
    smaller.args.per_device_train_batch_size = smaller._train_batch_size = micro_batch
    smaller.args.gradient_accumulation_steps = smaller.accelerator.gradient_accumulation_steps = steps
    smaller.train()
    assert smaller.state.log_history[0]["memfit/peak_predicted"] <= 1.8 * 2**20


def test_the_micro_batch_of_an_effective_batch_is_set_before_training(tmp_path: Path) -> None:
    from memfit.integrations.transformers import MemfitCallback, set_batch

    fitted = trainer(tmp_path, MemfitCallback("5MiB", search_seconds=0.1))
    found = set_batch(fitted, 12, "5MiB")
    assert found.micro_batch * found.accumulation_steps == 12
    assert 1 < found.micro_batch < 12
    of_fitted = weights(fitted)
    plain = trainer(tmp_path)
    plain.args.per_device_train_batch_size = found.micro_batch
    plain.args.gradient_accumulation_steps = found.accumulation_steps
    plain.accelerator.gradient_accumulation_steps = found.accumulation_steps
    assert same(of_fitted, weights(plain))
    assert fitted.state.global_step == plain.state.global_step == 2
    plan = fitted.state.log_history[0]
    assert plan["memfit/peak_predicted"] <= 5 * 2**20
    with pytest.raises(memfit.BudgetError):
        set_batch(trainer(tmp_path), 12, "1MiB")
