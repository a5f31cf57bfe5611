"""One row of the table, in a process of its own."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from benchmarks.coverage.script import DEVICE
from benchmarks.coverage.trial import trial
from benchmarks.fuzz.device import same_bits_each_time

__all__ = ["SOURCES", "run", "source"]

SOURCES = ("torchvision", "timm", "transformers", "diffusers", "monai", "geometric", "scripts")


def source(name: str) -> ModuleType:
    """The file that knows the models of a package; none of them imports the package before it is asked."""
    return import_module(f"benchmarks.coverage.from_{name}")


def run(job: tuple[str, str, str]) -> dict[str, Any]:
    """The row of a source's model on a device."""
    of, name, device = job
    DEVICE.set(device)
    if device != "cpu":
        same_bits_each_time()
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)  # warnings of memfit count
    begin = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        row = trial(source(of).script(name), judge_peak=of != "scripts")
    return row | {"seconds": round(time.perf_counter() - begin, 1)}
