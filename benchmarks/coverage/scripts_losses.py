"""Losses: what a criterion does between a model's output and the scalar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.coverage.parts import encoder, images, labels, perceptron, sgd, tokens, transformer
from benchmarks.coverage.script import STEPS, Fit, Results, results, seed_all

Loss = Callable[[Any, int], torch.Tensor]


def _loop(
    fit: Fit, model: nn.Module, batch: Callable[[int], torch.Tensor], loss_of: Loss, *, more: nn.Module | None = None
) -> Iterator[Results]:
    """One model, one loss with targets of its own, and a loss's own parameters if it has any."""
    optimizer = sgd([*model.parameters(), *(more.parameters() if more is not None else ())])
    model = fit(model.train(), (batch(0),), loss_fn=lambda out: loss_of(out, 0))
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        loss = loss_of(model(batch(number)), number)
        loss.backward()
        optimizer.step()
        yield results(model, loss=loss.detach()) | (results(more) if more is not None else {})


def label_smoothing(fit: Fit) -> Iterator[Results]:
    seed_all(0)
    yield from _loop(fit, encoder(10), images, lambda out, n: F.cross_entropy(out, labels(n), label_smoothing=0.1))


def mixup(fit: Fit) -> Iterator[Results]:
    seed_all(0)
    order = torch.arange(8).flip(0)

    def batch(number: int) -> torch.Tensor:
        return 0.7 * images(number) + 0.3 * images(number)[order]

    def loss(out: torch.Tensor, number: int) -> torch.Tensor:
        y = labels(number)
        return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[order])

    yield from _loop(fit, encoder(10), batch, loss)


def hard_example_mining(fit: Fit) -> Iterator[Results]:
    """Only the samples with the larger losses count: how many depends on the data."""
    seed_all(0)

    def loss(out: torch.Tensor, number: int) -> torch.Tensor:
        each = F.cross_entropy(out, labels(number), reduction="none")
        return each[each > each.mean()].mean()

    yield from _loop(fit, encoder(10), images, loss)


def focal(fit: Fit) -> Iterator[Results]:
    seed_all(0)

    def loss(out: torch.Tensor, number: int) -> torch.Tensor:
        each = F.cross_entropy(out, labels(number), reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()

    yield from _loop(fit, encoder(10), images, loss)


def triplet_of_the_batch(fit: Fit) -> Iterator[Results]:
    """The farthest of the same class and the nearest of another."""
    seed_all(0)

    def loss(out: torch.Tensor, number: int) -> torch.Tensor:
        apart, y = torch.cdist(out, out), labels(number, 3)
        same = y[:, None] == y
        far = apart.masked_fill(~same, 0.0).max(1).values
        near = apart.masked_fill(same, float("inf")).min(1).values
        return F.relu(far - near + 0.3).mean()

    yield from _loop(fit, encoder(), images, loss)


def arc_face(fit: Fit) -> Iterator[Results]:
    """A loss with weights of its own and a margin on angles."""
    seed_all(0)

    class Margin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(10, 16) * 0.1)

        def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            cosine = F.linear(F.normalize(out), F.normalize(self.weight)).clamp(-0.999, 0.999)
            wider = torch.cos(torch.acos(cosine) + 0.5)
            mine = F.one_hot(y, 10).bool()
            return F.cross_entropy(16 * torch.where(mine, wider, cosine), y)

    margin = Margin()
    yield from _loop(fit, encoder(), images, lambda out, n: margin(out, labels(n)), more=margin)


