"""Products: linear and bilinear layers, shared and low-rank weights, einsum, batched products, distances, solving."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.fuzz.block import ANY, SEQUENCE, VECTOR, Apply, Shape, block, weight


@block(*ANY)
def linear(rng: random.Random, shape: Shape) -> nn.Module | None:
    return nn.Linear(shape[-1], rng.choice([12, 16, shape[-1]]), bias=rng.random() < 0.7)


@block(VECTOR, SEQUENCE)
def bilinear(rng: random.Random, shape: Shape) -> nn.Module | None:
    if shape[-1] > 32:
        return None
    inner = nn.Bilinear(shape[-1], shape[-1], 12)
    kind = rng.choice(["module", "function"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x.flip(1)) if kind == "module" else F.bilinear(x, x.cos(), self.inner.weight)

    return Apply(function, kind, inner=inner)


@block(VECTOR, SEQUENCE)
def multilayer(rng: random.Random, shape: Shape) -> nn.Module | None:
    width = shape[-1]
    return Apply(
        lambda self, x: x + self.down(F.gelu(self.up(x), approximate=self.kind)),
        rng.choice(["none", "tanh"]),
        up=nn.Linear(width, 4 * width),
        down=nn.Linear(4 * width, width),
    )


@block(VECTOR, SEQUENCE)
def gated_multilayer(rng: random.Random, shape: Shape) -> nn.Module | None:
    width = shape[-1]
    layers = {name: nn.Linear(width, 32, bias=False) for name in ("gate", "up")}
    return Apply(
        lambda self, x: self.down(F.silu(self.gate(x)) * self.up(x)), down=nn.Linear(32, width, bias=False), **layers
    )


@block(VECTOR, SEQUENCE)
def tied(rng: random.Random, shape: Shape) -> nn.Module | None:
    """One weight for both ways."""
    return Apply(
        lambda self, x: F.linear(F.relu(F.linear(x, self.weight)), self.weight.t()),
        weight=weight(20, shape[-1], scale=0.2),
    )


@block(VECTOR, SEQUENCE)
def adapter(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A frozen layer with a trained low-rank one beside it."""
    frozen = nn.Linear(shape[-1], shape[-1]).requires_grad_(False)
    return Apply(
        lambda self, x: self.frozen(x) + 0.5 * self.up(F.dropout(self.down(x), 0.1)),
        frozen=frozen,
        down=nn.Linear(shape[-1], 2, bias=False),
        up=nn.Linear(2, shape[-1], bias=False),
    )


@block(SEQUENCE)
def product(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["einsum", "baddbmm", "bmm", "matmul", "addmm", "gram", "tensordot", "kron", "chain", "outer"])
    _, length, width = shape

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "einsum":
                return torch.einsum("btd,de,te->bte", x, self.weight, self.places)
            case "baddbmm":
                return torch.baddbmm(self.places[None], x, self.weight.expand(len(x), -1, -1), beta=0.5)
            case "bmm":
                return torch.bmm(x, self.weight.expand(len(x), -1, -1))
            case "matmul":
                return x @ self.weight
            case "addmm":
                return torch.addmm(self.places[0], x.reshape(-1, width), self.weight).view(*x.shape[:2], -1)
            case "gram":
                return torch.tril(torch.einsum("btd,bsd->bts", x, x)) @ x / length
            case "tensordot":
                return torch.tensordot(x, self.weight, 1)
            case "kron":
                return x @ torch.kron(self.weight[:1, :2], torch.eye(width, dtype=x.dtype, device=x.device))[:, :10]
            case "chain":
                return torch.linalg.multi_dot([x[0], self.weight, self.weight.t()]) + x
        return torch.einsum("bti,btj->btij", x[..., :4], x[..., :4]).flatten(2)

    return Apply(function, kind, weight=weight(width, 10, scale=0.2), places=weight(length, 10))


@block(VECTOR)
def outer_product(rng: random.Random, shape: Shape) -> nn.Module | None:
    return Apply(lambda self, x: torch.einsum("bi,bj->bij", x[:, :6], x[:, :6]).flatten(1))


@block(VECTOR, SEQUENCE)
def distance(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["cdist", "cdist 1", "cosine", "cosine module", "pairwise", "pairwise module"])
    modules = {"one": nn.CosineSimilarity(dim=-1), "two": nn.PairwiseDistance(keepdim=True)}

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        other = x.roll(1, 1)
        match kind:
            case "cdist":
                return torch.softmax(-torch.cdist(x, self.centres), -1) @ self.centres
            case "cdist 1":
                return torch.softmax(-torch.cdist(x, self.centres, p=1.0), -1) @ self.centres
            case "cosine":
                return torch.cat([x, F.cosine_similarity(x, other, dim=-1).unsqueeze(-1)], -1)
            case "cosine module":
                return x * self.one(x, other + 0.1).unsqueeze(-1)
            case "pairwise":
                return x + F.pairwise_distance(x, other, keepdim=True)
        return x * self.two(x, other + 0.1)

    return Apply(function, kind, centres=weight(6, shape[-1]), **modules)


@block(VECTOR)
def distances_of_the_batch(rng: random.Random, shape: Shape) -> nn.Module | None:
    return Apply(lambda self, x: x * F.pdist(x).mean())


@block(SEQUENCE)
def solved(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["solve", "inverse", "cholesky", "exponential", "determinant", "qr", "eigh"])
    if shape[-1] > 24:
        return None

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        square = eye * 4 + self.weight @ self.weight.t()
        match kind:
            case "solve":
                return torch.linalg.solve(square, x.transpose(1, 2)).transpose(1, 2)
            case "inverse":
                return x @ torch.linalg.inv(square)
            case "cholesky":
                return x @ torch.linalg.cholesky(square)
            case "exponential":
                return x @ torch.linalg.matrix_exp(self.weight * 0.2)
            case "determinant":
                return x * torch.linalg.slogdet(square).logabsdet * 0.1
            case "qr":
                return x @ torch.linalg.qr(square).Q
        return x * torch.linalg.eigvalsh(square)

    return Apply(function, kind, weight=weight(shape[-1], shape[-1], scale=0.2))


@block(SEQUENCE)
def quantised(rng: random.Random, shape: Shape) -> nn.Module | None:
    """The nearest of a few vectors, with the gradient passed straight through."""

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x, self.codes[None].expand(len(x), -1, -1)).argmin(-1)
        code = F.embedding(nearest, self.codes)
        return x + (code - x).detach() + (code - x.detach()) * 0.1

    return Apply(function, codes=weight(7, shape[-1]))


@block(SEQUENCE)
def experts_all_of_them(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A dense mixture of experts: every expert sees every token."""

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        made = torch.stack([expert(x) for expert in self.experts], -1)
        return (made * shares.unsqueeze(2)).sum(-1)

    width = shape[-1]
    experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
    return Apply(function, router=nn.Linear(width, 3), experts=experts)


@block(VECTOR)
def flattened(rng: random.Random, shape: Shape) -> nn.Module | None:
    return nn.Sequential(nn.Linear(shape[1], 24), nn.Unflatten(1, (4, 6)), nn.Flatten(), nn.Identity())
