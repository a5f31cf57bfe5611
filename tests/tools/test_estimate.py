"""Estimates against the measured peak of the baseline step."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.profiling.baseline_peak import counted_step
from memfit.profiling.sampled_workspace import SampledWorkspace
from memfit.report.table import plain_text
from memfit.tools.training_loop import resident_bytes, step_peak, training_step


def _measured(
    model: nn.Module, x: torch.Tensor, loss_fn: Callable[[torch.Tensor], torch.Tensor], *, hold_outputs: bool = False
) -> int:
    device = torch.device("cpu")
    step = training_step(model, model, (x,), {}, loss_fn=loss_fn, hold_outputs=hold_outputs)
    return step_peak(step, device, lambda: resident_bytes(model, (x,), {}, None, device))


def _loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def _trunk(width: int, **settings: int) -> nn.Sequential:
    conv = nn.Conv2d(width, width, 3, padding=1, **settings)
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), conv, nn.ReLU(True))


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "strided": lambda: (
        nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU()),
        torch.randn(8, 3, 128, 128),
    ),
    "columns of float64": lambda: (_trunk(16).double(), torch.randn(6, 3, 48, 48, dtype=torch.float64)),
    "grouped": lambda: (_trunk(16, groups=4), torch.randn(8, 3, 64, 64)),
    "one image": lambda: (_trunk(16), torch.randn(1, 3, 160, 160)),
    "channels last": lambda: (
        _trunk(16).to(memory_format=torch.channels_last),
        torch.randn(8, 3, 64, 64).contiguous(memory_format=torch.channels_last),
    ),
    "transposed": lambda: (nn.ConvTranspose2d(3, 16, 4, 2, 1), torch.randn(8, 3, 48, 48)),
    "1d": lambda: (nn.Sequential(nn.Conv1d(4, 32, 9), nn.GELU(), nn.Conv1d(32, 32, 9)), torch.randn(8, 4, 1024)),
    "frozen": lambda: (
        nn.Sequential(_trunk(16).requires_grad_(False), nn.Conv2d(16, 16, 3)),
        torch.randn(8, 3, 64, 64),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_convolutions_within_two_percent(name: str) -> None:
    model, x = MODELS[name]()
    found = memfit.estimate(model.train(), (x,), loss_fn=_loss)
    assert found.peak == pytest.approx(_measured(model, x, _loss), rel=0.02)


class Drops(nn.Module):
    """Small, so that the 5056 bytes of a random state count; its second output is not used by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layers(x)
        return y, y * 2


def test_random_states_of_a_graph_with_an_output_that_is_cut() -> None:
    model, x = Drops(), torch.randn(32, 16)
    budget_bytes = memfit.estimate(model, (x,), loss_fn=lambda y: y[0].mean()).peak
    plan = memfit.plan(model, (x,), budget=budget_bytes, loss_fn=lambda y: y[0].mean(), strategy="none")
    assert plan.measured_peak_bytes is not None
    assert abs(plan.predicted.peak_bytes - plan.measured_peak_bytes) < 0.02 * plan.measured_peak_bytes


class Local(nn.Module):
    """A variable holds a large tensor until the function returns, long after the last op that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(64.0).repeat(256, 4)
        scale = table.sum() / 1e6
        y = self.layer(x).repeat(64, 1)
        return y.pow(2) * scale


class Valued(nn.Module):
    """How much it takes is known from values only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x[x[:, 0] > 0]
        return self.layer(kept).tanh().repeat(int(kept.shape[0]), 1)


class Kept(nn.Module):
    """The last result stays on the module until the next one is there, and gradients come from several places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).max(-1, keepdim=True).values + layer(x).tanh()
        self.last = x.detach().clone()
        return x


class Recurrent(nn.Module):
    """CPU's fused layer leaves a reserve for its backward pass, and takes lengths as places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(16, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.last = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(x)[0]).tanh()


class Unpooled(nn.Module):
    """Kernels that read memory at places without a look at them cannot be asked with made-up numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("offsets", torch.tensor([0, 3, 5]))
        self.bag = nn.EmbeddingBag(10, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled, places = nn.functional.max_pool1d(self.layer(x), 2, return_indices=True)
        bags = self.bag(torch.arange(8), self.offsets)
        return nn.functional.max_unpool1d(pooled, places, 2) * bags.mean()


class Rays(nn.Module):
    """Gradients of products look at values, and two views of gradients meet, which autograd adds up in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.density, self.colour = nn.Linear(16, 64), nn.Linear(64, 1), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x).relu()
        passing = torch.exp(-self.density(hidden)[..., 0].relu()).cumprod(-1)
        return (passing[..., None] * self.colour(hidden)).sum(1)


