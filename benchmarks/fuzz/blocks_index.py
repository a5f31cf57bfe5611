"""Indices: gathering and scattering, sorting, accumulating along an axis, masks, embeddings, choices of tokens."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.fuzz.block import ANY, IMAGE, SEQUENCE, VECTOR, Apply, Shape, block, weight


@block(SEQUENCE)
def indexed(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(
        ["gather", "index", "index_select", "scatter_add", "index_add", "take_along", "scatter_reduce", "index_put",
         "index_put_add", "index_fill", "index_copy", "scatter", "take", "masked_scatter", "index_reduce"]
    )  # fmt: skip
    _, length, _ = shape

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        wide = self.index.expand(x.shape)
        match kind:
            case "gather":
                return torch.gather(x, 1, wide)
            case "index":
                return x[:, self.order]
            case "index_select":
                return torch.index_select(x, 1, self.order)
            case "scatter_add":
                return torch.zeros_like(x).scatter_add(1, wide, x)
            case "index_add":
                return x.index_add(1, self.order, x * 0.5)
            case "take_along":
                return torch.take_along_dim(x, wide, 1)
            case "scatter_reduce":
                return x.scatter_reduce(1, wide, x, rng_reduce)
            case "index_put":
                y = x.clone()
                y[:, self.order] = x * 2
                return y
            case "index_put_add":
                return x.index_put((self.index[0, :1, 0],), x[:1] * 0.5, accumulate=True)
            case "index_fill":
                return x.index_fill(1, self.order[:2], 0.5)
            case "index_copy":
                return x.index_copy(1, self.order[:2], x[:, -2:] * 2)
            case "scatter":
                return x.scatter(1, wide[:, :1], 0.5)
            case "take":
                return torch.take(x, self.order).sum() + x
            case "masked_scatter":
                return x.masked_scatter(self.order[:, None] > 1, x * 3)
        return x.index_reduce(1, self.order, x * 0.5, "mean")

    rng_reduce = rng.choice(["amax", "mean", "prod", "sum"])
    index = torch.randint(0, min(length, 3), (1, length, 1))
    return Apply(function, kind, index=index, order=torch.randperm(length))


@block(SEQUENCE, IMAGE)
def accumulated(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["cumsum", "logcumsumexp", "cummax", "cumprod", "diff", "trapezoid"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "cumsum":
                return torch.cumsum(x, 1) / x.shape[1]
            case "logcumsumexp":
                return torch.logcumsumexp(x, 1)
            case "cummax":
                return torch.cummax(x, -1).values
            case "cumprod":
                return torch.cumprod(x.clamp(0.5, 1.2), 1)
            case "diff":
                return torch.diff(x, dim=-1)
        return torch.cumulative_trapezoid(x, dim=-1) * 0.3

    return Apply(function, kind)


@block(VECTOR, SEQUENCE)
def ordered(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["sort", "argsort", "topk", "max", "kth", "median", "quantile", "mode", "unsorted"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "sort":
                return torch.sort(x, -1).values
            case "argsort":
                return torch.take_along_dim(x, x.argsort(dim=-1, stable=True), -1)
            case "topk":
                return torch.cat([torch.topk(x, max(1, x.shape[-1] // 2), -1).values, x], -1)
            case "max":
                return x - x.max(-1, keepdim=True).values
            case "kth":
                return x - x.kthvalue(1, -1, keepdim=True).values
            case "median":
                return x - x.median(1, keepdim=True).values
            case "quantile":
                return x - torch.quantile(x, 0.3, -1, keepdim=True)
            case "mode":
                return x - x.mode(-1, keepdim=True).values
        return torch.topk(x, 2, 1, sorted=False).values.sum(1, keepdim=True) + x

    return Apply(function, kind)


@block(*ANY)
def masked(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["where", "fill", "both", "multiply", "topk mask", "triangle", "bucket"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "where":
                return torch.where(x > 0.5, x * 2, x * 0.3)
            case "fill":
                return x.masked_fill(self.mask, 0.0)
            case "both":
                return torch.where(x > 0.5, x * 2, x.masked_fill(x < -1, -1.0)) + x.masked_fill(self.mask, 0)
            case "multiply":
                return x * (x > x.mean(-1, keepdim=True)).to(x.dtype)
            case "topk mask":
                least = x.topk(2, -1).values[..., -1:]
                return x.masked_fill(x < least, 0.0) + x * 0.1
            case "triangle":
                return x.triu() + x.tril(-1) * 0.5
        return x * torch.bucketize(x.detach(), self.edges).to(x.dtype)

    return Apply(function, kind, mask=torch.rand(shape[1:]) < 0.3, edges=torch.tensor([-1.0, 0.0, 1.0]))


@block(VECTOR, SEQUENCE, IMAGE)
def looked_up(rng: random.Random, shape: Shape) -> nn.Module | None:
    """Values become indices of a table."""
    kind = rng.choice(["table", "padding", "norm", "frequency", "bag", "bag max", "one hot", "function"])
    more = {"padding": {"padding_idx": 0}, "norm": {"max_norm": 1.5}, "frequency": {"scale_grad_by_freq": True}}
    table = nn.Embedding(5, shape[-1], **more.get(kind, {}))
    bag = nn.EmbeddingBag(5, shape[-1], mode="max" if kind == "bag max" else rng.choice(["sum", "mean"]))

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        index = (x.detach().mean(-1) * 2).round().long().clamp(-2, 2) + 2
        match kind:
            case "bag" | "bag max":
                return x + self.bag(index.reshape(len(x), -1)).view(-1, *[1] * (x.dim() - 2), x.shape[-1])
            case "one hot":
                return x + F.one_hot(index, 5).to(x.dtype) @ self.table.weight
            case "function":
                return x + F.embedding_bag(index.reshape(len(x), -1), self.table.weight).mean()
        return x + self.table(index)

    return Apply(function, kind, table=table, bag=bag)


@block(SEQUENCE)
def chosen_tokens(rng: random.Random, shape: Shape) -> nn.Module | None:
    """How many are chosen depends on the data, or which: boolean masks, nonzero, unique, experts by sorting."""
    kind = rng.choice(["mask", "nonzero", "experts", "sorted experts", "some", "unique"])
    width = shape[-1]

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, width)
        match kind:
            case "mask":
                return x + x[x > 0].mean()
            case "nonzero":
                rows = (flat[:, 0] > 0).nonzero().flatten()
                return flat.index_add(0, rows, self.experts[0](flat[rows])).view_as(x)
            case "unique":
                return x * len(torch.unique(x.detach().round()))
            case "some":
                kept = torch.topk(flat[:, 0], len(flat) // 2).indices
                return flat.index_copy(0, kept, self.experts[0](flat[kept]).to(flat.dtype)).view_as(x)
        share, expert = self.router(flat).softmax(-1).max(-1)
        made = torch.zeros_like(flat)
        if kind == "experts":
            for k, inner in enumerate(self.experts):
                rows = torch.where(expert == k)[0]
                made = made.index_add(0, rows, (inner(flat[rows]) * share[rows, None]).to(made.dtype))
            return x + made.view_as(x)
        order = expert.argsort(stable=True)
        parts = flat[order].split(torch.bincount(expert, minlength=len(self.experts)).tolist())
        found = torch.cat([inner(part) for inner, part in zip(self.experts, parts, strict=True)])
        return x + made.index_add(0, order, (found * share[order, None]).to(made.dtype)).view_as(x)

    experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
    return Apply(function, kind, router=nn.Linear(width, 3), experts=experts)


@block(SEQUENCE, IMAGE)
def assigned_slices(rng: random.Random, shape: Shape) -> nn.Module | None:
    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, :, 0] = 0.5
        y[:, 0] = y[:, 0] * 2
        y[..., 1:3] += x[..., :2]
        return y

    return Apply(function)


@block(SEQUENCE)
def pasted(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A learned token before the others, a place for each, and a buffer written by slices."""
    kind = rng.choice(["token", "places", "canvas", "repeat"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "token":
                return torch.cat([self.token.expand(len(x), -1, -1), x], 1)
            case "places":
                return x + self.places[torch.arange(x.shape[1], device=x.device)]
            case "repeat":
                return x + self.places.repeat(len(x), 1).view_as(x)
        canvas = x.new_zeros(len(x), x.shape[1] + 2, x.shape[2])
        canvas[:, 1 : x.shape[1] + 1] = x
        return canvas

    return Apply(function, kind, token=weight(1, 1, shape[-1]), places=weight(shape[1], shape[-1]))
