"""Where two steps part is named: op, module, line, layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import memfit
from memfit.compiler.difference import Difference, first_difference
from memfit.compiler.recorded_ops import RecordedOps, fingerprint
from memfit.ops.kernels.convolution import make_metadata_only

Step = Callable[[], list[Tensor]]


def step_of(model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> Step:
    buffers = [(b, b.clone()) for b in model.buffers()]

    def run() -> list[Tensor]:
        torch.manual_seed(3)
        for buffer, before in buffers:
            buffer.copy_(before)
        model.zero_grad()
        output: Tensor = model(x) if call is None else call(x)
        loss = output.square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    return run


class Branching(nn.Module):
    """Another function where it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        y = self.second(y * 1.5 if torch.compiler.is_compiling() else y * 1.25)  # the line to be named
        return self.third(torch.tanh(y))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16), Branching()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_another_function_is_named_with_its_module_and_line() -> None:
    model, x = Around(), torch.randn(8, 16)
    compiled = torch.compile(model, backend="aot_eager")
    planned = step_of(model, x, compiled)
    planned()
    found = first_difference(step_of(model, x), planned)
    assert found is not None
    assert (found.op, found.backward, found.module) == ("aten.mul.Tensor", False, "blocks.1 (Branching)")
    assert found.planned_op == found.op and found.same_operands and not found.is_layout
    assert found.max_difference is not None and 0 < found.max_difference < 0.3
    assert "test_difference.py:" in found.line and found.line.endswith("in forward")
    source = Path(__file__).read_text().splitlines()[int(found.line.split(":")[1].split(",")[0]) - 1]
    assert "the line to be named" in source
    assert all(words in str(found) for words in ("aten.mul.Tensor (forward", "blocks.1", "float32 (8, 16)"))


class Scaled(torch.autograd.Function):
    """Its backward pass is another one where it is planned."""

    @staticmethod
    def forward(ctx: object, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor  # type: ignore[attr-defined]
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None  # type: ignore[attr-defined]


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.factor = nn.Linear(16, 16), nn.Linear(16, 16), 2.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Scaled.apply(torch.tanh(self.first(x)), self.factor)
        return self.second(y)


def test_an_op_of_the_backward_pass_is_named_by_the_module_of_its_forward_op() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), Scaling()), torch.randn(8, 16)
    other = nn.Sequential(model[0], Scaling())
    other.load_state_dict(model.state_dict())
    other[1].factor = 2.5
    found = first_difference(step_of(model, x), step_of(other, x))
    assert found is not None and found.backward
    assert (found.op, found.module, found.same_operands) == ("aten.mul.Tensor", "1 (Scaling)", True)


class Norm(nn.Module):
    def __init__(self, *, channels_last: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 1)
        self.channels_last = channels_last

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        y = y.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)
        return y.sum((0, 2, 3))


def test_a_layout_is_named_as_the_cause() -> None:
    model, x = Norm(channels_last=False), torch.randn(8, 3, 31, 33)
    other = Norm(channels_last=True)
    other.load_state_dict(model.state_dict())
    found = first_difference(step_of(model, x), step_of(other, x))
    assert found is not None
    assert (found.op, found.planned_op) == ("aten.sum.dim_IntList", "aten.sum.dim_IntList")
    assert found.is_layout and found.same_operands
    assert found.operand_layouts == (((24 * 31 * 33, 31 * 33, 33, 1), (24 * 31 * 33, 1, 33 * 24, 24)),)
    assert "laid out otherwise" in str(found)


def test_random_numbers_are_named() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)), torch.randn(8, 16)

    def shifted(x: Tensor) -> Tensor:
        torch.rand(1)
        result: Tensor = model(x)
        return result

    found = first_difference(step_of(model, x), step_of(model, x, shifted))
    assert found is not None and found.is_random and found.module == "1 (Dropout)"
    assert "random numbers" in str(found)


def test_what_the_planned_step_makes_otherwise_is_no_difference() -> None:
    """Recomputation, ops in chunks and in-place writes."""
    blocks = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(4))
    model, x = nn.Sequential(*blocks, nn.Dropout(0.1)), torch.randn(4, 8, 16, 16)
    fitted = copy.deepcopy(model)
    plain = step_of(model, x)
    assert first_difference(plain, plain) is None
    memfit.fit(fitted, (x,), budget="8MiB", loss_fn=lambda y: y.square().sum(), strategy="every-block")
    planned = step_of(fitted, x)
    assert all(torch.equal(a, b) for a, b in zip(plain(), planned(), strict=True))
    assert memfit.plan_of(fitted).program.recomputed()
    assert first_difference(plain, planned) is None


def test_what_runs_in_one_step_only_is_told() -> None:
    model, x = nn.Linear(16, 16), torch.randn(8, 16)
    found = first_difference(step_of(model, x, lambda x: model(x).sort().values), step_of(model, x))
    assert found is not None and found.op == "aten.sort.default" and found.planned_op is None
    assert "makes nothing like it" in str(found)


def test_nothing_is_raised_and_nothing_is_left() -> None:
    model, x = nn.Linear(16, 16), torch.randn(8, 16)

    def failing() -> object:
        model(x)
        raise RuntimeError("out of memory")

    assert first_difference(step_of(model, x), failing) is None
    assert first_difference(failing, step_of(model, x)) is None
    hooks = (torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks)
    assert not any(hooks)


def test_a_sentence_is_made_of_what_is_known() -> None:
    known = Difference(
        op="aten.mm.default", backward=True, number=7, module="", line="", dtype="float32", shape=(2, 3), strides=(3, 1)
    )
    assert str(known) == (
        "the first op that differs is aten.mm.default (backward, op 7 of the baseline step), whose result is float32 "
        "(2, 3) with strides (3, 1); the planned step makes nothing like it"
    )


def test_a_tensor_that_stands_for_a_shape_has_no_fingerprint() -> None:
    """Noise is drawn in the shape of such a one, so each step with dropout has them."""
    metadata_only = make_metadata_only(torch.empty(4, 24, dtype=torch.bool), torch.device("cpu"))
    assert fingerprint(metadata_only) is None
    assert fingerprint(torch.empty(0)) is not None
    assert fingerprint(torch.ones(3)) == fingerprint(torch.ones(6)[::2])


def test_the_workspace_that_a_library_keeps_has_no_fingerprint() -> None:
    """Some of its bytes are never written, and differ between runs that are otherwise alike."""
    layer, x = nn.LSTM(8, 8), torch.randn(5, 3, 8)
    with RecordedOps() as recorded:
        layer(x)
    of_layer = [op for op in recorded.ops if "rnn_layer" in op.name]
    kept = [result for op in of_layer for result in op.results if result.dtype is torch.uint8]
    assert of_layer and kept, "this build of torch has no library for recurrent layers"
    assert all(result.fingerprint is None for result in kept)
    assert all(result.fingerprint is not None for op in of_layer for result in op.results if result not in kept)
