"""What the processes of a pipeline agree on.

Process 0 plans and sends the plan as JSON; every process says whether it can run it, and if one cannot, none does. A
process that fails in a step leaves its error where the others find it and closes its connections, so that those who
wait for it wake up with an error, and raise the first one.

Known limits: a process that is killed leaves no error; the others are told by their connections.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from memfit.errors import PipelineError

__all__ = ["agree", "fail", "failure_elsewhere", "join", "rank", "send_document", "world_size"]

log = logging.getLogger(__name__)

_MESSAGE_BYTES = 4096
_FAILED = "memfit/pipeline/failed"
_BROKEN = ("connection", "peer", "gloo", "nccl", "timed out", "socket")
_PATIENCE = datetime.timedelta(seconds=5)


def join() -> None:
    """Makes a process group of one where there is none; the engine asks for one."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def send_document(document: Any, device: torch.device) -> Any:
    """Sends a JSON document from process 0 to all others, and returns it."""
    if world_size() == 1:
        return document
    data = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([data.numel()], device=device)
    dist.broadcast(length, 0)
    if rank() != 0:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, 0)
    return json.loads(data.cpu().numpy().tobytes().decode())


def agree(error: BaseException | None, device: torch.device) -> None:
    """Ends what was begun together if a process met an error.

    Raises:
        PipelineError: on every process, naming the first one that met an error; there its own error is raised.
    """
    if world_size() == 1:
        if error is not None:
            raise error
        return
    text = "" if error is None else f"{type(error).__name__}: {error}"
    mine = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=device)
    encoded = text.encode()[:_MESSAGE_BYTES]
    mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    said = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(said, mine)
    if error is not None:
        raise error
    for number, message in enumerate(said):
        if words := bytes(message.cpu().tolist()).rstrip(b"\0").decode(errors="replace"):
            raise PipelineError(f"process {number} of the pipeline cannot run the plan: {words}")


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
        return PipelineError("another process of the pipeline ended") if broken else None
    return PipelineError(f"process {said['rank']} of the pipeline failed: {said['error']}")
