"""Calls that differ in sizes of inputs only: plans are carried over, with the same bits, within the budget."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memfit
from memfit.compiler.plan import CompiledPlan
from memfit.fitted.installation import fitted_call
from memfit.profiling.cost_cache import open_cache
from memfit.profiling.measurements import measurements_of
from memfit.profiling.memory import allocation_peak
from memfit.profiling.sampled_workspace import is_convolution

_WIDTH, _WORDS = 64, 97


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, 16).permute(2, 0, 3, 1, 4)
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        whole: Tensor = self.out(made.transpose(1, 2).reshape(batch, length, _WIDTH))
        return whole


def feed() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))


class Decoder(nn.Module):
    """A language model as libraries write it: positions from a buffer, a mask that is looked at, a loss inside."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_WORDS, _WIDTH), nn.Embedding(512, _WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(layers))
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))
            for _ in range(layers)
        )
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(_WIDTH, _WORDS)
        self.register_buffer("positions", torch.arange(512)[None], persistent=False)

    def forward(self, words: Tensor, mask: Tensor | None = None) -> Tensor:
        length = words.shape[1]
        x = self.drop(self.words(words) + self.places(self.positions[:, :length]))
        full: Tensor | None = None
        if mask is not None and not bool(mask.sum() == mask.numel()):
            full = mask[:, None, None, :].expand(-1, 1, length, length).bool().tril()
        for layer, norm, feed in zip(self.layers, self.norms, self.feeds, strict=True):
            x = x + self.drop(layer(norm(x), full))
            x = x + feed(norm(x))
        logits = self.head(x[:, slice(0, None), :])
        return F.cross_entropy(logits[:, :-1].reshape(-1, _WORDS), words[:, 1:].reshape(-1), ignore_index=0)


def texts(rows: int, length: int, padded: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1000 * rows + length)
    words, mask = torch.randint(1, _WORDS, (rows, length)), torch.ones(rows, length, dtype=torch.long)
    if padded:
        words[0, -padded:], mask[0, -padded:] = 0, 0
    return words, mask


Batch = tuple[Tensor, ...]


class Trained:
    """A module that is trained twice, plainly and fitted; each step is compared, bit by bit."""

    def __init__(self, model: nn.Module, budget: int, **options: Any) -> None:
        self.plain, self.fitted, self.budget = model, copy.deepcopy(model), budget
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (self.plain, self.fitted)]
        memfit.fit(self.fitted, budget=budget, optimizer=self.optimizers[1], **options)

    def step(self, batch: Batch, loss: Callable[[Any], Tensor] = lambda output: output) -> CompiledPlan:
        losses = []
        for model, optimizer in zip((self.plain, self.fitted), self.optimizers, strict=True):
            torch.manual_seed(0)
            made = loss(model(*batch))
            made.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(made.detach())
        assert torch.equal(*losses)
        for (name, one), other in zip(self.plain.state_dict().items(), self.fitted.state_dict().values(), strict=True):
            assert torch.equal(one, other), name
        return self.plan_of(batch)

    def plan_of(self, batch: Batch) -> CompiledPlan:
        calls = fitted_call(self.fitted)
        (key,) = [key for key in calls.plans if [entry[0] for entry in key[: len(batch)]] == [t.shape for t in batch]]
        return calls.plans[key]

    def peak(self, batch: Batch) -> int:
        """Peak of another step of the fitted module, with everything that is there before it."""
        state = [t for entry in self.optimizers[1].state.values() for t in entry.values() if isinstance(t, Tensor)]
        there = [*self.fitted.parameters(), *self.fitted.buffers(), *batch, *state]
        buffers = [buffer.clone() for buffer in self.fitted.buffers()]
        more_bytes = allocation_peak(lambda: self.fitted(*batch).backward())
        for buffer, before in zip(self.fitted.buffers(), buffers, strict=True):
            buffer.copy_(before)
        self.optimizers[1].zero_grad()
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in there}.values()) + more_bytes


