"""What `memfit.estimate` says of random models, against the measured peak of their baseline step.

python -m benchmarks.fuzz.estimates --seeds 0-199 --mode bitwise
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch

import memfit
from benchmarks.fuzz.main import seeds_of
from benchmarks.fuzz.model import assemble
from benchmarks.fuzz.modes import MODES, Mode
from benchmarks.fuzz.recipe import choose
from memfit.errors import MemfitError
from memfit.tools.training_loop import resident_bytes, step_peak, training_step

_NEAR = 0.02


def main(arguments: list[str] | None = None) -> int:
    """Prints the models beyond 2 %, and how many there are; returns that number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-99", help="FIRST-LAST, or numbers with commas between")
    parser.add_argument("--mode", default="bitwise", choices=MODES)
    options = parser.parse_args(arguments)
    with _quiet():
        ratios = dict(_ratios(options.seeds, MODES[options.mode]))
    far = {seed: ratio for seed, ratio in ratios.items() if abs(ratio - 1) > _NEAR}
    for seed, ratio in far.items():
        blocks = [step.block for step in choose(seed, MODES[options.mode], ()).steps]
        print(f"{seed}: {ratio:.3f} of the measured peak, {blocks}")
    least, most = min(ratios.values(), default=1.0), max(ratios.values(), default=1.0)
    print(f"{len(ratios) - len(far)} of {len(ratios)} models within 2 %, from {least:.3f} to {most:.3f}")
    return len(far)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _ratios(seeds: str, mode: Mode) -> Iterator[tuple[int, float]]:
    """Estimated over measured by seed, of models whose baseline step runs and that can be captured."""
    for seed in seeds_of(seeds):
        try:
            measured = _measured(seed, mode)
        except Exception as error:
            print(f"{seed}: the baseline step fails, {type(error).__name__}")
            continue
        case = assemble(choose(seed, mode, ()))
        args, kwargs = case.inputs(0)
        try:
            yield seed, memfit.estimate(case.model, args, kwargs, loss_fn=case.loss).peak / measured
        except MemfitError as error:
            print(f"{seed}: {type(error).__name__}: {str(error)[:80]}")


def _measured(seed: int, mode: Mode) -> int:
    case, device = assemble(choose(seed, mode, ())), torch.device("cpu")
    args, kwargs = case.inputs(0)
    step = training_step(case.model, case.model, args, kwargs, loss_fn=case.loss, hold_outputs=False)
    return step_peak(step, device, lambda: resident_bytes(case.model, args, kwargs, None, device))


if __name__ == "__main__":
    raise SystemExit(min(1, main()))
