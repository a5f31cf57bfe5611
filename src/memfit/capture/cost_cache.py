"""Measured op costs, kept per machine in a private JSON file.

A cost depends on the device, the torch version and the number of threads; each combination has its own file.
The file is data: anything in it that is not a cost is ignored, and a damaged file is measured anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from pathlib import Path

import torch

from memfit.step.graph import Way

__all__ = ["CostCache", "cache_directory", "machine_name", "open_cache"]

log = logging.getLogger(__name__)

_VERSION = 6


class CostCache(dict[str, tuple[Way, ...]]):
    """What each way to run an op costs, whole first, by key; saved to a file (None: kept in memory only).

    No way at all means that the call has other bits than what it would stand for.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self.path = path

    def save(self) -> None:
        """Writes the file, readable by its owner only; a file that cannot be written is not an error."""
        if self.path is None:
            return
        costs = {key: [[w.parts, w.seconds, w.workspace_bytes] for w in ways] for key, ways in self.items()}
        document = {"version": _VERSION, "costs": costs}
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(handle, "w") as file:
                json.dump(document, file)
            Path(name).replace(self.path)
        except OSError as error:
            log.warning("cannot save measured costs to %s: %s", self.path, error)


def cache_directory() -> Path:
    """`$MEMFIT_CACHE`, else the user's cache directory."""
    own = os.environ.get("MEMFIT_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memfit"


def machine_name(device: torch.device) -> str:
    """What a measured cost depends on."""
    if device.type == "cuda":
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        flags = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, cudnn.enabled)
        return f"{torch.cuda.get_device_name(device)} torch {torch.__version__} {flags}"
    kernels = f"{torch.get_num_threads()} threads {torch.get_float32_matmul_precision()} precision"
    return f"{platform.machine()} {_processor()} {kernels} torch {torch.__version__}"


def open_cache(device: torch.device) -> CostCache:
    """The costs known for this machine."""
    digest = hashlib.sha256(machine_name(device).encode()).hexdigest()[:16]
    cache = CostCache(cache_directory() / f"costs-{digest}.json")
    assert cache.path is not None
    try:
        document = json.loads(cache.path.read_text())
    except FileNotFoundError:
        return cache
    except (OSError, ValueError) as error:
        log.warning("ignoring damaged cost file %s: %s", cache.path, error)
        return cache
    costs = document.get("costs") if isinstance(document, dict) and document.get("version") == _VERSION else None
    for key, value in costs.items() if isinstance(costs, dict) else ():
        ways = [_way(entry) for entry in value] if isinstance(value, list) else []
        known = tuple(way for way in ways if way is not None)
        if isinstance(value, list) and len(known) == len(value) and all(way.parts == 1 for way in known[:1]):
            cache[key] = known
    return cache


def _way(entry: object) -> Way | None:
    match entry:
        case [int(parts), float(seconds), int(nbytes)] if 1 <= parts < 1 << 31 and seconds < 1e6 and nbytes < 1 << 60:
            return Way(parts=parts, seconds=seconds, workspace_bytes=nbytes) if seconds >= 0 <= nbytes else None
    return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
