"""Errors of torch, reworded for the user: the fact, the module or line of the user's code, and the remedy."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memfit.errors import CaptureError, MemfitError
from memfit.fxir.user_lines import user_line

__all__ = ["explained", "left_to_plain_code", "nothing_captured", "nothing_reached", "quiet", "told_plainly"]

_NOISY = ("torch._dynamo", "torch._subclasses", "torch.fx.experimental", "torch._functorch", "torch._guards")


def explained(error: BaseException, model: nn.Module, *, start: str = "cannot capture the model") -> CaptureError:
    """The error of a capture, as an error of memfit.

    Args:
        error: the error of torch.
        model: the captured module.
        start: the fact, which begins the message.
    """
    inner = getattr(error, "inner_exception", None) or error
    place = error_place(error) or error_place(inner)
    where = f"{type(model).__name__}" + (f", {place}" if place else "")
    return CaptureError(
        f"{start}: {_fact(inner)} (at {where}); take that code out of the module that is fitted, or mark its function "
        "with @torch.compiler.disable, which leaves it plain code between planned subgraphs"
    )


def nothing_reached(model: nn.Module) -> CaptureError:
    """The error for a model that is one graph without a gradient."""
    return CaptureError(
        f"no gradient reaches a parameter or an input of {type(model).__name__}, so there is nothing "
        "to train: is everything frozen, under no_grad, or detached, in the model or in loss_fn?"
    )


def nothing_captured(error: BaseException, model: nn.Module) -> CaptureError:
    """The error for a model from which no graph can be captured."""
    layers = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    recurrent = sorted({type(module).__name__ for module in layers if isinstance(module, nn.RNNBase)})
    if recurrent and all(isinstance(module, nn.RNNBase) for module in layers):
        names = " and ".join(f"nn.{name}" for name in recurrent)
        return CaptureError(
            f"nothing of {type(model).__name__} can be planned: {names} runs as one kernel over all time steps, which "
            "saves what it needs itself and is left as it is; fit the model that it is a part of, whose other layers "
            "are planned, or write the recurrence as a loop over nn.GRUCell, nn.LSTMCell or nn.RNNCell"
        )
    return explained(error, model, start="nothing of the model can be captured")


def left_to_plain_code(model: nn.Module, reasons: Sequence[str]) -> CaptureError:
    """The error for a model whose trained parts all stay plain code, for these reasons."""
    return CaptureError(
        f"nothing of {type(model).__name__} can be planned: {'; '.join(reasons)}, so that part is left to plain "
        "code, and all that trains is in it; fit the modules that run before and after that code"
    )


@contextlib.contextmanager
def told_plainly(model: nn.Module, baseline_step: Callable[[], object]) -> Iterator[None]:
    """While active, turns an error of torch or Python into a memfit error, or the baseline step's error if it fails.

    Args:
        model: the planned module.
        baseline_step: runs the baseline step and restores all state; called after an error only.
    """
    try:
        yield
    except (MemfitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        failure = error
    else:
        return
    inner = getattr(failure, "inner_exception", None)
    if isinstance(inner, MemfitError):
        raise inner from None
    baseline_step()  # raises the user's own error
    raise explained(failure, model, start="cannot plan the model") from failure


def error_place(error: BaseException) -> str:
    """The innermost line of the user's code that an error refers to, as `file:line`."""
    stack = getattr(error, "real_stack", None) or ()
    lines = "\n".join(f'File "{frame.filename}", line {frame.lineno}' for frame in stack)
    found = user_line(lines) or user_line(str(error))
    if found or error.__traceback__ is None:
        return found
    frames = traceback.extract_tb(error.__traceback__)
    return user_line("\n".join(f'File "{frame.filename}", line {frame.lineno}' for frame in frames))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch from logging errors that are handled here."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    loggers += [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.startswith(tuple(f"{noisy}." for noisy in _NOISY))
    ]
    levels = [(logger, logger.level) for logger in loggers]
    _set_levels([(logger, logging.CRITICAL) for logger in loggers])
    try:
        yield
    finally:
        _set_levels(levels)


def _set_levels(levels: Sequence[tuple[logging.Logger, int]]) -> None:
    """Sets the levels of loggers; `setLevel` visits all existing loggers, so it is called once."""
    for logger, level in levels:
        logger.level = level
    for logger, level in levels[:1]:
        logger.setLevel(level)


def _fact(error: BaseException) -> str:
    lines: list[Any] = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [
        line for line in lines if not line.startswith(("Developer debug", "For more details", "Set TORCH", "Hint:"))
    ]
    return f"{type(error).__name__}: {' '.join(told[:3])[:300]}" if told else type(error).__name__
