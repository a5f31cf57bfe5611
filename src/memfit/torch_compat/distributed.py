"""Private interfaces of `torch.distributed`, which not every build of torch has."""

from __future__ import annotations

from torch._C._distributed_c10d import HashStore
from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase

__all__ = ["HashStore", "PipelineStageBase"]
