"""accelerate: a prepared model, optimizer and loader, accumulation, clipped gradients."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from weights import told

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
parts = [part for _ in range(6) for part in (nn.Linear(256, 256), nn.GELU())]
model = nn.Sequential(nn.Linear(64, 256), *parts, nn.Linear(256, 10))
loader = DataLoader(TensorDataset(torch.randn(1200, 64), torch.randint(0, 10, (1200,))), 512, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), loader)
for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
told(model)
