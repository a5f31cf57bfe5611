"""Two models with an optimizer each, of which one trains on what the other computed."""

import hashlib
import itertools
import subprocess
import sys

import torch
from torch import nn

if "--child" in sys.argv:
    sys.exit(subprocess.run([sys.executable, __file__]).returncode)


def layers(*widths):
    parts = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


torch.manual_seed(0)
torch.set_num_threads(1)
generator, critic, loss_of = layers(16, 256, 256, 64), layers(64, 256, 256, 1), nn.BCEWithLogitsLoss()
of_generator, of_critic = (torch.optim.Adam(m.parameters(), 1e-3) for m in (generator, critic))
for _ in range(3):
    real, made = torch.randn(512, 64), generator(torch.randn(512, 16))
    of_critic.zero_grad()
    loss = loss_of(critic(real), torch.ones(512, 1)) + loss_of(critic(made.detach()), torch.zeros(512, 1))
    loss.backward()
    of_critic.step()
    of_generator.zero_grad()
    loss_of(critic(made), torch.ones(512, 1)).backward()
    of_generator.step()
both = [*generator.parameters(), *critic.parameters()]
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in both)).hexdigest())
