"""Measured op costs, stored per machine in a private file of JSON lines.

A cost depends on the device, the torch version and the number of threads; each combination has its own file. New
measurements are appended, so processes that measure at the same time do not lose each other's costs. The file is data:
lines that are not costs are ignored, and missing costs are measured again. The file is opened for each step that is
captured, so a process reads each line once, and later only the lines that were appended.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from memfit.ir.graph import Variant
from memfit.ops.kernels.settings import kernel_settings

__all__ = ["CostCache", "cache_directory", "machine_name", "open_cache"]

log = logging.getLogger(__name__)

_VERSION = 8


class CostCache(MutableMapping[str, tuple[Variant, ...]]):
    """Costs of each variant of an op, whole first, by key; saved to a file (None: kept in memory only).

    No variant at all means that the call gives other bits than the call that it would replace.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._costs: dict[str, tuple[Variant, ...]] = {}
        self._unread: dict[str, str] = {}  # JSON by key: a file has thousands of entries, and a step needs few
        self._new: list[str] = []

    def __getitem__(self, key: str) -> tuple[Variant, ...]:
        if key in self._unread:
            variants = _variants(_parsed(self._unread.pop(key)))
            if variants is not None:
                self._costs[key] = variants
        return self._costs[key]

    def __setitem__(self, key: str, variants: tuple[Variant, ...]) -> None:
        self._unread.pop(key, None)
        self._costs[key] = variants
        self._new.append(key)

    def __delitem__(self, key: str) -> None:
        del self._costs[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._costs, *self._unread])

    def __len__(self) -> int:
        return len(self._costs) + len(self._unread)

    def read(self) -> None:
        """Reads the costs in the file, if there is a file."""
        if self.path is None:
            return
        try:
            self._unread = _read_so_far(self.path).entries_now()
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("cannot read measured costs from %s: %s", self.path, error)

    def save(self) -> None:
        """Appends new costs, readable by the owner only; a file that cannot be written is not an error."""
        new, self._new = dict.fromkeys(self._new), []
        if self.path is None or not new:
            return
        entries = ([key, [[w.chunks, w.seconds, w.workspace_bytes] for w in self[key]]] for key in new)
        text = "".join(f"\n{json.dumps(entry)}" for entry in entries) + "\n"
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(handle, "ab", buffering=0) as file:
                file.write(text.encode())
        except OSError as error:
            log.warning("cannot save measured costs to %s: %s", self.path, error)


@dataclass(slots=True)
class _Reader:
    """Reader of a cost file, with the entries read so far.

    Attributes:
        path: path of the file.
        identity: identity of the file that was read, by its file system; another file may have taken its place.
        read_bytes: number of bytes that were read, whole lines only.
        entries: JSON by key.
    """

    path: Path
    identity: tuple[int, int] = (0, 0)
    read_bytes: int = 0
    entries: dict[str, str] = field(default_factory=dict)

    def entries_now(self) -> dict[str, str]:
        """All entries, including those appended since the last read."""
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self.identity or status.st_size < self.read_bytes:
                self.identity, self.read_bytes, self.entries = identity, 0, {}
            file.seek(self.read_bytes)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.entries.update(_entries(whole.decode()))
        self.read_bytes += len(whole)
        return self.entries | _entries(new[len(whole) :].decode())  # a line that is being written, or was cut off


@functools.cache
def _read_so_far(path: Path) -> _Reader:
    return _Reader(path)


def _entries(text: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    for line in filter(None, text.splitlines()):
        key, costs = _divided(line)
        if key:
            entries[key] = costs
        else:
            log.warning("ignoring a damaged line of measured costs: %.80s", line)
    return entries


def cache_directory() -> Path:
    """`$MEMFIT_CACHE`, else the user's cache directory."""
    own = os.environ.get("MEMFIT_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memfit"


def machine_name(device: torch.device) -> str:
    """Name of the machine and its settings, on which a measured cost depends."""
    settings = kernel_settings(device.type)
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} torch {torch.__version__} {settings}"
    return f"{platform.machine()} {_processor()} {settings} torch {torch.__version__}"


def open_cache(device: torch.device) -> CostCache:
    """The costs known for this machine."""
    digest = hashlib.sha256(machine_name(device).encode()).hexdigest()[:16]
    cache = CostCache(cache_directory() / f"costs-{_VERSION}-{digest}.jsonl")
    cache.read()
    return cache


def _divided(line: str) -> tuple[str, str]:
    """The key of a line and the JSON of its costs, which is parsed on first use; no key for a damaged line."""
    if "\\" not in line:
        key, between, text = line.partition('", [')
        return (key[2:], f"[{text[:-1]}") if between and key.startswith('["') and line.endswith("]") else ("", "")
    match _parsed(line):
        case [str(key), value]:
            return key, json.dumps(value)
    return "", ""


def _parsed(text: str) -> object:
    """Value of a JSON text; None where the text is damaged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _variants(value: object) -> tuple[Variant, ...] | None:
    """Costs as they were written; None for anything else."""
    variants = [_variant(entry) for entry in value] if isinstance(value, list) else [None]
    known = tuple(variant for variant in variants if variant is not None)
    return known if len(known) == len(variants) and all(variant.chunks == 1 for variant in known[:1]) else None


def _variant(entry: object) -> Variant | None:
    match entry:
        case [int(chunks), float(seconds), int(nbytes)] if 1 <= chunks < 1 << 31 and seconds < 1e6 and nbytes < 1 << 60:
            return Variant(chunks=chunks, seconds=seconds, workspace_bytes=nbytes) if seconds >= 0 <= nbytes else None
    return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
