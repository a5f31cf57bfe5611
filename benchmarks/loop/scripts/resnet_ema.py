"""ResNet-18 with its loss outside, an averaged copy, a smaller last batch, evaluation."""

import torch
import torchvision
from torch import nn
from weights import told

torch.manual_seed(0)
model, loss_of = torchvision.models.resnet18(num_classes=10), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
average = torch.optim.swa_utils.AveragedModel(model)
for _ in range(2):
    model.train()
    for count in (8, 8, 5):
        x, y = torch.randn(count, 3, 64, 64), torch.randint(0, 10, (count,))
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 3, 64, 64))
told(model, average.module)
