"""Total and free memory of a device, container limits included."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["free_bytes", "total_bytes"]

_AUTO_MARGIN = 0.05


def total_bytes(device: torch.device) -> int:
    """Memory of the device; on CPU, the smaller of RAM and the limit of the control group."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [_meminfo().get("MemTotal", 0), _number("/sys/fs/cgroup/memory.max")]
    known = [limit for limit in limits if limit > 0]
    return min(known) if known else 1 << 40


def free_bytes(device: torch.device) -> int:
    """Memory that can be allocated now, minus a margin of 5 %."""
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = _meminfo().get("MemAvailable", 0)
        limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
        if limit > 0:
            free = min(free, max(0, limit - used))
    return int(free * (1 - _AUTO_MARGIN))


def _meminfo() -> dict[str, int]:
    values: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return {}
    return values


def _number(path: str) -> int:
    """The number in a file; -1 if the file holds none, such as `max` for no limit."""
    try:
        return int(Path(path).read_text().strip())
    except (OSError, ValueError):
        return -1
