"""Seed 001's tables again: ResNets plain, by checkpoints, by swapping and by both, and Inception v4.

The seed ran TensorFlow on a GPU of 8 GB. Its rows are repeated as shares of its own baseline step; memfit's strategies
get these shares of its baseline step as budgets: what Large Model Support took for `swap`, what the seed's hybrid took
for all others. `hybrid` gets the least it works with where it cannot keep that.

Known limits: the seed's plain ResNet-200 ran out of memory, so its shares are those of ResNet-152.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.overhead import cases as overhead
from benchmarks.report import Report, Table
from benchmarks.subject import Case, Run, Subject, differing
from memfit.errors import BudgetError
from memfit.fitted.plan import Plan
from memfit.ir.tiers import TierLinks
from memfit.runtime.offload.tiers import tier_links

__all__ = ["CASES", "COLUMNS", "run"]

COLUMNS = (
    "model",
    "who",
    "strategy",
    "budget, % of the baseline peak",
    "peak MiB",
    "peak, measured MiB",
    "host or disk peak MiB",
    "overhead, profiled %",
    "relaxed bound %",
    "step, measured s",
    "overhead, measured %",
    "tensors that differ",
)

CASES: dict[str, Case] = {
    "resnet34": Case(spec="torchvision:resnet34", batch=24),
    **{name: overhead.CASES[name] for name in ("resnet18", "resnet50", "resnet101", "resnet152", "resnet200")},
    "inception_v4": overhead.CASES["inception_v4"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """What the seed recorded of a strategy: device memory in MB and seconds per step."""

    mb: float
    seconds: float


_SEED: dict[str, dict[str, _Recorded]] = {
    model: {name: _Recorded(mb=mb, seconds=seconds) for name, (mb, seconds) in rows.items()}
    for model, rows in {
        "resnet18": {
            "none": (843.57, 0.233),
            "openai-memory": (514.40, 0.191),
            "swap": (829.03, 0.351),
            "hybrid": (509.10, 0.197),
        },
        "resnet34": {
            "none": (1323.28, 0.371),
            "openai-memory": (799.98, 0.371),
            "swap": (1220.52, 0.539),
            "hybrid": (762.15, 0.383),
        },
        "resnet50": {
            "none": (3015.52, 0.538),
            "openai-memory": (1381.65, 0.573),
            "swap": (2764.48, 0.940),
            "hybrid": (1230.80, 0.600),
        },
        "resnet101": {
            "none": (4671.11, 0.934),
            "openai-memory": (1956.81, 1.118),
            "swap": (4108.10, 1.576),
            "hybrid": (1726.87, 1.139),
        },
        "resnet152": {
            "none": (6577.46, 1.381),
            "openai-memory": (2083.61, 1.682),
            "swap": (5596.63, 2.290),
            "hybrid": (1924.51, 1.699),
        },
        "resnet200": {
            "openai-memory": (2135.42, 2.287),
            "swap": (7559.23, 3.087),
            "hybrid": (1952.25, 2.323),
        },
    }.items()
}
_LARGEST = "resnet152"


def run(
    report: Report,
    table: Table,
    device: torch.device,
    name: str,
    case: Case,
    *,
    tiers: str,
    real: bool,
    wall: int,
    cached: bool,
) -> None:
    """Adds the rows of a model.

    Args:
        report: prints.
        table: with `COLUMNS`.
        device: where to run.
        name: of `CASES`.
        case: what to run in its place.
        tiers: where swapped bytes may go.
        real: whether steps are run; else all is predicted.
        wall: interleaved steps of each that are timed.
        cached: use the op costs known for this machine.
    """
    for strategy, recorded in _SEED.get(name, {}).items():
        _seed_row(report, table, name, strategy, recorded)
    subject = Subject.of(case, device, cached=cached)
    plans = list(_plans(subject, name, tier_links(tiers, device)))
    ran: list[tuple[Plan, Run | None]] = [subject.proven(plan) if real else (plan, None) for _, _, plan in plans]
    plain = subject.run() if real else None
    seconds: Sequence[float] = [0.0] * (1 + len(plans))
    if real and wall:
        seconds = subject.seconds([None, *(plan for plan, _ in ran)], repeats=wall)
    measured = "" if plain is None else _mib(plain.peak_bytes)
    took = f"{seconds[0]:.2f}" if seconds[0] else ""
    report.add(*(table, name, "memfit", "none", "", _mib(subject.plain.peak_bytes), measured, "", "", "", took, "", ""))
    for (strategy, share, _), (plan, planned), step in zip(plans, ran, seconds[1:], strict=True):
        p = plan.predicted
        different = "" if plain is None or planned is None else differing(plain.results, planned.results)
        report.add(
            *(table, name, "memfit", strategy, f"{100 * share:.1f}", _mib(p.peak_bytes)),
            "" if planned is None else _mib(planned.peak_bytes),
            _mib(p.host_bytes + p.disk_bytes) if p.out_bytes else "",
            f"{100 * p.overhead:.1f}",
            "" if p.bound_overhead is None else f"{100 * p.bound_overhead:.1f}",
            f"{step:.2f}" if step else "",
            f"{100 * (step / seconds[0] - 1):.1f}" if step else "",
            "" if plain is None else f"{len(different)} of {len(plain.results)}",
        )


def _seed_row(report: Report, table: Table, name: str, strategy: str, recorded: _Recorded) -> None:
    plain = _SEED[name].get("none")
    share = "" if plain is None or strategy == "none" else f"{100 * recorded.mb / plain.mb:.1f}"
    extra = "" if plain is None or strategy == "none" else f"{100 * (recorded.seconds / plain.seconds - 1):.1f}"
    who = {"none": "TensorFlow", "swap": "swap (LMS)", "hybrid": "hybrid (OME)"}.get(strategy, strategy)
    measured = f"{recorded.mb * 1e6 / 2**20:.1f}"
    report.add(*(table, name, "seed 001", who, share, "", measured, "", "", "", f"{recorded.seconds:.3f}", extra, ""))


def _plans(subject: Subject, name: str, tiers: Sequence[TierLinks]) -> list[tuple[str, float, Plan]]:
    """The strategies with their budgets as shares of the baseline peak."""
    seed = _SEED[name if "none" in _SEED.get(name, {}) else _LARGEST]
    peak = subject.plain.peak_bytes
    large, small = (seed[strategy].mb / seed["none"].mb for strategy in ("swap", "hybrid"))
    asked: list[tuple[str, str, float, Sequence[TierLinks]]] = [
        ("openai-memory", "openai-memory", 1.0, ()),
        ("swap", "swap", large, tiers),
        ("auto, at the budget of swap", "auto", large, tiers),
        ("hybrid", "hybrid", small, tiers),
        ("auto without swaps", "auto", small, ()),
        ("auto", "auto", small, tiers),
    ]
    found: list[tuple[str, float, Plan]] = []
    for shown, strategy, share, to in asked:
        try:
            plan = subject.plan(int(share * peak), strategy=strategy, tiers=to)
        except BudgetError as error:
            share = error.least_bytes / peak
            plan = subject.plan(error.least_bytes, strategy=strategy, tiers=to)
        found.append((shown, plan.predicted.peak_bytes / peak if strategy == "openai-memory" else share, plan))
    return found


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"
