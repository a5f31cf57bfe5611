"""Runs the body of a test in several processes that are joined by gloo."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["run"]

_PRELOADED = (
    *("memfit.api", "memfit.pipelining.api", "memfit.pipelining.pipeline"),
    *("torch._dynamo.repro.after_dynamo", "torch._inductor.debug", "torch.export._trace"),
    *("torch.distributed.tensor", "torch.testing"),
)


def start(rank: int, body: Callable[..., None], world: int, rendezvous: str, args: tuple[Any, ...]) -> None:
    gc.freeze()  # as in tests/conftest.py
    gc.set_threshold(100_000, 50, 100)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(rendezvous, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        body(rank, world, *args)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run(body: Callable[..., None], world: int, folder: Path, *args: Any) -> None:
    # A server that has imported what takes seconds to import forks each of them.
    multiprocessing.set_forkserver_preload(["tests.processes", *_PRELOADED])
    start_args = body, world, str(folder / "rendezvous"), args
    mp.start_processes(start, args=start_args, nprocs=world, join=True, start_method="forkserver")
