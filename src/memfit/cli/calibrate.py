"""Measure what swapping costs on this machine: each link, both directions, alone and beside compute.

The numbers are kept per machine, and plans that may swap use them. Planning measures what is not known yet, so this
command is for looking at the numbers and for measuring them again, on a quiet machine.
"""

from __future__ import annotations

import argparse

from memfit.cli.options import add_output
from memfit.cli.output import check_output, emit

__all__ = ["prepare_parser", "run"]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 (default: cpu)")
    parser.add_argument("--tiers", metavar="NAME,...", help="host, disk (default: disk, on CUDA host and disk)")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Calibrates."""
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