def centre_loss(fit: Fit) -> Iterator[Results]:
    """Class centres that the loss keeps as a buffer and moves."""
    seed_all(0)

    class Centres(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centres", torch.zeros(10, 16))

        def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.centres.index_add_(0, y, 0.1 * (out - self.centres[y]))
            return (out - self.centres[y]).square().mean() + out.square().mean()

    centres = Centres()
    yield from _loop(fit, encoder(), images, lambda out, n: centres(out, labels(n)), more=centres)


def ctc(fit: Fit) -> Iterator[Results]:
    seed_all(0)

    def loss(out: torch.Tensor, number: int) -> torch.Tensor:
        frames = out.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(frames, tokens(number, length=4) % 49 + 1, (16,) * 4, (4,) * 4)

    yield from _loop(fit, transformer(), tokens, loss)


def dice(fit: Fit) -> Iterator[Results]:
    """Segmentation: overlap and cross entropy."""
    seed_all(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 4, 1)
    )

    def loss(out: torch.Tensor, number: int) -> torch.Tensor:
        y = torch.randint(0, 4, (8, 16, 16), generator=torch.Generator().manual_seed(number))
        shares, aim = out.softmax(1), F.one_hot(y, 4).permute(0, 3, 1, 2).float()
        overlap = (2 * (shares * aim).sum((2, 3)) + 1) / (shares.sum((2, 3)) + aim.sum((2, 3)) + 1)
        return 1 - overlap.mean() + F.cross_entropy(out, y)

    yield from _loop(fit, model, images, loss)


def boxes(fit: Fit) -> Iterator[Results]:
    """Detection in one stage: anchors that match a box, chosen by their overlap with it, and the rest."""
    seed_all(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 5, 1))

    def loss(out: torch.Tensor, number: int) -> torch.Tensor:
        guesses = out.flatten(2).transpose(1, 2)
        centres = torch.rand(8, 1, 2, generator=torch.Generator().manual_seed(number))
        places = torch.stack(torch.meshgrid(*[torch.linspace(0, 1, 8)] * 2, indexing="ij"), -1).view(1, 64, 2)
        near = (places - centres).norm(dim=-1) < 0.25
        found = guesses[near]
        score = F.binary_cross_entropy_with_logits(guesses[..., 4], near.float())
        return score + F.smooth_l1_loss(found[:, :2], (centres - places)[near]) + found[:, 2:4].abs().mean()

    yield from _loop(fit, model, images, loss)


def vae(fit: Fit) -> Iterator[Results]:
    """Reconstruction and divergence of a latent that the model draws."""
    seed_all(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = perceptron(48, 16), perceptron(8, 48)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            mean, variance = self.down(x).chunk(2, -1)
            return self.up(mean + torch.randn_like(mean) * (0.5 * variance).exp()), mean, variance

    def batch(number: int) -> torch.Tensor:
        return images(number, size=4).flatten(1)

    def loss(out: Any, number: int) -> torch.Tensor:
        made, mean, variance = out
        return F.mse_loss(made, batch(number)) - 0.05 * (1 + variance - mean**2 - variance.exp()).mean()

    yield from _loop(fit, Model(), batch, loss)


def diffusion(fit: Fit) -> Iterator[Results]:
    """The noise that was added is what is predicted."""
    seed_all(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.inner = nn.Embedding(100, 3), nn.Conv2d(3, 16, 3, padding=1)
            self.norm, self.out = nn.GroupNorm(4, 16), nn.Conv2d(16, 3, 3, padding=1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            t = torch.randint(0, 100, (len(x),))
            noise, kept = torch.randn_like(x), (1 - t / 100).view(-1, 1, 1, 1)
            noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise + self.time(t)[..., None, None]
            return self.out(F.silu(self.norm(self.inner(noisy)))), noise

    yield from _loop(fit, Model(), images, lambda out, n: F.mse_loss(*out))


def masked_language(fit: Fit) -> Iterator[Results]:
    """Only the positions that were masked are looked at, by index."""
    seed_all(0)

    def loss(out: torch.Tensor, number: int) -> torch.Tensor:
        y = tokens(number)
        hidden = y % 5 == 0
        return F.cross_entropy(out[hidden], y[hidden])

    yield from _loop(fit, transformer(), tokens, loss)


def preferences(fit: Fit) -> Iterator[Results]:
    """Direct preference optimisation: the likelihoods of two answers against a frozen model's."""
    seed_all(0)
    model, reference = transformer(), transformer().requires_grad_(False)

    def likelihood(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return out.log_softmax(-1).gather(-1, y[..., None]).squeeze(-1).sum(-1)

    def loss(out: torch.Tensor, number: int) -> torch.Tensor:
        y = tokens(number)
        with torch.no_grad():
            theirs = likelihood(reference.eval()(y), y)
        better, worse = (likelihood(out, y) - theirs).chunk(2)
        return -F.logsigmoid(0.1 * (better - worse)).mean()

    yield from _loop(fit, model, tokens, loss)
