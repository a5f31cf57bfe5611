"""Measures the cost of swaps on this machine: each tier, both directions, alone and in parallel with compute.

The results are stored for this machine, and plans that may swap use them. Planning itself measures a tier that was not
measured before. So this command is needed only to see the results, or to measure them again while the machine is idle.
"""

from __future__ import annotations

import argparse

from memfit.cli.options import add_output
from memfit.cli.output import check_output, emit

__all__ = ["prepare_parser", "run"]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `memfit calibrate`."""
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 (default: cpu)")
    parser.add_argument("--tiers", metavar="NAME,...", help="host, disk (default: disk, on CUDA host and disk)")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measures the tiers, stores the results and writes them.

    Returns:
        0.

    Raises:
        SpecError: if there is no CUDA device or no such tier, or the results cannot be written.
        SwapError: if a tier cannot be used.
    """
    import torch

    from memfit.errors import SpecError
    from memfit.report.links import Links
    from memfit.report.progress import progress_bars
    from memfit.runtime.offload.link_benchmark import calibrate
    from memfit.runtime.offload.tiers import parse_tiers

    check_output(args)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise SpecError(f"this torch sees no CUDA device; use --device cpu (device: {args.device!r})")
    device = torch.device(args.device)
    tiers = parse_tiers(args.tiers or ("host,disk" if device.type == "cuda" else "disk"), device)
    found = []
    with progress_bars() as progress:
        for number, tier in enumerate(tiers):
            progress("calibrate", number, len(tiers))
            found.append(calibrate(tier, device))
        progress("calibrate", len(tiers), len(tiers))
    emit(Links(device=str(device), calibrations=tuple(found)), args)
    return 0