class Extremes(nn.Module):
    """Their gradients look at values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        picked = hidden.take(torch.arange(50)).sum()
        return hidden.prod(-1) * hidden.T.max() + hidden.median() * picked


PLAIN: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "a local variable": lambda: (Local(), torch.randn(32, 64)),
    "sizes from values": lambda: (Valued(), torch.randn(48, 64)),
    "results that stay": lambda: (Kept(), torch.randn(64, 32)),
    "pooling of another layout": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.AvgPool2d(2)),
        torch.randn(4, 3, 32, 32).transpose(2, 3),
    ),
    "a legacy function that resizes": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.CrossMapLRN2d(3)),
        torch.randn(4, 3, 32, 32),
    ),
    "normalisations": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.Flatten(2), nn.LayerNorm(1024)),
        torch.randn(4, 3, 32, 32),
    ),
    "a fused layer": lambda: (Recurrent(), torch.randn(4, 12, 16)),
    "kernels that read places": lambda: (Unpooled(), torch.randn(64, 4, 16)),
    "gradients of rays": lambda: (Rays(), torch.randn(16, 24, 16)),
    "gradients of extremes": lambda: (Extremes(), torch.randn(64, 16)),
    "a matrix exponential": lambda: (
        nn.Sequential(
            nn.Linear(16, 16), nn.utils.parametrizations.orthogonal(nn.Linear(16, 16), "weight", "matrix_exp")
        ),
        torch.randn(4, 16),
    ),
    "an encoder": lambda: (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(4, 24, 32)),
}


MEASURED = ("sizes from values", "a matrix exponential")
"""Steps whose memory depends on values."""


@pytest.mark.parametrize("name", PLAIN)
def test_plain_steps_within_two_percent(name: str) -> None:
    torch.manual_seed(0)
    model, x = PLAIN[name]()
    found = memfit.estimate(model.train(), (x,), loss_fn=_loss)
    assert found.peak == pytest.approx(_measured(model, x, _loss), rel=0.02)
    held_bytes = found.peak + found.outputs_held_bytes
    assert held_bytes == pytest.approx(_measured(model, x, _loss, hold_outputs=True), rel=0.02)
    assert sum(nbytes for _, nbytes in found.by_kind()) == found.peak
    assert found.measured == ("looks at values" in str(found)) == (name in MEASURED)


class Checkpointed(nn.Module):
    """Small, so that the random state that a checkpoint saves counts: 5056 bytes on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(24, 24), nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.1), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=False)


def test_random_states_that_checkpoints_save_count() -> None:
    model, x = Checkpointed(), torch.randn(7, 24)
    before = torch.get_rng_state
    counted = counted_step(model, (x,), {}, _loss, "cpu")
    assert torch.get_rng_state is before and torch.random.get_rng_state is before
    assert counted is not None
    there = sum(p.numel() * 4 for p in (*model.parameters(), x))
    assert there + counted.step_bytes == pytest.approx(_measured(model, x, _loss), rel=0.02)


class Gated(nn.Module):
    """Its outputs are freed once the loss is there, before the peak in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) * self.second(x) * self.third(x)).T.reshape(-1)


class Chosen(Gated):
    """Its sizes are known from values only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[: int((x[:, 0] > -100).sum())])


@pytest.mark.parametrize("kind", [Gated, Chosen])
def test_outputs_that_the_loop_holds(kind: type[Gated]) -> None:
    model, x = kind(), torch.randn(512, 64)

    def loss_of(y: torch.Tensor) -> torch.Tensor:
        return y.mul(2).mean()

    found = memfit.estimate(model, (x,), loss_fn=loss_of)
    freed, held = (_measured(model, x, loss_of, hold_outputs=hold) for hold in (False, True))
    assert held > 1.05 * freed
    assert found.measured == (kind is Chosen)
    assert found.peak == pytest.approx(freed, rel=0.001)
    assert found.peak + found.outputs_held_bytes == pytest.approx(held, rel=0.001)
    assert "holds the outputs" in plain_text(found) and "if the loop holds them" in str(found)


def test_the_table_of_a_measured_estimate_does_not_say_that_nothing_was_run() -> None:
    model, x = PLAIN["sizes from values"]()
    found = memfit.estimate(model, (x,), loss_fn=_loss)
    assert "measured" in plain_text(found) and "not run" not in plain_text(found)


