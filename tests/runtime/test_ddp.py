"""DistributedDataParallel around a fitted module, and fitted: gradients come once, averaged; its buckets count."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit.capture.residents import storage_bytes
from memfit.profiling.memory import measure
from tests.processes import run

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


def model() -> nn.Module:
    torch.manual_seed(0)
    convolutions = [nn.Sequential(nn.Conv2d(n, 8, 3, padding=1), nn.ReLU()) for n in (3, 8, 8)]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 96 * 96, 3))


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def images(rank: int) -> torch.Tensor:
    return torch.randn(1, 3, 192, 192, generator=torch.Generator().manual_seed(rank))


def trains_as_plain(parallel: nn.Module, fitted: nn.Module, plain: nn.Module, rank: int, world: int) -> None:
    """Two steps, each against the mean of the baseline gradients of all processes."""
    seen: list[str] = []
    for name, parameter in fitted.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    for step in range(2):
        parallel.zero_grad()
        seen.clear()
        loss_fn(parallel(images(rank + 10 * step))).backward()
        assert sorted(seen) == sorted(name for name, _ in fitted.named_parameters())
        plain.zero_grad()
        for other in range(world):
            (loss_fn(plain(images(other + 10 * step))) / world).backward()
        for one, expected in zip(fitted.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and expected.grad is not None
            torch.testing.assert_close(one.grad, expected.grad, rtol=1e-4, atol=1e-6)


@functools.cache
def peak_bytes() -> int:
    """What a step takes with a budget that is ample."""
    return memfit.plan(model(), (images(0),), budget="2GiB", loss_fn=loss_fn, prove=False).predicted.peak_bytes


def around(rank: int, world: int, levers: str, budget: int) -> None:
    fitted = model()
    plain = copy.deepcopy(fitted)
    memfit.fit(fitted, (images(rank),), budget=budget, loss_fn=loss_fn, levers=levers, search_seconds=0.1)
    assert memfit.plan_of(fitted).is_tiled == (levers == "all")
    trains_as_plain(DistributedDataParallel(fitted), fitted, plain, rank, world)


@pytest.mark.parametrize(("levers", "share"), [("bitwise", 0.8), ("all", 0.6)])
def test_gradients_come_once_and_are_averaged(levers: str, share: float, tmp_path: Path) -> None:
    run(around, 2, tmp_path, levers, int(share * peak_bytes()))


def inside(rank: int, world: int, as_view: bool, alone_bytes: int) -> None:
    inner = model()
    plain = copy.deepcopy(inner)
    parallel = DistributedDataParallel(inner, gradient_as_bucket_view=as_view)
    buckets = sum(p.nbytes for p in inner.parameters())
    if as_view:
        ample = memfit.plan(parallel, (images(rank),), budget="2GiB", loss_fn=loss_fn, prove=False)
        assert ample.predicted.peak_bytes == alone_bytes + buckets
    budget = int(0.8 * (alone_bytes + buckets))
    assert memfit.fit(parallel, (images(rank),), budget=budget, loss_fn=loss_fn, search_seconds=0.1) is parallel
    assert memfit.plan_of(parallel).decisions

    x = images(rank)

    def step() -> None:
        for parameter in inner.parameters():
            parameter.grad = None
        loss_fn(parallel(x)).backward()

    step()
    start = storage_bytes([*inner.parameters(), x], "cpu") + buckets
    held = sum(p.nbytes for p in inner.parameters()) if as_view else 0
    peak = measure(step, warmup=1, repeats=0, start_bytes=start).peak_bytes
    assert peak - held <= budget
    trains_as_plain(parallel, inner, plain, rank, world)
    memfit.release(parallel)
    with pytest.raises(memfit.MemfitError, match="not fitted"):
        memfit.plan_of(parallel)


@pytest.mark.parametrize("as_view", [False, True])
def test_a_wrapped_module_is_fitted_beside_its_buckets(as_view: bool, tmp_path: Path) -> None:
    run(inside, 2, tmp_path, as_view, peak_bytes())


def at_its_first_call(rank: int, world: int, budget: int) -> None:
    inner = model()
    plain = copy.deepcopy(inner)
    wrapped = DistributedDataParallel(inner, bucket_cap_mb=1e-3)
    parallel = memfit.fit(wrapped, budget=budget, search_seconds=0.1)
    assert type(parallel) is DistributedDataParallel
    trains_as_plain(parallel, inner, plain, rank, world)
    assert memfit.plan_of(parallel).program.recomputed()


def test_a_wrapped_module_is_planned_while_the_wrapper_calls_it(tmp_path: Path) -> None:
    """Its graph must not be split at the buckets."""
    buckets = sum(p.nbytes for p in model().parameters())
    run(at_its_first_call, 2, tmp_path, int(0.8 * (peak_bytes() + buckets)))
