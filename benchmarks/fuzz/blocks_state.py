"""Things a forward pass does beside computing: state, frozen and shared parts, autograd's doors, and graph breaks."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.fuzz.block import ANY, IMAGE, SEQUENCE, VECTOR, Apply, Shape, block, weight


@block(VECTOR, SEQUENCE)
def buffers_written(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["average", "assigned", "counted", "queue", "first time"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().flatten(0, -2).mean(0).to(self.mean.dtype)
        match kind:
            case "average":
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(mean, alpha=0.1)
            case "assigned":
                self.mean = mean
            case "counted":
                self.count += 1
                return x * self.count
            case "queue":
                self.queue[int(self.count) % 4] = mean
                self.count += 1
                return x - self.queue.mean(0)
            case _:
                if self.count == 0:
                    self.mean.copy_(mean)
                self.count += 1
        return x - self.mean

    width = shape[-1]
    members = {"mean": torch.zeros(width), "count": torch.zeros((), dtype=torch.long), "queue": torch.zeros(4, width)}
    return Apply(function, kind, **members)


@block(VECTOR, SEQUENCE)
def parameters_written(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A parameter that is not trained by gradients: a momentum encoder, statistics kept as Keras keeps them."""
    kind = rng.choice(["momentum", "statistics"])
    online, target = nn.Linear(shape[-1], shape[-1]), nn.Linear(shape[-1], shape[-1]).requires_grad_(False)

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        if kind == "statistics":
            with torch.no_grad():
                self.mean.lerp_(x.flatten(0, -2).mean(0).to(self.mean.dtype), 0.2)
            return self.online(x - self.mean)
        with torch.no_grad():
            for slow, quick in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.mul_(0.9).add_(quick, alpha=0.1)
            aim = self.target(x)
        return self.online(x) - 0.5 * aim

    mean = nn.Parameter(torch.zeros(shape[-1]), requires_grad=False)
    return Apply(function, kind, online=online, target=target, mean=mean)


