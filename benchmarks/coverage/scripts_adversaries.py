"""Games and second gradients: GANs, penalties on gradients, sharpness, policies."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.coverage.parts import encoder, images, labels, perceptron, sgd
from benchmarks.coverage.script import STEPS, Fit, Results, results, seed_all


def _critic() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(512, 1),
    )  # fmt: skip


def _generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16 * 16), nn.Unflatten(1, (16, 4, 4)), nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.BatchNorm2d(16),
        nn.ReLU(inplace=True), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def gan(fit: Fit) -> Iterator[Results]:
    """Both fitted; the generator's gradient goes through the discriminator."""
    seed_all(0)
    maker, judge = _generator().train(), _critic().train()
    of_maker, of_judge = sgd(maker.parameters()), sgd(judge.parameters())
    judge = fit(judge, (images(0),), loss_fn=lambda out: F.softplus(-out).mean())
    maker = fit(maker, (torch.randn(8, 8),), loss_fn=lambda out: out.square().mean())
    for number in range(STEPS):
        seed_all(number)
        made = maker(torch.randn(8, 8))
        of_judge.zero_grad()
        judged = F.softplus(-judge(images(number))).mean() + F.softplus(judge(made.detach())).mean()
        judged.backward()
        of_judge.step()
        of_maker.zero_grad()
        fooled = F.softplus(-judge(made)).mean()
        fooled.backward()
        of_maker.step()
        found = results(maker, judged=judged.detach(), fooled=fooled.detach())
        yield found | {f"judge {k}": v for k, v in results(judge).items()}


def wgan_with_gradient_penalty(fit: Fit) -> Iterator[Results]:
    """The critic's penalty differentiates twice, which it does on its plain module."""
    seed_all(0)
    maker, critic = _generator().train(), _critic().train()
    of_maker, of_critic = sgd(maker.parameters()), sgd(critic.parameters())
    maker = fit(maker, (torch.randn(8, 8),), loss_fn=lambda out: out.square().mean())
    for number in range(STEPS):
        seed_all(number)
        made, real = maker(torch.randn(8, 8)), images(number)
        share = torch.rand(8, 1, 1, 1)
        between = (share * real + (1 - share) * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        of_critic.zero_grad()
        judged = critic(made.detach()).mean() - critic(real).mean() + 10 * penalty
        judged.backward()
        of_critic.step()
        of_maker.zero_grad()
        fooled = -critic(made).mean()
        fooled.backward()
        of_maker.step()
        yield results(maker, judged=judged.detach(), fooled=fooled.detach())


def domain_adversary(fit: Fit) -> Iterator[Results]:
    """Two heads on one fitted trunk; the gradient of one is turned round."""
    seed_all(0)
    trunk, task, domain = encoder().train(), nn.Linear(16, 10), perceptron(16, 2)
    optimizer = sgd([*trunk.parameters(), *task.parameters(), *domain.parameters()])
    trunk = fit(trunk, (images(0),), loss_fn=lambda out: out.square().mean())
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        features = trunk(images(number))
        turned = features.detach() * 2 - features
        loss = F.cross_entropy(task(features), labels(number)) + F.cross_entropy(domain(turned), labels(number, 2))
        loss.backward()
        optimizer.step()
        yield results(trunk, loss=loss.detach()) | {f"task {k}": v for k, v in results(task).items()}


def adversarial_training(fit: Fit) -> Iterator[Results]:
    """Gradients with respect to the input, then a step on what they make."""
    seed_all(0)
    model = encoder(10).train()
    optimizer = sgd(model.parameters())
    x = images(0).requires_grad_()
    model = fit(model, (x,), loss_fn=lambda out: F.cross_entropy(out, labels(0)))
    for number in range(STEPS):
        seed_all(number)
        x, y = images(number).requires_grad_(), labels(number)
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        optimizer.zero_grad()
        loss = F.cross_entropy(model((x + 0.03 * slope.sign()).detach().requires_grad_()), y)
        loss.backward()
        optimizer.step()
        yield results(model, loss=loss.detach(), slope=slope)


def sharpness_aware(fit: Fit) -> Iterator[Results]:
    """Two passes for each step, the second from weights moved uphill."""
    seed_all(0)
    model = encoder(10).train()
    optimizer = sgd(model.parameters())
    model = fit(model, (images(0),), loss_fn=lambda out: F.cross_entropy(out, labels(0)))
    for number in range(STEPS):
        seed_all(number)
        x, y = images(number), labels(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        parameters = [p for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            length = torch.stack([p.grad.norm() for p in parameters]).norm() + 1e-12
            moves = [0.05 * p.grad / length for p in parameters]
            for p, move in zip(parameters, moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p, move in zip(parameters, moves, strict=True):
                p.sub_(move)
        optimizer.step()
        yield results(model, loss=loss.detach())


def policy_gradient(fit: Fit) -> Iterator[Results]:
    """Actions are drawn from what the model says, and their likelihood is weighed by a return."""
    seed_all(0)
    model = perceptron(6, 4, dropout=0.1).train()
    optimizer = sgd(model.parameters())
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))

    def loss_of(out: torch.Tensor) -> torch.Tensor:
        chosen = torch.distributions.Categorical(logits=out)
        action = chosen.sample()
        gain = (action == 2).float() - 0.5
        return -(chosen.log_prob(action) * gain).mean() - 0.01 * chosen.entropy().mean()

    model = fit(model, (x,), loss_fn=loss_of)
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        yield results(model, loss=loss.detach())
