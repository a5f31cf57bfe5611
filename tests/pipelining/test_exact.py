"""Gradients of a pipeline are those of the unpipelined step: bitwise with one micro-batch, else up to rounding."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx
from torch.nn import functional

import memfit
from memfit.errors import CaptureError
from memfit.pipelining.config import Found
from memfit.pipelining.partition.cut_points import find_cuts
from memfit.pipelining.partition.forward_graph import capture_forward, flatten_inputs
from memfit.pipelining.partition.stages import cut_into_stages
from memfit.pipelining.pipeline import Pipeline
from memfit.pipelining.runtime.guards import pipeline_signature
from memfit.pipelining.runtime.send_queue import Outbox
from memfit.pipelining.runtime.stage import EngineStage
from memfit.pipelining.search.search import _Searcher
from memfit.planner.pipeline.schedule import Pass, Schedule
from tests import models
from tests.pipelining.models import CASES, LOSSES, Case, baseline_step, gpt, gradients, shifted

_RELATIVE = 1e-12


def piped(case: Case, **options: object) -> Pipeline:
    options = {"prove": False, **options}
    return memfit.pipeline(
        case.model,
        case.args,
        case.kwargs,
        target=case.target,
        loss_fn=case.loss_fn,
        **options,  # type: ignore[arg-type]
    )


def step(pipe: Pipeline, case: Case) -> torch.Tensor:
    return pipe.step(*case.args, target=case.target, **case.kwargs)


def share_memory(nodes: Sequence[fx.Node]) -> bool:
    storages = [node.meta["example_value"].untyped_storage()._cdata for node in nodes]
    return len(set(storages)) < len(storages)


def assert_near(case: Case, expected: dict[str, torch.Tensor | None]) -> None:
    for name, parameter in case.model.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
            continue
        scale = expected[name].abs().max()
        assert (parameter.grad - expected[name]).abs().max() <= _RELATIVE * scale, name


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "schedule"),
    [*((name, "zero-bubble") for name in sorted(CASES.keys() - LOSSES)), ("gpt", "1f1b"), ("mixer", "1f1b")],
)
def test_one_micro_batch_gives_the_same_bits(name: str, schedule: str) -> None:
    """Also where gradients of weights wait."""
    torch.manual_seed(0)
    case = CASES[name](4, torch.float32)
    plain = baseline_step(case)
    expected = gradients(case.model)
    pipe = piped(case, num_stages=3, num_microbatches=1, schedule=schedule)
    waiting = [stage.weight_seconds for stage in pipe.plan.stages]
    assert waiting[0] == 0.0 or name == "twins"  # the first stage hands no gradient on, or one to autograd
    assert any(waiting[1:]) == (schedule == "zero-bubble")
    for _ in range(2):  # gradients are added to what is there
        assert torch.equal(step(pipe, case), plain)
    for key, parameter in case.model.named_parameters():
        twice = None if expected[key] is None else expected[key] + expected[key]
        assert parameter.grad is None if twice is None else torch.equal(parameter.grad, twice), key
        assert parameter.grad is None or not parameter.grad.requires_grad


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, {"ignored": (3, 3, 3, 1), "size": (3, 2), "drawn": (4, 4, 2)}.get(name, (2, 2))) for name in CASES],
)
def test_micro_batches_add_up(name: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    case = CASES[name](sum(sizes), torch.float64)
    plain = baseline_step(case)
    expected = gradients(case.model)
    schedule = "gpipe" if len(sizes) == 2 else "1f1b"
    pipe = piped(case, num_stages=2, num_microbatches=len(sizes), schedule=schedule)
    assert pipe.plan.sizes == sizes
    torch.testing.assert_close(step(pipe, case), plain, rtol=_RELATIVE, atol=0)
    assert_near(case, expected)


def test_auto_takes_any_number_of_micro_batches() -> None:
    """Some schedules of the engine do not; five on two devices are neither even nor a multiple of its rounds."""
    torch.manual_seed(1)
    case = CASES["skips"](10, torch.float64)
    plain = baseline_step(case)
    expected = gradients(case.model)
    pipe = piped(case, num_stages=2, num_microbatches=5)
    assert len(pipe.plan.sizes) == 5
    torch.testing.assert_close(step(pipe, case), plain, rtol=_RELATIVE, atol=0)
    assert_near(case, expected)


def test_a_batch_may_give_fewer_micro_batches_than_asked() -> None:
    """Nine samples in four parts are three of three; a later batch of ten gives four, on the same cuts."""
    torch.manual_seed(1)
    nine = CASES["twins"](9, torch.float64)
    ten = replace(CASES["twins"](10, torch.float64), model=nine.model)
    pipe = piped(nine, num_stages=2, num_microbatches=4, schedule="1f1b")
    cuts = pipe.plan.cuts
    for case, sizes in ((nine, (3, 3, 3)), (ten, (3, 3, 3, 1))):
        plain = baseline_step(case)
        expected = gradients(case.model)
        torch.testing.assert_close(step(pipe, case), plain, rtol=_RELATIVE, atol=0)
        assert_near(case, expected)
        case.model.zero_grad()
        assert pipe.plan.sizes == sizes and pipe.plan.cuts == cuts


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_what_is_handed_back_may_still_be_read(checkpoint: str) -> None:
    """Where a stage begins by adding a parameter, that one's gradient is the sum of the gradient handed back."""
    torch.manual_seed(0)
    case = shifted(12, torch.float64)
    baseline_step(case)
    expected = gradients(case.model)
    pipe = piped(case, num_stages=3, num_microbatches=6, schedule="zero-bubble", checkpoint=checkpoint)
    for _ in range(2):
        case.model.zero_grad()
        step(pipe, case)
        assert_near(case, expected)


