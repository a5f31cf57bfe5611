"""Small models that between them have everything a captured step can have."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """Convolutions, batch normalisation, in-place activations, a residual stream."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 1),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.stem(x))
        for block in self.blocks:
            x = functional.relu(x + block(x), inplace=True)
        x = functional.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


class Tied(nn.Module):
    """Tied weights, dropout, layer normalisation, a nested output and a keyword input."""

    def __init__(self, vocabulary: int = 50, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(3)
        )
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, *, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + self.drop(layer(x))
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Frozen(nn.Module):
    """A frozen layer in the middle, a buffer that the step changes, and one that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.second.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.full((64,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
        hidden = torch.tanh(self.second(torch.sigmoid(self.first(x)))) * self.scale
        return self.third(hidden * self.calls)


class Broken(nn.Module):
    """A graph break between two subgraphs that both have something to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
        self.after = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        torch._dynamo.graph_break()
        return self.after(x)


class Masked(nn.Module):
    """Attention whose every layer builds the causal mask anew and looks at it through another view."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            query, key, value = layer(x).chunk(3, dim=-1)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            mask = mask[None] if number else mask.t().t().unsqueeze(0).expand(len(x), -1, -1)
            scores = (query @ key.transpose(1, 2)).masked_fill(~mask, -1e4)
            x = x + self.drop(scores.softmax(-1)) @ value
        return x


class Kernels(nn.Module):
    """Convolutions that different kernels run, some of which look at more than the shape of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.dilated = nn.Conv2d(3, 8, 3, dilation=2)
        self.volume = nn.Conv3d(1, 2, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.line = nn.Conv1d(8, 8, 3, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dilated(x).relu()
        x = self.volume(x[:, None]).flatten(1, 2).relu()
        x = self.up(x).relu()
        return self.head(self.line(x.flatten(2)).relu().mean(2))


class Layouts(nn.Module):
    """Convolutions and pooling of slices, and weights in another memory format than the data."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.left_conv = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Conv2d(16, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).chunk(2, dim=1)
        pooled = functional.max_pool2d(right, 3, 1, 1) + functional.avg_pool2d(left, 3, 1, 1)
        x = self.last(torch.cat((self.left_conv(left).relu(), pooled), dim=1))
        return self.head(functional.adaptive_avg_pool2d(x[:, :, 1:], 2).mean((2, 3)))


class Gate(nn.Module):
    """A block of two inputs that leaves something to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return x + first * self.narrow(nn.functional.gelu(self.wide(x)))


class Between(nn.Module):
    """Graph breaks between blocks that look alike, and a result that several of them take."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gate() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x, x)
        for block in self.blocks[1:]:
            torch._dynamo.graph_break()
            x = block(x, first)
        return x
