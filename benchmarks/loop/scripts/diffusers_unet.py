"""A U-Net of diffusers learns to predict noise."""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn import functional as F
from weights import told

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=32,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
)
optimizer, scheduler = torch.optim.AdamW(model.parameters(), 1e-3), DDPMScheduler()
for _ in range(3):
    clean, noise, steps = torch.randn(4, 3, 32, 32), torch.randn(4, 3, 32, 32), torch.randint(0, 1000, (4,))
    F.mse_loss(model(scheduler.add_noise(clean, noise, steps), steps).sample, noise).backward()
    optimizer.step()
    optimizer.zero_grad()
told(model)