@pytest.mark.parametrize(
    ("name", "checkpoint", "schedule"),
    [
        ("twins", "except_last", "1f1b"),
        ("skips", "never", "interleaved-1f1b"),
        ("twins", "except_last", "interleaved-zero-bubble"),
        ("gpt", "always", "zero-bubble-v"),
    ],
)
def test_policies_and_schedules_change_no_gradient(name: str, checkpoint: str, schedule: str) -> None:
    torch.manual_seed(2)
    case = CASES[name](8, torch.float64)
    baseline_step(case)
    expected = gradients(case.model)
    pipe = piped(case, num_stages=2, num_microbatches=4, checkpoint=checkpoint, schedule=schedule)
    step(pipe, case)
    assert_near(case, expected)
    again = [stage.recompute_seconds for stage in pipe.plan.stages]
    assert any(again) == (checkpoint != "never")


def test_dropout_is_that_of_the_unpipelined_step() -> None:
    torch.manual_seed(3)
    case = gpt(4, torch.float32, dropout=0.2)
    state = torch.get_rng_state()
    plain = baseline_step(case)
    after = torch.rand(3)
    expected = gradients(case.model)
    pipe = piped(case, num_stages=3, num_microbatches=1, schedule="1f1b", checkpoint="always")
    torch.set_rng_state(state)
    assert torch.equal(step(pipe, case), plain)
    assert torch.equal(torch.rand(3), after)
    for name, parameter in case.model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_dropout_of_a_micro_batch_depends_on_nothing_but_its_number() -> None:
    torch.manual_seed(4)
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2)) for _ in range(3)]
    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    model = torch.nn.Sequential(*layers).double()
    case = Case(model=model, args=(x,), target=y, loss_fn=functional.mse_loss)
    found = []
    for stages, schedule, checkpoint in ((1, "1f1b", "never"), (3, "gpipe", "except_last")):
        pipe = piped(case, num_stages=stages, num_microbatches=4, schedule=schedule, checkpoint=checkpoint)
        torch.manual_seed(9)
        step(pipe, case)
        found.append(gradients(case.model))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ["skips", "drawn", "mixer"])
def test_any_cut_gives_the_same_bits(name: str) -> None:
    torch.manual_seed(5)
    case = CASES[name](3, torch.float32)
    plain = baseline_step(case)
    expected = gradients(case.model)
    forward = capture_forward(case.model, case.args, case.kwargs, case.target, case.loss_fn)
    leaves, _ = flatten_inputs(case.args, case.kwargs, case.target)
    pick = random.Random(0)
    cuts = find_cuts(forward)
    pipe = piped(case, num_stages=1, num_microbatches=1)
    step(pipe, case)
    gradients(case.model)  # the pipeline has made a process group
    for _ in range(4):
        chosen = sorted(pick.sample(cuts, min(4, len(cuts))), key=lambda cut: cut.position)
        parts = cut_into_stages(forward, chosen)
        device = torch.device("cpu")
        stages = [EngineStage([(part, part.module)], len(parts), device, Outbox()) for part in parts]
        assert torch.equal(run(stages, leaves), plain)
        for key, parameter in case.model.named_parameters():
            assert torch.equal(parameter.grad, expected[key]), (key, [cut.position for cut in chosen])
        gradients(case.model)


def test_where_no_other_cut_fits_sums_in_another_order_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(9)
    case = CASES["recurrent"](4, torch.float64)
    baseline_step(case)
    expected = gradients(case.model)
    said: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        logging.getLogger("memfit.pipelining.search.search"), "warning", lambda *told: said.append(told)
    )
    # In order, one stage would hold three of the four layers.
    pipe = piped(case, num_stages=2, num_microbatches=1, schedule="1f1b", budget_per_device=12_300)
    assert [told[1] for told in said] == ["again.bias, again.weight"] and "in another order" in said[0][0]
    step(pipe, case)
    assert_near(case, expected)


