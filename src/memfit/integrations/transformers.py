"""A callback for `Trainer` of transformers, and for trainers that derive from it (`SFTTrainer`, `DPOTrainer`).

The model is fitted when training begins, and planned at its first training step, as the trainer calls it. The figures
of the plan are added to what the trainer logs.

Known limits: a trainer calls its own reporters before callbacks that are given to it, so they see the figures only if
the callback is put in front of them (`attach`).
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from memfit.api import EffectiveBatch, effective_batch, fit, release
from memfit.capture.state.snapshot import preserved
from memfit.errors import SpecError
from memfit.fitted.installation import fitted_call
from memfit.integrations.figures import figures
from memfit.tools.batch_advice import advised_batch

__all__ = ["MemfitCallback", "attach", "set_batch"]

log = logging.getLogger(__name__)

_FIRST_SAMPLES = 1_000


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
        loss = {"loss_fn": _loss_of_log_probs} if _has_trl_head(model) else {}
        fit(model, budget=self.budget, optimizer=more.get("optimizer"), **(loss | self.options))
        fitted_call(model).advise = functools.partial(_arguments_that_fit, args)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **more: Any) -> None:
        """Adds the figures of the plan to a log entry."""
        found = figures(model)
        for entry in (logs, state.log_history[-1] if state.log_history else None):
            if entry is not None:
                entry.update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Restores the model's own call."""
        release(model)


def _has_trl_head(model: nn.Module) -> bool:
    """Whether TRL put its head into the model, which computes log probabilities chunk by chunk."""
    for module in model.modules():
        call = vars(module).get("forward")
        while call is not None:  # accelerate wraps it
            if getattr(getattr(call, "__code__", None), "co_name", "") == "_fused_forward":
                return True
            call = getattr(call, "__wrapped__", None)
    return False


def _loss_of_log_probs(output: Any) -> Any:
    """Where gradients arrive in TRL's trainers, which do not use `output.loss`."""
    return -output.log_probs.sum()


def _arguments_that_fit(arguments: TrainingArguments, model: nn.Module, args: Any, kwargs: Any, request: Any) -> str:
    """The arguments of a trainer with which the same effective batch fits; empty if none are found."""
    found = advised_batch(model, args, kwargs, request)
    if found is None:
        return ""
    steps = arguments.gradient_accumulation_steps
    return (
        f"per_device_train_batch_size={found.micro_batch} with "
        f"gradient_accumulation_steps={found.accumulation_steps * steps} keep the effective batch of "
        f"{found.samples * steps} samples and fit, by prediction (now {found.samples} and {steps})"
    )


def set_batch(trainer: Trainer, samples: int, budget: int | str = "auto") -> EffectiveBatch:
    """Sets a trainer's micro-batch and accumulation steps so that an effective batch takes the least time.

    Call it before `trainer.train()`. Samples of the training set are put together as the trainer does it; the longest
    of the first thousand come first, since memory depends on them.

    Args:
        trainer: of transformers, with a training set that has a length.
        samples: the effective batch of all processes together.
        budget: as for `memfit.fit`.

    Returns:
        The ways to divide the effective batch, and the one that was set.

    Raises:
        BudgetError: if not even single samples fit.
        SpecError: if the processes cannot share the samples equally.
    """
    processes = trainer.args.world_size
    if samples % processes:
        raise SpecError(f"{samples} samples cannot be shared by {processes} processes; take a multiple of {processes}")
    model: Any = trainer.model
    dataset: Any = trainer.train_dataset
    collate = trainer.get_train_dataloader().collate_fn

    def inputs(batch: int) -> dict[str, Any]:
        made: dict[str, Any] = trainer._prepare_inputs(collate([first[place % len(first)] for place in range(batch)]))
        return made

    with preserved(model):  # random numbers included
        first = [dataset[place] for place in range(min(len(dataset), _FIRST_SAMPLES))]
        first.sort(key=_length, reverse=True)
        model.train()
        optimizer = trainer.create_optimizer()
        found = effective_batch(model, inputs, samples=samples // processes, budget=budget, optimizer=optimizer)
    trainer.args.per_device_train_batch_size = found.micro_batch
    trainer.args.gradient_accumulation_steps = found.accumulation_steps
    trainer.accelerator.gradient_accumulation_steps = found.accumulation_steps
    return found


def _length(sample: Any) -> int:
    """Elements of the first entry of a sample, such as the words of a text."""
    first = next(iter(sample.values()), ()) if isinstance(sample, dict) else sample
    return int(first.numel()) if hasattr(first, "numel") else len(first) if hasattr(first, "__len__") else 0


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
