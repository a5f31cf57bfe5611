"""Images and their shapes: padding, resizing, sampling, shuffling, folding, turning, and what blocks of vision do."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.fuzz.block import IMAGE, SEQUENCE, VOLUME, Apply, Shape, block, weight

PADS = {
    SEQUENCE: (nn.ZeroPad1d, nn.ConstantPad1d, nn.ReflectionPad1d, nn.ReplicationPad1d, nn.CircularPad1d),
    IMAGE: (nn.ZeroPad2d, nn.ConstantPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d, nn.CircularPad2d),
    VOLUME: (nn.ZeroPad3d, nn.ConstantPad3d, nn.ReflectionPad3d, nn.ReplicationPad3d, nn.CircularPad3d),
}
MODES = {SEQUENCE: ("linear",), IMAGE: ("bilinear", "bicubic"), VOLUME: ("trilinear",)}


@block(SEQUENCE, IMAGE, VOLUME)
def padded(rng: random.Random, shape: Shape) -> nn.Module | None:
    if max(shape[2:]) > 18 or min(shape[2:]) < 2:
        return None
    kind = rng.choice(PADS[len(shape)])
    sides = tuple(rng.choice([0, 1]) for _ in range(2 * (len(shape) - 2)))
    return kind(sides, 0.5) if "Constant" in kind.__name__ else kind(sides)


@block(IMAGE)
def padded_function(rng: random.Random, shape: Shape) -> nn.Module | None:
    mode = rng.choice(["constant", "reflect", "replicate", "circular", "crop"])
    sides = (-1, -1, 0, -1) if mode == "crop" else (1, 0, 0, 1)
    return Apply(lambda self, x: F.pad(x, sides, "constant" if mode == "crop" else mode), mode)


@block(SEQUENCE, IMAGE, VOLUME)
def resized(rng: random.Random, shape: Shape) -> nn.Module | None:
    if min(shape[2:]) < 4:
        return None
    mode = rng.choice(["nearest", "area", "nearest-exact", *MODES[len(shape)] * 2])
    factor = rng.choice([0.75, 1.5, 2.0]) if max(shape[2:]) <= 10 else 0.75
    more = {"align_corners": rng.random() < 0.5} if mode in MODES[len(shape)] else {}
    if len(shape) == IMAGE and mode in MODES[IMAGE] and rng.random() < 0.3:
        more = {"antialias": True, "align_corners": False}
    return Apply(lambda self, x: F.interpolate(x, scale_factor=factor, mode=mode, **more), f"{mode} {factor}")


@block(IMAGE)
def upsampled(rng: random.Random, shape: Shape) -> nn.Module | None:
    if max(shape[2:]) > 12:
        return None
    layers = (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)
    functions = (F.upsample, F.upsample_nearest, F.upsample_bilinear)
    if rng.random() < 0.5:
        return rng.choice(layers)(scale_factor=2)
    function = rng.choice(functions)
    return Apply(lambda self, x: function(x, scale_factor=2), function.__name__)


@block(IMAGE)
def sampled(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A spatial transformer: where to look is learned."""
    mode = rng.choice(["bilinear", "nearest", "bicubic"])
    border, corners = rng.choice(["zeros", "border", "reflection"]), rng.random() < 0.5

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        turn = self.where(x.mean((2, 3))).view(-1, 2, 3) * 0.1 + self.straight
        grid = F.affine_grid(turn, list(x.shape), align_corners=corners)
        return F.grid_sample(x, grid, mode=mode, padding_mode=border, align_corners=corners)

    straight = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    return Apply(function, f"{mode} {border}", where=nn.Linear(shape[1], 6), straight=straight)


@block(IMAGE)
def pixel_shuffle(rng: random.Random, shape: Shape) -> nn.Module | None:
    function = rng.random() < 0.5
    if shape[1] % 4 == 0 and max(shape[2:]) <= 10:
        return Apply(lambda self, x: F.pixel_shuffle(x, 2)) if function else nn.PixelShuffle(2)
    if shape[2] % 2 or shape[3] % 2 or shape[1] > 6:
        return None
    return Apply(lambda self, x: F.pixel_unshuffle(x, 2)) if function else nn.PixelUnshuffle(2)


