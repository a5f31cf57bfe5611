"""A fitted module in DistributedDataParallel: every parameter's gradient comes once a step, averaged over processes."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memfit

_PROCESSES = 2


def model() -> nn.Module:
    torch.manual_seed(0)
    convolutions = [nn.Sequential(nn.Conv2d(n, 8, 3, padding=1), nn.ReLU()) for n in (3, 8, 8, 8)]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3))


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def images(rank: int) -> torch.Tensor:
    return torch.randn(1, 3, 192, 192, generator=torch.Generator().manual_seed(rank))


def train(rank: int, rendezvous: str, levers: str, share: float) -> None:
    """One process: two steps of the fitted module, each against the mean of the plain gradients of all."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=_PROCESSES, timeout=timedelta(seconds=120)
    )
    try:
        fitted = model()
        fitted(images(rank))
        plain = copy.deepcopy(fitted)
        peak = memfit.plan(fitted, (images(rank),), budget="2GiB", loss_fn=loss_fn, prove=False).predicted.peak_bytes
        budget = int(share * peak)
        memfit.fit(fitted, (images(rank),), budget=budget, loss_fn=loss_fn, levers=levers, search_seconds=0.1)
        assert memfit.plan_of(fitted).is_tiled == (levers == "all")
        seen: list[str] = []
        for name, parameter in fitted.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
        parallel = DistributedDataParallel(fitted)
        for step in range(2):
            parallel.zero_grad()
            seen.clear()
            loss_fn(parallel(images(rank + 10 * step))).backward()
            assert sorted(seen) == sorted(name for name, _ in fitted.named_parameters())
            plain.zero_grad()
            for other in range(_PROCESSES):
                (loss_fn(plain(images(other + 10 * step))) / _PROCESSES).backward()
            for one, expected in zip(fitted.parameters(), plain.parameters(), strict=True):
                assert one.grad is not None and expected.grad is not None
                torch.testing.assert_close(one.grad, expected.grad, rtol=1e-4, atol=1e-6)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize(("levers", "share"), [("bitwise", 0.8), ("all", 0.6)])
def test_gradients_come_once_and_are_averaged(levers: str, share: float, tmp_path: Path) -> None:
    mp.spawn(train, args=(str(tmp_path / "rendezvous"), levers, share), nprocs=_PROCESSES, join=True)