def test_the_step_of_the_only_process_of_a_group_is_measured() -> None:
    """A launcher of one process, or a pipeline planned before, leaves a group of one."""
    model, x = PLAIN["sizes from values"]()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert memfit.estimate(model, (x,), loss_fn=_loss).measured
    finally:
        dist.destroy_process_group()


def test_a_call_with_a_large_result_is_not_made_to_learn_its_workspace() -> None:
    """Operands of 320 KiB whose distances take 1.5 GiB: a machine with less must survive the question."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with FakeTensorMode():
        x = torch.empty(20_000, 4)
        result = torch.empty(20_000, 20_000)
        args = (x, x, 2.0, None)
    SampledWorkspace().of_values(torch.ops.aten._cdist_forward.default, args, {}, result)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10


def test_casts_that_a_region_around_the_step_caches_count() -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(32, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = memfit.estimate(model, (x,), loss_fn=_loss)
        assert found.peak == pytest.approx(_measured(model, x, _loss), rel=0.02)


def test_an_estimate_leaves_no_trace() -> None:
    model, x = Kept(), torch.randn(64, 32)
    model.last = before = torch.zeros(1)
    handle = model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    seen: list[int] = []
    state = torch.get_rng_state()
    memfit.estimate(model, (x,), loss_fn=_loss)
    assert model.last is before and not seen and torch.equal(torch.get_rng_state(), state)
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    handle.remove()


def test_asking_for_workspace_leaves_no_trace() -> None:
    model, x = MODELS["grouped"]()
    state = torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    memfit.estimate(model, (x,))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_on_the_meta_device_needs_no_memory() -> None:
    with torch.device("meta"):
        model, x = nn.Conv2d(3, 4096, 3), torch.randn(4096, 3, 512, 512)
    assert memfit.estimate(model, (x,)).peak > 1 << 40


class Scored(nn.Module):
    """Computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 40)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}


@pytest.mark.parametrize("inside", [False, True])
def test_cross_entropy_on_the_meta_device(inside: bool) -> None:
    def found(device: str) -> int:
        with torch.device(device):
            x, labels = torch.zeros(64, 32), torch.zeros(64, dtype=torch.long)
            if inside:
                return memfit.estimate(Scored(), (x, labels)).peak
            layer = nn.Linear(32, 40)
            return memfit.estimate(layer, (x,), loss_fn=lambda y: nn.functional.cross_entropy(y, labels)).peak

    assert found("meta") == found("cpu")


class Asks(nn.Module):
    """Keeps its mask where it may not look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if not torch.compiler.is_compiling() and bool((mask == 1).all()):
            return y
        return y.tanh() * mask


def test_a_model_that_looks_at_values_unless_it_is_compiled_on_the_meta_device(told: list[str]) -> None:
    with torch.device("meta"):
        model, args = Asks(), (torch.empty(256, 64), torch.empty(256, 64))
    found = memfit.estimate(model, args, loss_fn=_loss)
    assert found.peak >= 6 * 256 * 64 * 4 and not found.measured
    assert any("Asks looks at values, which the meta device does not have" in text for text in told)


def test_a_model_that_looks_at_values_always_on_the_meta_device() -> None:
    with torch.device("meta"):
        model, x = Valued(), torch.empty(48, 64)
    with pytest.raises(memfit.CaptureError, match="meta device does not have"):
        memfit.estimate(model, (x,), loss_fn=_loss)


@pytest.mark.parametrize(("layer", "shape"), [(nn.Linear(8, 8), (0, 8)), (nn.Conv2d(3, 8, 3), (0, 3, 8, 8))])
def test_no_samples(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    found = memfit.estimate(layer, (x,), loss_fn=torch.sum)
    assert all(nbytes >= 0 for _, nbytes in found.by_kind())
    assert sum(nbytes for _, nbytes in found.by_kind()) == found.peak
    with pytest.raises(memfit.BudgetError):
        memfit.plan(layer, (x,), budget=1, loss_fn=torch.sum)


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(len(x), 16)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


def test_a_recurrent_cell_on_the_meta_device() -> None:
    """Where a cell has one kernel, as on a GPU, or none, it is not taken apart as on a CPU."""
    with torch.device("meta"):
        meta = memfit.estimate(Unrolled(), (torch.randn(4, 3, 8),), loss_fn=_loss)
    here = memfit.estimate(Unrolled(), (torch.randn(4, 3, 8),), loss_fn=_loss)
    assert meta.peak == pytest.approx(here.peak, rel=0.2)