def test_a_quicker_schedule_with_sums_in_another_order_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero-bubble, which would be quicker, is cut as if its sums could not be in order."""
    best_of = _Searcher.best_of

    def in_any_order(searcher: _Searcher, schedule: Schedule) -> Found:
        if schedule.name != "zero-bubble":
            return best_of(searcher, schedule)
        in_order, searcher.in_order = searcher.in_order, frozenset()
        found = best_of(searcher, schedule)
        searcher.in_order = in_order
        assert not searcher.adds_in_order(found.cuts)
        return found

    monkeypatch.setattr(_Searcher, "best_of", in_any_order)
    torch.manual_seed(9)
    case = CASES["recurrent"](4, torch.float64)
    plain = baseline_step(case)
    expected = gradients(case.model)
    pipe = piped(case, num_stages=2, num_microbatches=1, budget_per_device=18_000)
    assert torch.equal(step(pipe, case), plain)
    for name, parameter in case.model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_transposed_gradients_and_calls_without_effect_are_no_reason_not_to_cut() -> None:
    case = CASES["mixer"](3, torch.float32)
    forward = capture_forward(case.model, case.args, case.kwargs, case.target, case.loss_fn)
    cuts = find_cuts(forward)
    for cut in cuts:  # of a tensor and a view of it one is enough, and compiled code takes two for two tensors
        assert not share_memory(cut.crossing)
    places = {node: place for place, node in enumerate(forward.calls)}
    places[next(iter(forward.graph.find_nodes(op="output")))] = len(forward.calls)
    alive_at = [
        [node for node in forward.calls[:place] if any(places[user] >= place for user in node.users)]
        for place in range(1, len(forward.calls))
    ]
    assert len(cuts) > 0.8 * sum(not share_memory(alive) for alive in alive_at)
    crossings = [crossing for stage in cut_into_stages(forward, cuts) for crossing in stage.leaving]
    assert 3 < sum(crossing.is_flat for crossing in crossings) < len(crossings)


def test_one_micro_batch_takes_any_loss() -> None:
    """One that is no sum or mean over samples, and one that compares them."""
    torch.manual_seed(11)
    case = replace(
        CASES["twins"](4, torch.float32),
        loss_fn=lambda o, t: functional.mse_loss(o, t).sqrt() + (o @ t.T).logsumexp(1).amax(),
    )
    plain = baseline_step(case)
    expected = gradients(case.model)
    pipe = piped(case, num_stages=2, num_microbatches=1, schedule="1f1b")
    assert torch.equal(step(pipe, case), plain)
    for key, parameter in case.model.named_parameters():
        assert parameter.grad is None if expected[key] is None else torch.equal(parameter.grad, expected[key]), key


def test_what_touches_a_buffer_that_changes_stays_together() -> None:
    """`calls` is counted up before anything else and read by the last product but one."""
    case = mean_of(models.Frozen(), 16)
    forward = capture_forward(case.model, case.args, case.kwargs, case.target, case.loss_fn)
    buffer = next(node for node, name in forward.states.items() if name == "calls")
    calls = forward.calls
    touching = [index for index, node in enumerate(calls) if buffer in node.all_input_nodes]
    reading = max(index for index, node in enumerate(calls) if any(n in calls[: touching[0] + 1] for n in node.args))
    assert reading - touching[0] > 4
    cuts = find_cuts(forward)
    assert cuts
    assert not any(touching[0] < cut.position <= reading for cut in cuts)


def run(stages: list[EngineStage], leaves: list[object]) -> torch.Tensor:
    """One micro-batch through stages in this process, forward and back."""
    for stage in stages:
        stage.has_backward = True
    for stage in stages:
        left = stage.forward_one_chunk(0, tuple(leaves))
        if not stage.is_last:
            stages[stage.stage_index + 1].set_local_fwd_input(left, 0)
    for stage in reversed(stages):
        stage.backward_one_chunk(0, loss=left if stage.is_last else None)
        if not stage.is_first:
            stages[stage.stage_index - 1].set_local_bwd_input(stage.get_local_bwd_output(0), 0)
    return left.detach()


def mean_of(model: torch.nn.Module, *shape: int) -> Case:
    return Case(model=model, args=(torch.randn(4, *shape),), loss_fn=lambda output: output.mean())


def small(term: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    return Case(model=model, args=(torch.randn(4, 4),), loss_fn=lambda o: o.square().mean() + 1e-6 * term(o))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: mean_of(models.Residual(), 3, 8, 8), "blocks.0.1"),
        (lambda: mean_of(models.Broken(), 16), "one graph"),
        (lambda: mean_of(models.Frozen(), 16), "not independent"),
        (
            lambda: Case(
                model=torch.nn.Linear(4, 4), args=(torch.randn(4, 4),), loss_fn=lambda o: (o @ o.T).logsumexp(1).mean()
            ),
            "with more than one micro-batch gradients would be others: use one",
        ),
        (lambda: Case(model=torch.nn.Linear(4, 4), args=(torch.randn(4, 4),), loss_fn=lambda o: o.mean().exp()), "exp"),
        # Terms too small to be seen in the loss.
        (lambda: small(lambda o: o.mean(0).square().mean()), "mean.dim makes one result of several samples"),
        (lambda: small(lambda o: (o @ o.T).tanh().mean()), "mm.default compares samples"),
        (lambda: Case(model=torch.nn.Linear(4, 4), args=(torch.randn(4, 4),)), "scalar loss"),
    ],
)
def test_what_would_train_to_something_else_is_refused(make, told: str) -> None:
    case = make()
    before = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    with pytest.raises(CaptureError, match=told):
        piped(case, num_stages=2, num_microbatches=2)
    for name, tensor in case.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(p.grad is None for p in case.model.parameters())


def test_batch_norm_by_micro_batches_is_a_choice() -> None:
    torch.manual_seed(7)
    case = Case(
        model=models.Residual(blocks=1).double(),
        args=(torch.randn(4, 3, 8, 8).double(),),
        loss_fn=lambda o: o.square().mean(),
    )
    twin = models.Residual(blocks=1).double()
    twin.load_state_dict(case.model.state_dict())
    for half in case.args[0].split(2):
        (case.loss_fn(twin(half)) / 2).backward()
    expected = gradients(twin)
    pipe = piped(case, num_stages=2, num_microbatches=2, schedule="1f1b", batch_norm="per-microbatch")
    step(pipe, case)
    assert_near(case, expected)
    for name, buffer in case.model.named_buffers():
        torch.testing.assert_close(buffer, dict(twin.named_buffers())[name])


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    torch.manual_seed(8)
    case = gpt(8, torch.float64)
    baseline_step(case)
    expected = gradients(case.model)
    pipe = piped(case, num_stages=2, num_microbatches=4, schedule="gpipe")
    step(pipe, case)
    before = {name: p.grad.clone() for name, p in case.model.named_parameters() if name == "tokens.weight"}
    stage = pipe.engine_stages()[1]
    backward = stage.backward_one_chunk
    stage.backward_one_chunk = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        step(pipe, case)
    assert torch.equal(case.model.tokens.weight.grad, before["tokens.weight"])  # tied, so it was set aside
    stage.backward_one_chunk = backward
    gradients(case.model)
    step(pipe, case)
    assert_near(case, expected)


class Dropping(torch.nn.Module):
    """Blocks that drop out by a module and by a number."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.drop = torch.nn.Dropout(0.1)
        self.rate = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = functional.dropout(torch.tanh(block(self.drop(x))), self.rate, self.training)
        return x