@block(IMAGE)
def channel_shuffle(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["module", "function", "hand"])
    if shape[1] % 2:
        return None

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        if kind == "function":
            return F.channel_shuffle(x, 2)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)

    return nn.ChannelShuffle(2) if kind == "module" else Apply(function, kind)


@block(IMAGE)
def folded(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["functions", "modules", "patches", "tensor"])
    if kind == "patches" and (shape[2] % 4 or shape[3] % 4):
        return None
    down, up = nn.Unfold(3, padding=1), nn.Fold(shape[2:], 3, padding=1)

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        match kind:
            case "functions":
                return F.fold(F.unfold(x, 3, padding=1) * self.weight[None, :, None], (h, w), 3, padding=1) / 9
            case "modules":
                return self.up(self.down(x)) / 9
            case "tensor":
                return x.unfold(2, 3, 1).unfold(3, 3, 1).mean((-2, -1))
        patches = x.view(n, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return x + patches.softmax(-1).mean()

    return Apply(function, kind, down=down, up=up, weight=weight(9 * shape[1]))


@block(IMAGE, VOLUME)
def turned(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["flip", "roll", "rot90", "permute", "transpose", "narrow", "expand", "strided"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "flip":
                return x.flip(3) + x
            case "roll":
                return torch.roll(x, (1, 2), (2, 3)) * 0.5 + x
            case "rot90":
                return torch.rot90(x, 1, (2, 3))
            case "permute":
                return x.movedim(1, -1).contiguous().mul(1.1).movedim(-1, 1)
            case "transpose":
                return x.transpose(2, 3)
            case "narrow":
                return x[:, :, 1:] - x[:, :, :-1]
            case "expand":
                return x + x[:, :1].expand_as(x)
        return x[..., ::2]

    return Apply(function, kind)


@block(IMAGE)
def in_memory_format(rng: random.Random, shape: Shape) -> nn.Module | None:
    formats = {"last": torch.channels_last, "first": torch.contiguous_format}
    kind = rng.choice(sorted(formats))
    return Apply(lambda self, x: x.to(memory_format=formats[kind]) * 1.1, kind)


@block(SEQUENCE, IMAGE)
def split_and_joined(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["chunk", "split", "stack", "unbind", "interleave", "cat"])
    if shape[1] < 2:
        return None

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "chunk":
                first, *rest = x.chunk(2, 1)
                return torch.cat([F.relu(first), *rest, first[:, :1]], 1)
            case "split":
                first, rest = x.split([1, x.shape[1] - 1], 1)
                return torch.cat([rest.sin(), first], 1)
            case "stack":
                return torch.stack([x, x.tanh()], 2).flatten(1, 2)[:, :24]
            case "unbind":
                return torch.stack([part * (k + 1) for k, part in enumerate(x.unbind(1))], 1)
            case "interleave":
                return x.repeat_interleave(2, 1)[:, : x.shape[1]]
        return torch.cat([x, x.mean(1, keepdim=True), torch.zeros_like(x[:, :1])], 1)

    return Apply(function, kind)


@block(IMAGE)
def squeeze_excite(rng: random.Random, shape: Shape) -> nn.Module | None:
    c = shape[1]
    inner = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, c, 1))
    return Apply(lambda self, x: x * self.inner(x).sigmoid(), inner=inner)


@block(IMAGE)
def scaled_by_channel(rng: random.Random, shape: Shape) -> nn.Module | None:
    members = {
        "scale": weight(1, shape[1], 1, 1),
        "shift": weight(1, shape[1], 1, 1),
        "one": nn.Parameter(torch.tensor(0.1)),
    }
    return Apply(lambda self, x: x * self.scale + self.shift + self.one, **members)


@block(IMAGE)
def encode_and_decode(rng: random.Random, shape: Shape) -> nn.Module | None:
    """One level of a U-Net, with the long skip."""
    if shape[2] % 2 or shape[3] % 2:
        return None
    c = shape[1]

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        inner = self.middle(F.max_pool2d(F.relu(self.down(x)), 2))
        return self.out(torch.cat([F.interpolate(inner, scale_factor=2), x], 1))

    return Apply(
        function,
        down=nn.Conv2d(c, c, 3, padding=1),
        middle=nn.Conv2d(c, c, 3, padding=1),
        out=nn.Conv2d(2 * c, c, 1),
    )
