"""Estimates the peak memory of a plain training step without running it.

The step is traced on fake tensors. The result is the memory of parameters, gradients, optimizer state, activations and
temporaries at the peak, and the activations of each module. There is one exception: if the code of the model reads
values of tensors, memfit runs the model, and measures the peak of one baseline step if enough memory is free. With
--tiers, the result also shows the peak and the transfers of a step that swaps all it can; the links of a tier are
measured once for each machine. With --budget, the exit code says whether the baseline step fits.
"""

from __future__ import annotations

import argparse
import sys

from memfit.cli.options import add_budget, add_model, add_output, add_tiers, build_example, optimizer_factory
from memfit.cli.output import check_output, emit

__all__ = ["prepare_parser", "run"]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `memfit estimate`."""
    add_model(parser)
    add_budget(parser, required=False, plain=False)
    add_tiers(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Estimates the memory of the baseline step and writes it.

    If this machine has no CUDA device, `--device cuda` is replaced by the meta device.

    Returns:
        0 if there is no budget, or if the predicted peak of a loop that holds the outputs is within it; else 1.

    Raises:
        MemfitError: errors of `memfit.estimate`.
        SpecError: if an option is invalid, or the results cannot be written.
    """
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
    peak_bytes = result.peak + result.outputs_held_bytes
    fits = peak_bytes <= budget
    words = "Fits" if fits else "The baseline step does not fit"
    sentence = f"{words}: {format_bytes(peak_bytes)} predicted, of {format_bytes(budget)}"
    if result.peak <= budget < peak_bytes:
        sentence += f" ({format_bytes(result.peak)} if the loop frees the outputs before the backward pass)"
    if not fits:
        can = "a plan may" if result.least <= budget else "no plan of whole ops can"
        sentence += f"; {can}, the widest op takes {format_bytes(result.least)}"
    emit(result, args, last=f"{sentence}.")
    return 0 if fits else 1