def plain_peak(model: nn.Module, batch: Batch) -> int:
    return memfit.estimate(model, batch, optimizer=torch.optim.AdamW(model.parameters())).peak


def is_carried(plan: CompiledPlan) -> bool:
    assert plan.planned is not None
    return not plan.planned.is_measured


@pytest.mark.smoke
def test_lengths_and_the_last_batch_are_carried_over(told: list[str]) -> None:
    model = Decoder(3)
    budget = int(0.8 * plain_peak(model, texts(4, 128)))
    trained = Trained(model, budget)
    assert not is_carried(trained.step(texts(4, 128)))
    for rows, length in ((4, 100), (4, 117), (4, 33), (3, 90), (2, 111), (4, 128), (4, 33)):
        batch = texts(rows, length)
        plan = trained.step(batch)
        assert is_carried(plan) == (length != 128)
        assert plan.predicted.peak_bytes <= budget
        assert trained.peak(batch) <= budget
    assert len(fitted_call(trained.fitted).symbolic.made) == 1  # the first capture is for many lengths and rows
    assert "planned again" not in " ".join(told)


def test_larger_sizes_get_leaner_plans() -> None:
    model = Decoder(2)
    budget = int(0.9 * plain_peak(model, texts(4, 96)))
    trained = Trained(model, budget)
    trained.step(texts(4, 96))
    for length in (104, 112, 120):
        batch = texts(4, length)
        plan = trained.step(batch)
        assert is_carried(plan)
        assert trained.peak(batch) <= plan.predicted.peak_bytes <= budget


def test_a_mask_with_padding_takes_its_own_path() -> None:
    model = Decoder(2)
    trained = Trained(model, int(0.9 * plain_peak(model, texts(4, 96))))
    trained.step(texts(4, 96))
    trained.step(texts(4, 80))
    trained.step(texts(4, 72))
    for length, padded in ((72, 9), (64, 0), (64, 5), (72, 0), (96, 3)):
        torch.manual_seed(0)
        words, mask = texts(4, length, padded)
        losses = []
        for one in (trained.plain, trained.fitted):
            torch.manual_seed(0)
            losses.append(one(words, mask))
        assert torch.equal(*losses), (length, padded)
        for made in losses:
            made.backward()
        pairs = zip(trained.plain.parameters(), trained.fitted.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)
        for optimizer in trained.optimizers:
            optimizer.zero_grad()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(c, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for c in (3, 16, 16, 16)),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(256, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), torch.arange(x.shape[0]) % 5)


def test_images_of_many_sizes_and_small_last_batches() -> None:
    def images(rows: int, high: int, wide: int) -> Batch:
        torch.manual_seed(rows + high + wide)
        return (torch.randn(rows, 3, high, wide),)

    model = Images()
    budget = int(0.85 * plain_peak(model, images(8, 64, 64)))
    trained = Trained(model, budget)
    for number, sizes in enumerate(((8, 64, 64), (8, 40, 48), (8, 33, 33), (5, 61, 61), (2, 20, 21))):
        batch = images(*sizes)
        plan = trained.step(batch)
        assert is_carried(plan) == (number > 0)
        assert trained.peak(batch) <= min(budget, plan.predicted.peak_bytes)