@block(*ANY)
def attributes_written(rng: random.Random, shape: Shape) -> nn.Module | None:
    """Plain attributes, lists and dicts that change in forward."""
    kind = rng.choice(["number", "list", "dict", "tensor", "features"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "number":
                self.calls += 1
                return x * (1 + 0.1 * (self.calls % 2))
            case "list":
                self.kept.append(tuple(x.shape))
                return x * 1.1
            case "dict":
                self.cache["mean"] = x.detach().mean()
                return x + self.cache["mean"]
            case "tensor":
                last, self.last = self.last, x.detach().mean()
                return x if last is None else x + 0.1 * last
        self.features = x * 2
        return self.features.sin()

    return Apply(function, kind, calls=0, kept=[], cache={}, last=None, features=None)


@block(*ANY)
def partly_unused(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["unused", "frozen", "no gradient", "detached"])
    members = {"one": nn.Parameter(torch.tensor(0.7)), "unused": weight(3)}

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "unused":
                return x + self.one
            case "frozen":
                return x * self.one.detach() + x.sin() * self.one
            case "no gradient":
                with torch.no_grad():
                    aim = (x * self.one).tanh()
                return x + aim
        return x + (x * self.one).detach() + self.one

    return Apply(function, kind, **members)


@block(VECTOR, SEQUENCE)
def shared(rng: random.Random, shape: Shape) -> nn.Module | None:
    """One module called twice, or one parameter in two modules."""
    one, two = nn.Linear(shape[-1], shape[-1]), nn.Linear(shape[-1], shape[-1])
    kind = rng.choice(["module", "parameter"])
    if kind == "parameter":
        two.weight = one.weight

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        return self.one(torch.tanh(self.one(x))) if kind == "module" else self.two(torch.relu(self.one(x)))

    return Apply(function, kind, one=one, two=two)


class Sine(torch.autograd.Function):
    """A function of the user's own that saves its inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale + x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * (scale + x.cos()), (gradient * x).sum().reshape(scale.shape)


class Reverse(torch.autograd.Function):
    """The identity whose gradient is turned round, as in domain-adversarial training."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.factor * gradient, None


class Halve(torch.autograd.Function):
    """Written over its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5


@block(*ANY)
def own_function(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["sine", "reverse", "halve"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "sine":
                return Sine.apply(x, self.scale)
            case "reverse":
                return Reverse.apply(x * self.scale, 0.5)
        return Halve.apply(x * self.scale)

    return Apply(function, kind, scale=nn.Parameter(torch.tensor(0.7)))


@block(VECTOR, SEQUENCE)
def checkpointed(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["new", "reentrant", "sequential"])
    width = shape[-1]
    inner = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width))

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        if kind == "sequential":
            return checkpoint_sequential(self.inner, 2, x, use_reentrant=False)
        return checkpoint(self.inner, x, use_reentrant=kind == "reentrant")

    return Apply(function, kind, inner=inner)


@block(*ANY)
def graph_break(rng: random.Random, shape: Shape) -> nn.Module | None:
    """Things Dynamo leaves a graph for: a call that it does not follow, a number read, a branch on data, NumPy."""
    kind = rng.choice(["call", "item", "branch", "numpy", "unused result"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        match kind:
            case "call":
                torch._dynamo.graph_break()
            case "item":
                return y * (1 + 0.1 * float(y.detach().mean().item() > 0))
            case "branch":
                return y.sin() if y.sum() > 0 else y.cos()
            case "numpy":
                return y + torch.from_numpy(y.detach().double().numpy().mean(keepdims=True)).to(y.dtype)
            case _:
                self.seen = y.exp().sum()
                torch._dynamo.graph_break()
        return y.sin()

    return Apply(function, kind, scale=nn.Parameter(torch.tensor(0.8)), seen=None)


@block(*ANY)
def asking_who_runs(rng: random.Random, shape: Shape) -> nn.Module | None:
    """Code that asks whether it is being compiled, and does the same sum in another order if so."""

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return x / 3.0
        return x * (1.0 / 3.0) if self.training else x

    return Apply(function)


@block(*ANY)
def tensor_hooks(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A gradient that a hook changes, registered in forward."""

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return y.tanh()

    return Apply(function, scale=nn.Parameter(torch.tensor(0.8)))


@block(VECTOR, SEQUENCE)
def functional(rng: random.Random, shape: Shape) -> nn.Module | None:
    """Transformations of functions inside a model: vmap, functional_call, a gradient within the forward pass."""
    kind = rng.choice(["vmap", "call", "gradient"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "vmap":
                return torch.func.vmap(lambda row: row * row.norm() * 0.3)(x)
            case "call":
                halved = {name: p * 0.5 for name, p in self.inner.named_parameters()}
                return torch.func.functional_call(self.inner, halved, (x,))
        return x + torch.func.grad(lambda v: self.inner(v).square().mean())(x)

    return Apply(function, kind, inner=nn.Linear(shape[-1], shape[-1]))


@block(VECTOR, SEQUENCE)
def containers(rng: random.Random, shape: Shape) -> nn.Module | None:
    width = shape[-1]
    layers = nn.ModuleDict({"a": nn.Linear(width, width), "b": nn.Linear(width, width)})
    scales = nn.ParameterDict({"a": weight(width), "b": weight(1)})
    shifts = nn.ParameterList([weight(width), weight(1)])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.layers.items():
            x = layer(x) * self.scales[name]
        return x + sum(self.shifts)

    return Apply(function, layers=layers, scales=scales, shifts=shifts)


@block(IMAGE, SEQUENCE)
def auxiliary_loss(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A loss that leaves by an attribute; the training loop of the fuzz adds it to its own."""

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.aux_loss = y.square().mean() * 0.1
        return x + y

    return Apply(function, inner=nn.Linear(shape[-1], shape[-1]), aux_loss=None)
