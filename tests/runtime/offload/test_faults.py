"""Disks fail and processes die: a clear error or a clean next start, no wrong gradient, no file left."""

from __future__ import annotations

import copy
import errno
import fcntl
import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import SwapError
from memfit.ir.tiers import SLOT_ALIGNMENT
from memfit.runtime.offload.disk import DiskSpace
from memfit.runtime.offload.swap_file import SwapFile, remove_stale, swap_directory
from tests.models import Residual

X = torch.randn(8, 3, 24, 24, generator=torch.Generator().manual_seed(0))
SameStep = Callable[[nn.Module, nn.Module, Callable[[nn.Module], torch.Tensor]], None]


def step(model: nn.Module) -> torch.Tensor:
    return loss_fn(model(X))


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, torch.arange(8) % 5)


@functools.cache
def least_budget() -> int:
    """What the step needs that swaps all it can."""
    with pytest.raises(memfit.BudgetError) as found:
        memfit.plan(Residual(), (X,), budget="1KiB", loss_fn=loss_fn, tiers="disk", strategy="swap", prove=False)
    return found.value.least_bytes


def fit(model: nn.Module) -> None:
    memfit.fit(model, (X,), budget=least_budget(), loss_fn=loss_fn, tiers="disk", strategy="swap")


def fitted() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Residual()
    twin = copy.deepcopy(model)
    fit(model)
    return model, twin


def failing(call: Callable[..., int], error: int, *, after: int = 0) -> Callable[..., int]:
    """A system call that fails when it has been called so often."""
    calls = [0]

    def run(*arguments: Any) -> int:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(error, os.strerror(error))
        return call(*arguments)

    return run


@pytest.mark.usefixtures("small_disk")
def test_a_disk_that_fails_or_moves_less(
    same_step: SameStep, spaces: list[DiskSpace], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = fitted()
    for call, after in itertools.product(("pwrite", "preadv"), (0, 3)):
        model.zero_grad()
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(getattr(os, call), errno.EIO, after=after))
            told = r"to or from the disk failed: .*Input/output error.*run it again, or set MEMFIT_SWAP_DIR"
            with pytest.raises(SwapError, match=told):
                step(model).backward()
        gc.collect()
        twin.load_state_dict(model.state_dict())
        same_step(model, twin, step)
        assert spaces and all(space.reserved_bytes == 0 for space in spaces)
    # Short transfers are completed.
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:SLOT_ALIGNMENT], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: read(fd, [parts[0][:SLOT_ALIGNMENT]], offset))
    same_step(model, twin, step)


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize("direct", ["refused at once", "refused later"])
def test_file_systems_without_direct_transfers(
    direct: str, same_step: SameStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, write = os.open, os.pwrite

    def no_direct(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *mode)

    def aligned_elsewise(descriptor: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, data, offset)

    if direct == "refused at once":
        monkeypatch.setattr(os, "open", no_direct)
    else:
        monkeypatch.setattr(os, "pwrite", aligned_elsewise)
    model, twin = fitted()
    same_step(model, twin, step)


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_is_told_when_fitting(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", failing(allocate, errno.ENOSPC))
    model = Residual()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(SwapError, match=r"no room for .* MEMFIT_SWAP_DIR"):
        fit(model)
    assert model._compiled_call_impl is None
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert not list(swap_directory().iterdir())


@pytest.mark.usefixtures("small_disk")
def test_an_interrupt_while_waiting(same_step: SameStep, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = fitted()
    held, write = threading.Event(), os.pwrite

    def slow(*arguments: Any) -> int:
        if not held.is_set():
            held.set()
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        return write(*arguments)

    # Whoever runs the tests in the background may have them ignore interrupts.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", slow)
            with pytest.raises(KeyboardInterrupt):
                step(model).backward()
                time.sleep(2)
    finally:
        signal.signal(signal.SIGINT, handler)
    twin.load_state_dict(model.state_dict())
    same_step(model, twin, step)


def test_no_file_has_a_name_and_all_are_private() -> None:
    space = DiskSpace(10 * SLOT_ALIGNMENT)
    assert list(swap_directory().iterdir()) == []
    facts = os.fstat(space._file._descriptor)
    assert facts.st_mode & 0o777 == 0o600 and facts.st_nlink == 0 and facts.st_size == 10 * SLOT_ALIGNMENT
    assert swap_directory().stat().st_mode & 0o777 == 0o700
    descriptor = space._file._descriptor
    space.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_what_a_dead_process_left_is_removed_and_a_live_one_keeps_its_own() -> None:
    dead, alive = (swap_directory() / f"{name}.memfit-swap" for name in ("1-dead", "2-alive"))
    other = swap_directory() / "somebody-elses.txt"
    for path in (dead, alive, other):
        path.write_bytes(b"x")
    with alive.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert remove_stale(swap_directory()) == [dead]
        SwapFile(SLOT_ALIGNMENT).close()
        assert sorted(swap_directory().iterdir()) == [alive, other]


def test_a_directory_of_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMFIT_SWAP_DIR", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with pytest.raises(SwapError, match=r"cannot make the swap directory .*; set MEMFIT_SWAP_DIR"):
        SwapFile(SLOT_ALIGNMENT)


def test_a_directory_that_takes_no_file_is_told_with_what_to_do(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", failing(os.open, errno.EROFS))
    with pytest.raises(
        SwapError, match=r"cannot make a swap file in .*Read-only file system; set MEMFIT_SWAP_DIR to one"
    ):
        SwapFile(SLOT_ALIGNMENT)


def test_a_killed_process_leaves_nothing(swap_directory: Path) -> None:
    program = """
        import sys, time, torch
        from memfit.runtime.offload.disk import DiskSpace
        space = DiskSpace(64 << 20)
        tensor = torch.ones(16 << 20)
        place = space.reserve(64 << 20)
        print("moving", flush=True)
        while True:
            space.out(tensor, place).wait()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        env={**os.environ, "MEMFIT_SWAP_DIR": str(swap_directory)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"moving\n"
    time.sleep(0.2)
    child.kill()
    child.wait()
    assert list(swap_directory.iterdir()) == []
