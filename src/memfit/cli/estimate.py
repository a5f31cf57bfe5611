"""Estimates the peak memory of a plain training step; nothing is run.

Fake tensors and rooflines only: parameters, gradients, optimizer, activations and temporaries at the peak of
the step, and the activations by module. With --tiers also what swapping can do there, by links measured once. With
--budget the exit code says whether the plain step fits.
"""

from __future__ import annotations

import argparse
import sys

from memfit.cli.options import add_budget, add_model, add_output, add_tiers, build_example, optimizer_factory
from memfit.cli.output import check_output, emit

__all__ = ["prepare_parser", "run"]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_model(parser)
    add_budget(parser, required=False, plain=False)
    add_tiers(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Estimates."""
    import torch

    from memfit.api import estimate
    from memfit.compiler.stages import resolve_budget
    from memfit.units import format_bytes

    check_output(args)
    factory = optimizer_factory(args.optimizer)
    device = args.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        print("memfit: no CUDA device here; estimating on the meta device", file=sys.stderr)
        device = "meta"
    budget = None if args.budget is None else resolve_budget(args.budget, torch.device(device))
    example = build_example(args, args.batch, device=device)
    optimizer = None if factory is None else factory(example.model.parameters())
    result = estimate(
        example.model,
        example.args,
        example.kwargs,
        loss_fn=example.loss_fn,
        optimizer=optimizer,
        label=example.label,
        tiers=args.tiers,
    )
    if budget is None:
        emit(result, args)
        return 0
    fits = result.peak <= budget
    words = "Fits" if fits else "The plain step does not fit"
    sentence = f"{words}: {format_bytes(result.peak)} predicted, of {format_bytes(budget)}"
    if not fits:
        can = "a plan may" if result.least <= budget else "no plan of whole ops can"
        sentence += f"; {can}, the widest op takes {format_bytes(result.least)}"
    emit(result, args, last=f"{sentence}.")
    return 0 if fits else 1
