"""Agreement between processes that train together, as the stages of a pipeline or the holders of a module's shards.

The first process plans and sends the plan as JSON; every process says whether it can run it, and if one cannot, none
does. Who they are is told by process groups: one, or one for each dimension of a mesh. In a pipeline, a
process that fails in a step leaves its error where the others find it and closes its connections, so that those who
wait for it wake up with an error, and raise the first one.

Known limits: a process that is killed leaves no error; the others are told by their connections.
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
    """Makes a process group of one where there is none; the engine asks for one."""
    if not dist.is_initialized():
        from torch._C._distributed_c10d import HashStore  # not in every build of torch

        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's number."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """How many processes there are."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def average_gradients(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replaces every gradient by the mean of those of a group, in place."""
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
    # Along the last dimension first: what other rows send there is nothing, and overwritten by what comes next.
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
    """The largest of what all processes say."""
    found = torch.tensor([value], device=device)
    for group in groups if dist.is_initialized() else ():
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return int(found)


def agree(error: BaseException | None, device: torch.device, groups: Groups = (None,)) -> None:
    """Ends what was begun together if a process met an error.

    Raises:
        PipelineError: on every process, naming one that met an error; there its own error is raised.
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
    """Tells the others why this process gives up, and wakes those who wait for it."""
    if world_size() == 1:
        return
    with contextlib.suppress(Exception):  # whatever the store says, connections are closed
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