def test_a_model_that_changed_is_planned_anew() -> None:
    torch.manual_seed(9)
    x, y = torch.randn(2, 4, 8, dtype=torch.float64)
    case = Case(model=Dropping().double(), args=(x,), target=y, loss_fn=functional.mse_loss)
    pipe = piped(case, num_stages=2, num_microbatches=1, schedule="1f1b")
    step(pipe, case)
    gradients(case.model)
    case.model.drop.p = case.model.rate = 0.0
    case.model.blocks[0].requires_grad_(False)
    plain = baseline_step(case)
    expected = gradients(case.model)
    assert torch.equal(step(pipe, case), plain)
    for name, parameter in case.model.named_parameters():
        same = parameter.grad is None if expected[name] is None else torch.equal(parameter.grad, expected[name])
        assert same, name
    case.model.eval()
    with pytest.raises(CaptureError, match="eval mode"):
        step(pipe, case)


@pytest.mark.parametrize("values", [(np.float64(0.5), np.float64(0.25)), (Pass.FORWARD, Pass.BACKWARD), (1, None)])
def test_plain_attributes_of_any_kind_are_compared(values: tuple[Any, Any]) -> None:
    case = CASES["skips"](4, torch.float32)
    seen = []
    for value in values:
        case.model.layers[0].scale = value
        seen.append(pipeline_signature(case.model, case.args))
    assert seen[0] != seen[1] and seen[1] == pipeline_signature(case.model, case.args)


def test_inputs_that_want_a_gradient_are_refused() -> None:
    case = CASES["skips"](4, torch.float32)
    case.args[0].requires_grad_()
    with pytest.raises(memfit.SpecError, match="requires a gradient"):
        piped(case, num_stages=2, num_microbatches=2)
