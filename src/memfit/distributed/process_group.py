"""Agreement between processes that train together, as the stages of a pipeline or the holders of a module's shards.

The first process plans and sends the plan as JSON; every process reports whether it can run the plan, and if one
process cannot, none does. Process groups define the processes: one group, or one for each dimension of a mesh. In a
pipeline, a process that fails in a step writes its error to the shared store and closes its connections, so that
waiting processes wake up with an error and raise the first one.

Known limits: a process that is killed leaves no error; the others notice it by their connections.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from memfit.errors import PipelineError

__all__ = [
    "agree",
    "average_gradients",
    "fail",
    "failure_elsewhere",
    "is_first",
    "join",
    "largest",
    "rank",
    "send_document",
    "world_size",
]

log = logging.getLogger(__name__)

_MESSAGE_BYTES = 4096
_FAILED = "memfit/pipeline/failed"
_BROKEN = ("connection", "peer", "gloo", "nccl", "timed out", "socket")
_PATIENCE = datetime.timedelta(seconds=5)

Groups: TypeAlias = "Sequence[dist.ProcessGroup | None]"
"""Process groups, one for each dimension of a mesh; None is all processes."""


def join() -> None:
    """Makes a process group of one process if there is no group; the pipeline engine needs a group."""
    if not dist.is_initialized():
        from memfit.torch_compat.distributed import HashStore

        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def rank(group: dist.ProcessGroup | None = None) -> int:
    """Rank of this process."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of processes."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def average_gradients(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replaces every gradient by its mean over the processes of a group, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad.div_(dist.get_world_size(group))


def is_first(groups: Groups = (None,)) -> bool:
    """Whether this is the process that plans."""
    return not dist.is_initialized() or all(dist.get_rank(group) == 0 for group in groups)


def send_document(document: Any, device: torch.device, groups: Groups = (None,)) -> Any:
    """Sends a JSON document from the first process to all others, and returns it."""
    if not dist.is_initialized():
        return document
    # Along the last dimension first: other rows send no valid document there, and the next broadcast overwrites it.
    for group in reversed(groups):
        data = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8).to(device)
        length = torch.tensor([data.numel()], device=device)
        dist.broadcast(length, group=group, group_src=0)
        if dist.get_rank(group) != 0:
            data = torch.empty(int(length), dtype=torch.uint8, device=device)
        dist.broadcast(data, group=group, group_src=0)
        document = json.loads(data.cpu().numpy().tobytes().decode())
    return document


def largest(value: int, device: torch.device, groups: Groups = (None,)) -> int:
    """The largest value over all processes."""
    found = torch.tensor([value], device=device)
    for group in groups if dist.is_initialized() else ():
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return int(found)


def agree(error: BaseException | None, device: torch.device, groups: Groups = (None,)) -> None:
    """Raises on every process if one process has an error.

    Raises:
        PipelineError: on every process, naming one that has an error; a process with an error raises its own error.
    """
    text = "" if error is None else f"process {rank()} cannot run the plan: {type(error).__name__}: {error}"
    for group in groups if dist.is_initialized() else ():
        mine = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        encoded = text.encode()[:_MESSAGE_BYTES]
        mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device="cpu")
        mine = mine.to(device)
        said = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(said, mine, group=group)
        words = (bytes(message.cpu().tolist()).rstrip(b"\0").decode(errors="replace") for message in said)
        text = text or next(filter(None, words), "")
    if error is not None:
        raise error
    if text:
        raise PipelineError(text)


def fail(error: BaseException) -> None:
    """Tells the other processes why this process stops, and wakes the processes that wait for it."""
    if world_size() == 1:
        return
    with contextlib.suppress(Exception):  # connections are closed even if the store fails
        store = dist.distributed_c10d._get_default_store()
        store.compare_set(_FAILED, "", json.dumps({"rank": rank(), "error": f"{type(error).__name__}: {error}"[:2000]}))
    if dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def failure_elsewhere(error: BaseException) -> PipelineError | None:
    """The error of the process that failed first, if an error here only says that a connection broke."""
    if world_size() == 1:
        return None
    broken = any(word in str(error).lower() for word in _BROKEN)
    try:
        store = dist.distributed_c10d._get_default_store()
        if broken:
            store.wait([_FAILED], _PATIENCE)
        if not store.check([_FAILED]):
            return None
        said = json.loads(store.get(_FAILED))
    except Exception as unknown:  # the store may be gone with its process
        log.info("cannot ask which process failed: %s", unknown)
        return PipelineError("another process of the pipeline ended; its own output says why") if broken else None
    return PipelineError(f"process {said['rank']} of the pipeline failed: {said['error']}")
