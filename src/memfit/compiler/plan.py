"""The plan as the compiler makes it: a program, its predicted cost, and the reason of each decision.

It is data, and says nothing of modules that run it; `memfit.fitted.plan.Plan` is the plan that users apply.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self, cast

from memfit.errors import MemfitError
from memfit.ir.fields import Fact
from memfit.ir.plan_file import Decision, PlanFile, Prediction, load_plan, save_plan
from memfit.ir.program import Program
from memfit.planner.analysis.activations import count_activations
from memfit.planner.analysis.explain import ends_of_runs
from memfit.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from memfit.compiler.proof import Proof
    from memfit.compiler.request import Planned

__all__ = ["CompiledPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPlan:
    """How one training step runs within a budget.

    Attributes:
        label: name of the planned step.
        budget_bytes: requested peak of the whole step.
        strategy: name of the planner.
        predicted: predicted peak, time and overhead, and their bounds.
        measured_peak_bytes: peak of the proving run, None if there was none.
        proof: comparison of its results with the baseline step's; None if no proof was requested.
        program: the order in which the step computes and frees.
        decisions: the program in words.
        fingerprint: model, inputs, torch and device that the plan was made for.
        graph_digest: digest of the step that the plan was made for.
        grid: numbers of tiles into which samples of its step may be cut along height and width, and the number of parts
            of the batch if that is given; empty if the step was not captured for the lever `tile`.
        checkpointing: how checkpoints of the model itself are treated; see `memfit.fit`.
        planned: capture and request that the plan came from; None for a plan from a file.
    """

    label: str
    budget_bytes: int
    strategy: str
    predicted: Prediction
    measured_peak_bytes: int | None = None
    proof: Proof | None = None
    program: Program
    decisions: tuple[Decision, ...]
    fingerprint: Mapping[str, Fact]
    graph_digest: str
    grid: tuple[int, ...] = ()
    checkpointing: str = "refuse"
    planned: Planned | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON that only its owner can read.

        Raises:
            MemfitError: if the step runs without a plan.
        """
        if self.is_plain:
            raise MemfitError(f"{self.label} runs without a plan, so there is none to save; plain=False plans it")
        save_plan(
            path,
            PlanFile(
                fingerprint={**self.fingerprint, "label": self.label},
                strategy=self.strategy,
                budget_bytes=self.budget_bytes,
                predicted=self.predicted,
                graph_digest=self.graph_digest,
                grid=self.grid,
                program=self.program,
                decisions=self.decisions,
                checkpointing=cast(Literal["refuse", "replace"], self.checkpointing),
            ),
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a plan file.

        Raises:
            PlanFileError: if the file is damaged or not a plan.
        """
        file = load_plan(path)
        fingerprint = dict(file.fingerprint)
        label = str(fingerprint.pop("label", ""))
        return cls(
            label=label,
            budget_bytes=file.budget_bytes,
            strategy=file.strategy,
            predicted=file.predicted,
            program=file.program,
            decisions=file.decisions,
            fingerprint=fingerprint,
            graph_digest=file.graph_digest,
            grid=file.grid,
            checkpointing=file.checkpointing,
        )

    @property
    def is_plain(self) -> bool:
        """Whether the step runs without a plan, because its baseline step fits; it has no predicted time then."""
        return not self.program.instructions

    @property
    def is_tiled(self) -> bool:
        """Whether ops may run slice by slice for the lever `tile`, so that gradients are equal up to rounding."""
        return bool(self.grid)

    @property
    def fits(self) -> bool:
        """Whether no peak, predicted or measured, exceeds the budget."""
        return max(self.predicted.peak_bytes, self.measured_peak_bytes or 0) <= self.budget_bytes

    def summary(self) -> str:
        """One sentence: whether the plan fits, at which cost, and by which means."""
        if self.is_plain:
            most = "at most " if self.predicted.is_bound else ""
            peaks = f"{most}{format_bytes(self.predicted.peak_bytes)} predicted, of {format_bytes(self.budget_bytes)}"
            return f"Fits without a plan: {peaks}; {self.label} runs as it is."
        measured = "" if self.measured_peak_bytes is None else f", {format_bytes(self.measured_peak_bytes)} measured"
        means = f"recompute {len(self.program.recomputed())} ops"
        if self.planned is not None:
            activations = count_activations(self.planned.graph, self.program)
            means = f"keep {activations.retained} / recompute {activations.recomputed}"
            means += f" / swap {activations.swapped}" if activations.swapped else ""
        peaks = f"{format_bytes(self.predicted.peak_bytes)} predicted{measured}, of {format_bytes(self.budget_bytes)}"
        time = f"{format_percent(self.predicted.overhead)} step time predicted"
        means += ", in slices, gradients up to rounding" if self.is_tiled else ""
        means += f"; {self.proof}" if self.proof is not None and not self.proof.is_exact else ""
        return f"{'Fits' if self.fits else 'Does not fit'}: {peaks}; {time} ({means})."

    def words(self) -> Callable[[], str]:
        """A function that returns the text of `str` without keeping the loss, the optimizer and so the model alive."""
        if self.planned is None:
            return self.__str__
        request = replace(self.planned.request, loss_fn=None, optimizer=None)
        capture = self.planned.capture.without_call()
        return replace(self, planned=replace(self.planned, capture=capture, request=request, call=None)).__str__

    def __str__(self) -> str:
        """The plan as pseudo-code."""
        if self.is_plain:
            return self.summary()
        p = self.predicted
        bound = "" if p.bound_overhead is None else f" (bound {format_percent(p.bound_overhead)})"
        measured = "" if self.measured_peak_bytes is None else f", measured {format_bytes(self.measured_peak_bytes)}"
        lines = [
            f"plan  {self.label} · budget {format_bytes(self.budget_bytes)} · strategy {self.strategy}",
            f"      predicted peak {format_bytes(p.peak_bytes)}{measured} · "
            f"baseline {format_bytes(p.plain_peak_bytes)} · step {format_percent(p.overhead)}{bound}",
        ]
        if self.proof is not None:
            lines.append(f"      {self.proof} ({format_seconds(self.proof.seconds)} of baseline steps)")
        if self.is_tiled:
            images, micro_batches = self.grid[:2], self.grid[2:]
            tiles = f", images in {'×'.join(map(str, images))} tiles" if max(images) > 1 else ""
            tiles += f", the batch in up to {micro_batches[0]} micro-batches" if micro_batches else ""
            lines.append(f"      runs slice by slice where that pays{tiles}; gradients are equal up to rounding")
            ends = "" if self.planned is None else ends_of_runs(self.planned.graph)
            lines += [f"      what takes its operands whole: {ends}"] if ends else []
        if p.out_bytes:
            tiers = " and ".join(
                f"{format_bytes(n)} on the {tier}" for tier, n in (("host", p.host_bytes), ("disk", p.disk_bytes)) if n
            )
            lines.append(
                f"      swaps {format_bytes(p.out_bytes)} out and {format_bytes(p.in_bytes)} in, {tiers} · "
                f"{p.overlap:.0%} of it beside compute, {format_seconds(p.stall_seconds)} waited for"
            )
        rows = [("block", "module", "saves", "bytes", "later", "cost")]
        for d in self.decisions:
            cost = f"+{format_seconds(d.extra_seconds)}" if d.extra_seconds else ""
            rows.append((d.block, d.module, d.saves or "nothing", format_bytes(d.saved_bytes), d.later, cost))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        for row in rows:
            cells = [row[0].rjust(widths[0]), row[1].ljust(widths[1]), row[2].ljust(widths[2])]
            cells += [row[3].rjust(widths[3]), row[4].ljust(widths[4]), row[5]]
            lines.append("  " + "  ".join(cells).rstrip())
        return "\n".join(lines)
