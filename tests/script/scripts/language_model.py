"""A loop as in nanoGPT: gradient accumulation, clipping, evaluation, `torch.compile` on request."""

import hashlib
import sys

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.drop(self.out(seen.reshape(batch, length, width)))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedded = nn.Embedding(128, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(2))
        self.head = nn.Linear(64, 128)

    def forward(self, ids, targets=None):
        x = self.embedded(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(0)
torch.set_num_threads(1)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if "--compile" in sys.argv:
    model = torch.compile(model)
for step in range(4):
    if step % 2 == 0:
        model.eval()
        with torch.no_grad():
            model(torch.randint(0, 128, (4, 16)))
        model.train()
    for _ in range(2):
        _, loss = model(torch.randint(0, 128, (8, 64)), torch.randint(0, 128, (8, 64)))
        (loss / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
sys.exit(7 if "--fail" in sys.argv else None)
