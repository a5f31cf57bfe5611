"""Loops: accumulation, clipping, scaling, schedules, parts that are frozen or come later, wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.coverage.parts import encoder, images, labels, sgd, tokens, transformer
from benchmarks.coverage.script import STEPS, Fit, Results, results, seed_all


def _cross_entropy(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda out: F.cross_entropy(out, labels(number))


def accumulation(fit: Fit) -> Iterator[Results]:
    seed_all(0)
    model = encoder(10).train()
    optimizer = sgd(model.parameters())
    model = fit(model, (images(0),), loss_fn=_cross_entropy(0), optimizer=optimizer)
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        for micro in range(3):
            loss = _cross_entropy(3 * number + micro)(model(images(3 * number + micro))) / 3
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield results(model, loss=loss.detach())


def mixed_precision(fit: Fit) -> Iterator[Results]:
    """Autocast in float16 with a gradient scaler."""
    seed_all(0)
    model = encoder(10).train()
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=256.0)
    with torch.autocast("cpu", torch.float16):
        model = fit(model, (images(0),), loss_fn=_cross_entropy(0))
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = _cross_entropy(number)(model(images(number)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield results(model, loss=loss.detach())


def low_rank_adapters(fit: Fit) -> Iterator[Results]:
    """Frozen layers with trained ones of low rank beside them."""
    seed_all(0)

    class Adapted(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner
            self.down, self.up = (
                nn.Linear(inner.in_features, 4, bias=False),
                nn.Linear(4, inner.out_features, bias=False),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.up(F.dropout(self.down(x), 0.1, self.training))

    model = transformer().train().requires_grad_(False)
    for layer in model.layers.layers:  # type: ignore[union-attr]
        layer.linear1, layer.linear2 = Adapted(layer.linear1), Adapted(layer.linear2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)

    def loss_of(out: torch.Tensor, number: int) -> torch.Tensor:
        return F.cross_entropy(out[:, :-1].flatten(0, 1), tokens(number)[:, 1:].flatten())

    model = fit(model, (tokens(0),), loss_fn=lambda out: loss_of(out, 0), optimizer=optimizer)
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        loss = loss_of(model(tokens(number)), number)
        loss.backward()
        optimizer.step()
        yield results(model, loss=loss.detach())


def gradual_unfreezing(fit: Fit) -> Iterator[Results]:
    """What is trained changes between steps."""
    seed_all(0)
    model = encoder(10).train()
    model.requires_grad_(False)[-1].requires_grad_(True)  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    model = fit(model, (images(0),), loss_fn=_cross_entropy(0))
    for number in range(STEPS):
        if number == 1:
            model.requires_grad_(True)
        seed_all(number)
        optimizer.zero_grad()
        loss = _cross_entropy(number)(model(images(number)))
        loss.backward()
        optimizer.step()
        yield results(model, loss=loss.detach())


def ragged_batches(fit: Fit) -> Iterator[Results]:
    """The last batch of an epoch is smaller, and the learning rate follows a schedule."""
    seed_all(0)
    model = encoder(10).train()
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model = fit(model, (images(0),), loss_fn=lambda out: F.cross_entropy(out, labels(0)[: len(out)]))
    for number, batch in enumerate((8, 5, 8, 8)):
        seed_all(number)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images(number, batch=batch)), labels(number, batch=batch))
        loss.backward()
        optimizer.step()
        schedule.step()
        yield results(model, loss=loss.detach())


def evaluated_between(fit: Fit) -> Iterator[Results]:
    """Evaluation after each step, and a checkpoint that is saved and loaded."""
    seed_all(0)
    model = encoder(10).train()
    optimizer = sgd(model.parameters())
    model = fit(model, (images(0),), loss_fn=_cross_entropy(0))
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        loss = _cross_entropy(number)(model.train()(images(number)))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            seen = model.eval()(images(99))
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
        yield results(model.train(), loss=loss.detach(), seen=seen)


def several_tasks(fit: Fit) -> Iterator[Results]:
    """Two losses, each with a backward pass of its own through the same graph."""
    seed_all(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.one, self.two = encoder(), nn.Linear(16, 10), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            features = self.trunk(x)
            return self.one(features), self.two(features)

    def loss_of(out: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        return F.cross_entropy(out[0], labels(number)) + F.cross_entropy(out[1], labels(number, 3))

    model = Model().train()
    optimizer = sgd(model.parameters())
    model = fit(model, (images(0),), loss_fn=lambda out: loss_of(out, 0))
    for number in range(STEPS):
        seed_all(number)
        optimizer.zero_grad()
        one, two = model(images(number))
        F.cross_entropy(one, labels(number)).backward(retain_graph=True)
        F.cross_entropy(two, labels(number, 3)).backward()
        optimizer.step()
        yield results(model, one=one.detach(), two=two.detach())
