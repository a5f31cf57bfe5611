"""Two models or two views: contrast, distillation, momentum encoders, averages of weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.coverage.parts import encoder, images, labels, sgd
from benchmarks.coverage.script import STEPS, Fit, Results, results, seed_all


def _contrast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = F.normalize(a), F.normalize(b)
    return F.cross_entropy(a @ b.t() / 0.2, torch.arange(len(a)))


@torch.no_grad()
def _follow(slow: nn.Module, quick: nn.Module, rate: float = 0.9) -> None:
    for a, b in zip(slow.parameters(), quick.parameters(), strict=True):
        a.mul_(rate).add_(b, alpha=1 - rate)


def sim_clr(fit: Fit) -> Iterator[Results]:
    """Two forward passes before one backward pass."""
    seed_all(0)
    model = encoder().train()
    optimizer = sgd(model.parameters())
    model = fit(model, (images(0),), loss_fn=lambda out: _contrast(out, out.roll(1, 0).detach()))
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        x = images(number)
        loss = _contrast(model(x), model(x.flip(3)))
        loss.backward()
        optimizer.step()
        yield results(model, loss=loss.detach())


def clip(fit: Fit) -> Iterator[Results]:
    """Two towers, one of them fitted, and a learned temperature."""
    seed_all(0)
    one, two, scale = encoder().train(), encoder().train(), nn.Parameter(torch.tensor(2.0))
    optimizer = sgd([*one.parameters(), *two.parameters(), scale])
    one = fit(one, (images(0),), loss_fn=lambda out: _contrast(out, out.roll(1, 0).detach()))
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        a, b = F.normalize(one(images(number))), F.normalize(two(images(number + 50)))
        scores, aim = scale.exp() * a @ b.t(), torch.arange(len(a))
        loss = (F.cross_entropy(scores, aim) + F.cross_entropy(scores.t(), aim)) / 2
        loss.backward()
        optimizer.step()
        yield results(one, loss=loss.detach(), scale=scale.grad) | {f"two {k}": v for k, v in results(two).items()}


def moco(fit: Fit) -> Iterator[Results]:
    """A momentum encoder and a queue inside the model, both written in forward."""
    seed_all(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quick = encoder()
            self.slow = copy.deepcopy(self.quick).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(32, 16)))
            self.register_buffer("at", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = F.normalize(self.quick(x))
            with torch.no_grad():
                _follow(self.slow, self.quick)
                k = F.normalize(self.slow(x.flip(3)))
            scores = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().t()], 1) / 0.2
            start = int(self.at)
            self.queue[start : start + len(k)] = k
            self.at[...] = (start + len(k)) % 32
            return scores

    def loss_of(scores: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))

    model = Model().train()
    optimizer = sgd(model.parameters())
    model = fit(model, (images(0),), loss_fn=loss_of)
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        loss = loss_of(model(images(number)))
        loss.backward()
        optimizer.step()
        yield results(model, loss=loss.detach())


def byol(fit: Fit) -> Iterator[Results]:
    """A target network outside, averaged after each step."""
    seed_all(0)
    model = nn.Sequential(encoder(), nn.Linear(16, 16)).train()
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model.parameters())
    model = fit(model, (images(0),), loss_fn=lambda out: -F.cosine_similarity(out, out.detach().roll(1, 0)).mean())
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        x = images(number)
        with torch.no_grad():
            aim = target(x.flip(2))
        loss = -F.cosine_similarity(model(x), aim).mean()
        loss.backward()
        optimizer.step()
        _follow(target, model)
        yield results(model, loss=loss.detach()) | {f"target {k}": v for k, v in results(target).items()}


def dino(fit: Fit) -> Iterator[Results]:
    """A loss that keeps a centre, and a teacher."""
    seed_all(0)

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(16))

        def forward(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
            aim = ((teacher - self.centre) / 0.04).softmax(-1).detach()
            with torch.no_grad():
                self.centre.mul_(0.9).add_(teacher.mean(0), alpha=0.1)
            return -(aim * (student / 0.1).log_softmax(-1)).sum(-1).mean()

    model, criterion = encoder().train(), Centred()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model.parameters())
    model = fit(model, (images(0),), loss_fn=lambda out: criterion(out, teacher(images(0)).detach()))
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        with torch.no_grad():
            aim = teacher(images(number).flip(3))
        loss = criterion(model(images(number)), aim)
        loss.backward()
        optimizer.step()
        _follow(teacher, model)
        yield results(model, loss=loss.detach()) | results(criterion)


def distillation(fit: Fit) -> Iterator[Results]:
    """The soft labels of a teacher in eval mode."""
    seed_all(0)
    model, teacher = encoder(10).train(), encoder(10).eval()
    optimizer = sgd(model.parameters())

    def loss_of(out: torch.Tensor, number: int) -> torch.Tensor:
        with torch.no_grad():
            soft = (teacher(images(number)) / 2).softmax(-1)
        hard = F.cross_entropy(out, labels(number))
        return hard + 4 * F.kl_div((out / 2).log_softmax(-1), soft, reduction="batchmean")

    model = fit(model, (images(0),), loss_fn=lambda out: loss_of(out, 0))
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        loss = loss_of(model(images(number)), number)
        loss.backward()
        optimizer.step()
        yield results(model, loss=loss.detach())


def feature_distillation(fit: Fit) -> Iterator[Results]:
    """Features that forward hooks collect, in student and teacher."""
    seed_all(0)
    model, teacher = encoder(10).train(), encoder(10).eval().requires_grad_(False)
    seen: dict[str, torch.Tensor] = {}
    model[3].register_forward_hook(lambda m, x, out: seen.__setitem__("student", out))  # type: ignore[index]
    teacher[3].register_forward_hook(lambda m, x, out: seen.__setitem__("teacher", out))  # type: ignore[index]
    optimizer = sgd(model.parameters())
    model = fit(model, (images(0),), loss_fn=lambda out: F.cross_entropy(out, labels(0)))
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        x = images(number)
        teacher(x)
        loss = F.cross_entropy(model(x), labels(number)) + F.mse_loss(seen["student"], seen["teacher"])
        loss.backward()
        optimizer.step()
        yield results(model, loss=loss.detach())


def averaged_weights(fit: Fit) -> Iterator[Results]:
    """An exponential average of the weights, evaluated between steps."""
    seed_all(0)
    model = encoder(10).train()
    optimizer = sgd(model.parameters())
    model = fit(model, (images(0),), loss_fn=lambda out: F.cross_entropy(out, labels(0)), optimizer=optimizer)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images(number)), labels(number))
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            seen = average.eval()(images(99))
        yield results(model, loss=loss.detach(), seen=seen)