class Branching(nn.Module):
    """Code that looks at sizes: another op for long inputs, and positions that it compares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)) if x.shape[0] > 100 else torch.tanh(layer(x))
        if bool((torch.arange(x.shape[0]) % 7 == 6).sum() > 12):  # decided by the size alone
            x = x * 2
        return x.square().mean()


def test_branches_on_sizes_are_taken_as_they_are() -> None:
    model = Branching()
    trained = Trained(model, int(0.95 * plain_peak(model, (torch.randn(96, 64),))))
    for rows in (80, 90, 110, 70, 120, 60, 95, 105, 84, 91):
        torch.manual_seed(rows)
        trained.step((torch.randn(rows, 64),))


class Fixed(nn.Module):
    """Code that a symbol cannot pass: it makes a number of the size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.known = {rows: float(rows) for rows in range(1, 200)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().sum() / self.known[x.shape[0]]


def test_code_that_fixes_a_size_is_captured_for_each() -> None:
    model = Fixed()
    trained = Trained(model, int(0.95 * plain_peak(model, (torch.randn(96, 64),))))
    for rows in (96, 90, 70, 80):
        torch.manual_seed(rows)
        assert is_carried(trained.step((torch.randn(rows, 64),))) == (rows != 96)


class Counting(nn.Module):
    """Ops whose number depends on the size, so that no known order can be taken over."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for place in range(x.shape[1]):
            state = torch.tanh(self.cell(x[:, place]) + state)
        return state.square().mean()


def test_steps_with_other_ops_are_searched_anew() -> None:
    model = Counting()
    trained = Trained(model, int(0.9 * plain_peak(model, (torch.randn(64, 12, 64),))))
    for length in (12, 10, 7, 11):
        torch.manual_seed(length)
        assert is_carried(trained.step((torch.randn(64, length, 64),))) == (length != 12)
    assert fitted_call(trained.fitted).symbolic.failed == 2  # the loop fixes the length, so no trace serves another


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = F.gelu(layer(x))
        if x.detach().sum().item() > 1e9:
            x = x * 2
        for layer in self.layers[3:]:
            x = F.gelu(layer(x))
        return x.square().mean()


def test_graph_breaks_at_many_sizes() -> None:
    model = Breaking()
    trained = Trained(model, 10**9, strategy="sqrt")
    for rows in (96, 90, 70):
        torch.manual_seed(rows)
        trained.step((torch.randn(rows, 64),))


def test_what_was_observed_of_one_size_is_known_of_the_next(told: list[str]) -> None:
    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
            self.left: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.gelu(layer(x))
            self.left = x * 2  # needs a gradient, and gets none
            return x.square().mean()

    model = Leaving()
    trained = Trained(model, int(0.95 * plain_peak(model, (torch.randn(96, 64),))))
    for rows in (96, 96, 90, 70, 80):
        torch.manual_seed(rows)
        trained.step((torch.randn(rows, 64),))
    assert " ".join(told).count("no gradient arrived for a tensor") == 1


def test_the_cache_in_an_output_gets_no_gradient(told: list[str]) -> None:
    """Decoders return a cache of keys and values, an object that no loss reads."""

    class Cache:
        def __init__(self) -> None:
            self.layers: list[dict[str, Tensor]] = []

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x: Tensor) -> dict[str, Any]:
            cache = Cache()
            for layer in self.layers:
                x = F.gelu(layer(x))
                cache.layers.append({"key": x * 2})
            return {"loss": x.square().mean(), "cache": cache}

    model = Caching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memfit.fit(model, budget=10**9, optimizer=optimizer)
    for _ in range(2):
        model(torch.randn(96, 64))["loss"].backward()
    assert "no gradient arrived" not in " ".join(told)


def test_plans_of_sizes_are_bounded(told: list[str]) -> None:
    trained = Trained(Branching(), 10**9)
    calls = fitted_call(trained.fitted)
    calls.most_plans = 4
    for rows in (*range(101, 108), 105):
        torch.manual_seed(rows)
        trained.step((torch.randn(rows, 64),))
    assert [key[0][0][0] for key in calls.plans] == [101, 106, 107, 105]  # 101 is what the others were made from
    assert calls.plans.keys() == calls.calls.keys()
    assert "are planned again when they come back" in " ".join(told)
    assert any(not is_carried(plan) for plan in calls.plans.values())


def test_accumulating_steps_share_the_capture_of_others() -> None:
    model = Decoder(2)
    plain, fitted = model, copy.deepcopy(model)
    memfit.fit(fitted, budget=int(0.95 * plain_peak(model, texts(4, 96))))
    for number, length in enumerate((96, 96, 80, 96)):
        words, mask = texts(4, length)
        for one in (plain, fitted):
            torch.manual_seed(number)
            one(words, mask).backward()
    for a, b in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
    first, accumulating, *_ = fitted_call(fitted).plans.values()
    assert first.planned is not None and accumulating.planned is not None
    assert first.planned.capture.subgraphs is accumulating.planned.capture.subgraphs
    gradient_bytes = sum(p.nbytes for p in fitted.parameters())
    assert accumulating.predicted.peak_bytes <= first.predicted.peak_bytes + gradient_bytes
    assert accumulating.planned.graph.static_bytes == first.planned.graph.static_bytes + gradient_bytes


def test_another_form_of_the_same_call_and_nones_are_carried_over() -> None:
    model = Decoder(2)
    trained = Trained(model, int(0.95 * plain_peak(model, texts(4, 96))))
    words, mask = texts(4, 96)
    trained.step((words, mask))
    trained.step((words[:, :80].contiguous(), mask[:, :80].contiguous()))
    calls = fitted_call(trained.fitted)
    for arguments in ({"words": words, "mask": mask}, {"words": words}, {"words": words, "mask": None}):
        losses = []
        for one in (trained.plain, trained.fitted):
            torch.manual_seed(0)
            losses.append(one(**arguments))
        assert torch.equal(*losses)
        for made in losses:
            made.backward()
        for optimizer in trained.optimizers:
            optimizer.zero_grad()
        assert calls.latest is not None and is_carried(calls.latest) == (len(arguments) > 1)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, weight: float) -> Tensor:
        return self.layer(x).square().mean() * weight


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_number_that_is_another_one_each_time_is_told(as_tensor: bool, told: list[str]) -> None:
    model = Weighted()
    memfit.fit(model, budget="1GiB", optimizer=0)
    for weight in (0.1, 0.2, 0.3, 0.4, 0.5):
        given = torch.tensor(weight) if as_tensor else weight
        x = torch.randn(4, 8)
        assert torch.equal(model(x, weight=given), model._call_impl(x, weight=given))
    warnings = [line for line in told if "called with many numbers as weight" in line]
    assert len(warnings) == (not as_tensor)
    assert len(fitted_call(model).plans) == (1 if as_tensor else 5)


@torch.library.custom_op("memfit_tests::hungry", mutates_args=())
def hungry(x: Tensor) -> Tensor:
    """Takes far more memory for many rows than for few: what is measured for few does not tell."""
    made = x * 2
    if x.shape[0] > 100:
        made += torch.ones(60 << 20).mean() * 0  # 240 MiB
    return made


@hungry.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


hungry.register_autograd(lambda context, gradient: gradient * 2)


class Hungry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        made: Tensor = hungry(x)
        return made.square().mean()


def test_a_step_that_takes_more_than_was_scaled_is_told_and_planned_from_the_start(told: list[str]) -> None:
    trained = Trained(Hungry(), 40 << 20)
    lines = Path("/proc/self/status").read_text().splitlines()
    most, now = (int(line.split()[1]) for name in ("VmHWM", "VmRSS") for line in lines if line.startswith(name))
    held = torch.ones((most - now) << 8)  # the process takes as much as it ever took, so that more of it is seen
    for rows in (96, 90, 120, 120):
        torch.manual_seed(rows)
        trained.step((torch.randn(rows, 64),))
    del held
    assert is_carried(trained.plan_of((torch.randn(90, 64),)))
    assert any("whose plan was made from that of another size" in line for line in told)
    assert any("takes more than its budget" in line for line in told)


def test_convolutions_are_measured_at_each_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel that is taken for a size decides their workspace, so nothing is scaled."""
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    trained = Trained(Images(), 10**9)
    for extent in (64, 61):
        torch.manual_seed(extent)
        plan = trained.step((torch.randn(5, 3, extent, extent),))
    assert is_carried(plan) and plan.planned is not None
    device, capture = torch.device("cpu"), plan.planned.capture
    cache, found = open_cache(device), measurements_of(capture, device)
    convolutions = [joint for joint in capture.joint_ops if joint is not None and is_convolution(joint.node)]
    assert convolutions
    assert all(one.known(cache) is not None for joint in convolutions for one in found.of_op[joint.node])
