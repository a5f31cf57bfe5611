from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from memfit import strategies
from memfit.capture.training_step import capture_step
from memfit.errors import BudgetError, SpecError
from memfit.tools.compare import _IGNORE_BUDGET, Comparison, Row, budget_bytes, compare, max_batch
from memfit.zoo import Example, build
from tests.small_disk import make_small_disk

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Costs measured in this session only, on one thread: these models are tiny."""
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path_factory.getbasetemp() / "costs"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mlp(batch: int, layers: int = 3) -> Example:
    return build(f"zoo:mlp?width=64&layers={layers}", batch=batch, shape=(16,))


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(mlp, strategies=["none", "auto"], batches=[1024, 4096], budgets=["90%", "75%", "1%"])


def test_a_row_for_each_batch_strategy_and_budget_it_looks_at(comparison: Comparison) -> None:
    found = [(row.batch, row.strategy, row.budget_bytes is not None) for row in comparison.rows]
    assert found == [(batch, *rest) for batch in (1024, 4096) for rest in [("none", False), *3 * [("auto", True)]]]
    assert comparison.label == mlp(1024).label.partition(" · ")[0]
    assert comparison.device == "cpu"


def test_what_fits_is_predicted_and_measured(comparison: Comparison) -> None:
    for row in comparison.rows:
        if row.error:
            continue
        assert row.fits
        assert row.peak_bytes is not None and row.measured_peak_bytes is not None
        assert row.measured_peak_bytes == pytest.approx(row.peak_bytes, rel=0.02)
        assert row.measured_plain_peak_bytes == pytest.approx(row.plain_peak_bytes, rel=0.02)
        assert row.seconds is not None and row.recompute_seconds is not None and row.activations is not None
        # A planned step writes over operands that the plain one leaves alone; the bound below limits what that saves.
        first_runs = row.seconds - row.recompute_seconds
        assert first_runs <= row.plain_seconds + 1e-9
        assert row.strategy != "none" or first_runs == pytest.approx(row.plain_seconds)
        assert row.measured_seconds is not None and row.measured_seconds > 0
        assert row.measured_plain_seconds is not None and row.measured_plain_seconds > 0
        assert row.overhead is not None and row.bound_overhead is not None
        assert row.overhead >= row.bound_overhead - 1e-6
        if row.budget_bytes is not None:
            assert row.measured_peak_bytes <= row.budget_bytes < row.plain_peak_bytes


def test_activations_are_kept_or_recomputed(comparison: Comparison) -> None:
    for batch in (1024, 4096):
        plain, *planned = [row for row in comparison.rows if row.batch == batch and row.activations]
        assert plain.activations is not None and plain.activations.recomputed == 0
        assert plain.activations.retained_share == 1.0
        total = plain.activations.retained_bytes
        for row in planned:
            assert row.activations is not None
            assert row.activations.retained + row.activations.recomputed == plain.activations.retained
            assert row.activations.retained_bytes + row.activations.recomputed_bytes == total
    assert any(row.activations.recomputed for row in comparison.rows if row.activations)


def test_what_does_not_fit_is_a_row_with_the_least_budget(comparison: Comparison) -> None:
    impossible = [row for row in comparison.rows if row.error]
    assert {row.batch for row in impossible} == {1024, 4096}
    for row in impossible:
        assert not row.fits and row.peak_bytes is None and row.measured_seconds is None
        assert row.least_bytes is not None and row.budget_bytes is not None
        assert row.budget_bytes < row.least_bytes < row.plain_peak_bytes
        assert row.overhead is None and row.measured_overhead is None


def test_nothing_is_measured_unless_asked_for() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    result = compare(
        lambda batch: (model, (torch.randn(batch, 8),)),
        strategies=["none"],
        batches=[64],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        measure=False,
    )
    (row,) = result.rows
    assert row.measured_peak_bytes is None and row.peak_bytes == row.plain_peak_bytes and row.fits
    assert result.label == "Sequential"


def test_with_an_optimizer_its_state_and_step_count() -> None:
    def momentum(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)  # type: ignore[arg-type]

    (without,) = compare(mlp, strategies=["none"], batches=[64]).rows
    (row,) = compare(mlp, strategies=["none"], batches=[64], optimizer=momentum).rows
    parameters = sum(p.numel() * p.element_size() for p in mlp(1).model.parameters())
    assert row.measured_peak_bytes is not None and without.measured_peak_bytes is not None
    assert row.measured_peak_bytes >= without.measured_peak_bytes + parameters
    assert row.measured_peak_bytes == pytest.approx(row.peak_bytes, rel=0.05)


def test_without_a_budget_nothing_has_to_be_recomputed() -> None:
    (row,) = compare(mlp, strategies=["auto"], batches=[64], measure=False).rows
    assert row.fits and row.budget_bytes is None
    assert row.activations is not None and row.activations.recomputed == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategies": ["nonesuch"]}, "nonesuch"),
        ({"strategies": []}, "at least one strategy"),
        ({"batches": [0]}, "batch: 0"),
        ({"budgets": ["4 parsecs"]}, "parsecs"),
    ],
)
def test_mistakes_are_told_before_any_work(change: dict[str, object], message: str) -> None:
    def make(batch: int) -> Example:
        raise AssertionError("no work before the mistake is told")

    arguments: dict[str, object] = {"strategies": ["none"], "batches": [4], "budgets": [None], **change}
    with pytest.raises(SpecError, match=message):
        compare(make, **arguments)  # type: ignore[arg-type]


def test_an_example_is_a_model_with_inputs() -> None:
    with pytest.raises(SpecError, match="make_example must return"):
        compare(lambda batch: torch.ones(batch), strategies=["none"], batches=[4])


def test_budgets_of_a_comparison_refer_to_the_baseline_peak() -> None:
    assert budget_bytes(None, 1000, CPU) is None
    assert budget_bytes("40%", 1000, CPU) == budget_bytes("40%plain", 1000, CPU) == 400
    assert budget_bytes("1MiB", 1000, CPU) == 1 << 20
    assert budget_bytes(77, 1000, CPU) == 77
    assert (budget_bytes("auto", 1000, CPU) or 0) > 0


def test_a_row_fits_by_its_largest_peak() -> None:
    row = Row(batch=1, strategy="s", budget_bytes=10, plain_peak_bytes=20, plain_seconds=2.0, peak_bytes=9, seconds=3.0)
    assert row.fits and row.overhead == 0.5 and row.measured_overhead is None


def test_strategies_that_ignore_the_budget_do() -> None:
    example = mlp(64)
    graph = capture_step(example.model, example.args, {}, loss_fn=example.loss_fn).graph
    parameter = {"sequential": ":3", "openai-collection": ":2,4"}
    for name in _IGNORE_BUDGET - {"tile", "micro-batch"}:  # which are not told one
        order = strategies.find(name + parameter.get(name, ""))
        assert order(graph, None) == order(graph, 1), name


# Largest batch


def find_max(budget: int | str, *, layers: int = 3, **options: object) -> object:
    example = mlp(2, layers)
    return max_batch(
        example.model,
        lambda batch: mlp(batch, layers).args,
        budget=budget,
        make_loss=lambda batch: mlp(batch, layers).loss_fn,
        **options,  # type: ignore[arg-type]
    )


def planned_row(batch: int, budget: int) -> Row:
    (row,) = compare(mlp, strategies=["auto"], batches=[batch], budgets=[budget], measure=False).rows
    return row


def test_the_largest_batch_fits_and_the_plain_one_is_exact() -> None:
    budget = 2 << 20
    result = find_max(budget)
    at_baseline, beyond, at_planned = (planned_row(n, budget) for n in (result.plain, result.plain + 1, result.planned))
    assert at_baseline.plain_peak_bytes <= budget < beyond.plain_peak_bytes
    assert result.planned > result.plain and result.ratio == result.planned / result.plain
    assert result.measured_peak_bytes is not None
    assert max(result.measured_peak_bytes, result.predicted_peak_bytes) <= budget
    assert result.measured_peak_bytes >= 0.97 * budget
    # Only what does not fit as it is runs anything again.
    assert at_baseline.recompute_seconds == 0 < at_planned.recompute_seconds
    assert [point.overhead for point in result.curve if point.batch == result.planned] == [result.overhead]
    batches = [point.batch for point in result.curve]
    assert batches == sorted(set(batches)) and {1, result.plain, result.planned} <= set(batches)
    for point in result.curve:
        assert point.least_peak_bytes <= point.plain_peak_bytes
        assert (point.plain_peak_bytes <= budget) == (point.batch <= result.plain)
        if point.batch <= result.plain:
            # Nothing runs again; writing over operands saves time.
            assert point.overhead is not None and point.overhead <= 0.0


def test_the_search_stays_within_its_limits() -> None:
    result = find_max("50%", limit=40, prove=False)
    assert (result.plain, result.planned, result.measured_peak_bytes) == (40, 40, None)
    with pytest.raises(SpecError, match="start: 9, limit: 8"):
        find_max("1GiB", start=9, limit=8)


def test_a_strategy_without_recomputation_stops_where_the_baseline_step_does() -> None:
    result = find_max(2 << 20, strategy="none")
    assert result.planned == result.plain and result.ratio == 1.0 and result.overhead == 0.0


def test_swaps_make_room_for_larger_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMFIT_SWAP_DIR", str(tmp_path))
    make_small_disk(monkeypatch, tmp_path / "cache", rate=1e9)
    budget = 6 << 20  # the buffers of the threads that swap take two of it
    found = {
        name: find_max(budget, layers=4, strategy=name, tiers="disk", prove=name == "auto", start=1024)
        for name in ("swap", "auto")
    }
    plain = found["auto"].plain
    for name, result in found.items():
        assert result.planned > 1.2 * plain, name
        assert all(point.least_peak_bytes <= point.plain_peak_bytes + (3 << 20) for point in result.curve), name
    assert 0 < (found["auto"].measured_peak_bytes or 0) <= budget
    assert found["auto"].planned >= 0.98 * found["swap"].planned
    little = find_max(budget, layers=4, strategy="swap", tiers="disk:1MiB", prove=False, start=1024)
    assert plain <= little.planned < found["swap"].planned


def test_where_not_even_the_smallest_batch_fits_the_least_budget_is_said() -> None:
    with pytest.raises(BudgetError) as caught:
        find_max(10_000, prove=False)
    least = caught.value.least_bytes
    assert find_max(least, prove=False).planned >= 1


class DeeperWhenLarger(nn.Module):
    """Runs other ops at other batch sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2 if x.shape[0] < 4 else 3):
            x = torch.tanh(self.layer(x))
        return x


def test_a_model_that_changes_with_the_batch_is_captured_at_every_size() -> None:
    budget = 75_000  # the baseline step fits with eight samples
    result = max_batch(
        DeeperWhenLarger(), lambda batch: {"x": torch.randn(batch, 64)}, budget=budget, make_loss=lambda b: total
    )
    assert result.measured_peak_bytes is not None and result.measured_peak_bytes <= budget
    assert 1 <= result.plain <= result.planned < 50


def total(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def test_inputs_must_be_inputs() -> None:
    with pytest.raises(SpecError, match="make_args must return"):
        max_batch(nn.Linear(2, 2), lambda batch: batch, budget="1GiB")
