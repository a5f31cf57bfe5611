"""A vision transformer of timm with drop path, mixup and clipped gradients."""

import numpy as np
import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from weights import told

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", drop_path_rate=0.1, num_classes=10, img_size=64)
optimizer, mixup = torch.optim.AdamW(model.parameters(), 1e-3), Mixup(mixup_alpha=0.8, num_classes=10)
np.random.seed(0)
for _ in range(4):
    x, y = mixup(torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,)))
    SoftTargetCrossEntropy()(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
told(model)
