"""The swap file: private, allocated at full size before the step runs, and removed when the process ends in any way.

The file is unlinked as soon as it is open, so the system frees its blocks when the process ends, `kill -9` included. If
a process dies between creating the file and unlinking it, the next process finds the file and removes it; the file of a
live process is locked.

Transfers bypass the page cache where the file system allows it (`O_DIRECT`), since a page cache of swapped tensors
would use memory again.

Known limits: Linux and other systems with `flock` and unnamed open files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

from memfit.errors import SwapError
from memfit.units import format_bytes

__all__ = ["SwapFile", "remove_stale", "swap_directory"]

_SUFFIX = ".memfit-swap"

log = logging.getLogger(__name__)


def swap_directory() -> Path:
    """Directory of the swap files: `MEMFIT_SWAP_DIR`, else a directory of this user's own in `/var/tmp`.

    Raises:
        SwapError: if the directory cannot be made, or other users can access it.
    """
    chosen = os.environ.get("MEMFIT_SWAP_DIR")
    # The temporary directory may be in memory; files in /var/tmp outlive a restart and are not in memory.
    large = Path("/var/tmp")
    base = large if large.is_dir() and os.access(large, os.W_OK) else Path(tempfile.gettempdir())
    path = Path(chosen) if chosen else base / f"memfit-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        raise SwapError(f"cannot make the swap directory {path}: {error}; set MEMFIT_SWAP_DIR to another") from error
    if not chosen and (facts.st_uid != os.getuid() or facts.st_mode & 0o077 or path.is_symlink()):
        raise SwapError(f"the swap directory {path} is not this user's alone; set MEMFIT_SWAP_DIR to another")
    return path


def remove_stale(directory: Path) -> list[Path]:
    """Removes swap files of processes that have ended.

    Returns:
        The removed files.
    """
    removed: list[Path] = []
    for path in directory.glob(f"*{_SUFFIX}"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except OSError:
            pass  # a live process is about to unlink it
        finally:
            os.close(descriptor)
    return removed


class SwapFile:
    """An open file without a name.

    Attributes:
        nbytes: its size.
        direct: whether transfers bypass the page cache; they then have to be aligned (`SLOT_ALIGNMENT`), memory
            included.
    """

    def __init__(self, nbytes: int) -> None:
        """Makes the file.

        Args:
            nbytes: bytes to allocate at once.

        Raises:
            SwapError: if the directory is not usable or there is no room.
        """
        directory = swap_directory()
        for path in remove_stale(directory):
            log.info("removed %s, left by a process that is gone", path)
        path = directory / f"{os.getpid()}-{secrets.token_hex(8)}{_SUFFIX}"
        self.nbytes = 0
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise SwapError(
                f"cannot make a swap file in {directory}: {error}; set MEMFIT_SWAP_DIR to one that can be written"
            ) from error
        self._direct = -1
        try:
            # Without locks (some network file systems) other processes cannot see that a file with a name is in use.
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(OSError):
                # Opened by its descriptor, since the name could belong to another file by now.
                self._direct = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | getattr(os, "O_DIRECT", 0))
        finally:
            path.unlink(missing_ok=True)
        self.direct = self._direct >= 0
        try:
            self.grow(nbytes)
        except SwapError:
            self.close()
            raise

    def grow(self, nbytes: int) -> None:
        """Allocates more space.

        Raises:
            SwapError: if there is no space.
        """
        if nbytes <= self.nbytes:
            return
        try:
            os.posix_fallocate(self._descriptor, self.nbytes, nbytes - self.nbytes)
        except OSError as error:
            raise SwapError(
                f"no room for {format_bytes(nbytes)} of swapped tensors in {swap_directory()}: {error}; free some, or "
                "set MEMFIT_SWAP_DIR to a directory on another disk"
            ) from error
        self.nbytes = nbytes

    def write(self, memory: memoryview, offset: int) -> None:
        """Writes all bytes of `memory`.

        Raises:
            OSError: if the system cannot write them.
        """
        while memory:
            done = self._transfer(os.pwrite, memory, offset)
            memory, offset = memory[done:], offset + done

    def read(self, memory: memoryview, offset: int) -> None:
        """Fills all bytes of `memory`.

        Raises:
            OSError: if the system cannot read them.
        """
        while memory:
            done = self._transfer(_pread, memory, offset)
            memory, offset = memory[done:], offset + done

    def _transfer(self, call: Callable[[int, memoryview, int], int], memory: memoryview, offset: int) -> int:
        try:
            done = call(self._direct if self.direct else self._descriptor, memory, offset)
        except OSError as error:
            if not self.direct or error.errno != errno.EINVAL:
                raise
            # A file system may open a file for direct transfers and then ask for another alignment.
            self.direct = False
            done = call(self._descriptor, memory, offset)
        if done <= 0:
            raise OSError(f"moved {done} of {len(memory)} bytes")
        return done

    def close(self) -> None:
        """Gives the space back."""
        for descriptor in (self._descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._direct = -1


def _pread(descriptor: int, memory: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [memory], offset)
