"""Two processes of `DistributedDataParallel`, started by torchrun."""

import torch
import torch.distributed as dist
from torch import nn
from weights import told

dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
parts = [part for _ in range(6) for part in (nn.Linear(256, 256), nn.GELU())]
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), *parts, nn.Linear(256, 10)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(4):
    generator = torch.Generator().manual_seed(2 * step + rank)
    x, y = torch.randn(512, 64, generator=generator), torch.randint(0, 10, (512,), generator=generator)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    told(model)
dist.destroy_process_group()
