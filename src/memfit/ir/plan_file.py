"""Plan files: a program and the facts that it was planned for.

A file is a record that `msgspec` validates (`memfit.ir.jsonfile`); a file of another version is refused as such.

Known limits: the program of a file is only known to be well formed; `memfit.sim.verifier` says whether it is right for
its step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct

from memfit.errors import PlanFileError
from memfit.ir.fields import MOST_ITEMS, Budget, Bytes, Count, Fact, Fraction, Name, Seconds, Words
from memfit.ir.jsonfile import decoded, read_bytes, write_json
from memfit.ir.program import Program

__all__ = ["SCHEMA_VERSION", "Decision", "PlanFile", "Prediction", "fingerprint_difference", "load_plan", "save_plan"]

SCHEMA_VERSION = 7


class Prediction(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Memory and time that the simulator predicts for a plan, with the lower bound on its overhead where one is known.

    Attributes:
        peak_bytes: highest memory of the step.
        is_bound: whether that is only an upper bound, of a step that runs without a plan.
        step_seconds: sum of the times of its ops.
        overhead: extra time over the baseline step, as a fraction.
        plain_peak_bytes: highest memory of the step without memfit.
        bound_overhead: lower bound on the overhead of any plan, with the tiers it may swap to.
        least_peak_bytes: lower bound on the peak of any program that runs whole ops.
        out_bytes: bytes swapped out.
        in_bytes: bytes swapped in.
        overlap: share of the links' time during which compute goes on.
        stall_seconds: time that compute waits for links.
        host_bytes: most bytes on the host.
        disk_bytes: most bytes on the disk.
    """

    peak_bytes: Bytes
    is_bound: bool = False
    step_seconds: Seconds
    overhead: Fraction
    plain_peak_bytes: Bytes = 0
    bound_overhead: Fraction | None = None
    least_peak_bytes: Bytes = 0
    out_bytes: Bytes = 0
    in_bytes: Bytes = 0
    overlap: Fraction = 1.0
    stall_seconds: Seconds = 0.0
    host_bytes: Bytes = 0
    disk_bytes: Bytes = 0


class Decision(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Decision of a plan on one block: saved results, action of the backward pass in place of the others, and reason.

    Attributes:
        block: the block, such as `1` or `3-4`.
        module: qualified names of the modules that it computes.
        saves: the results that stay in memory until the backward pass, in words.
        saved_bytes: their size.
        later: action of the backward pass in place of the other results, such as `recompute bn1, relu`.
        extra_seconds: time that this action costs.
        reason: why this decision and not a cheaper one.
    """

    block: Name
    module: Words
    saves: Words
    saved_bytes: Bytes
    later: Words
    extra_seconds: Seconds
    reason: Words = ""


class PlanFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan in a file.

    Attributes:
        schema_version: version of the file format.
        fingerprint: versions, device, shapes and modules that the plan is for; see `fingerprint_difference`.
        strategy: name of the planner.
        budget_bytes: the budget that it had to fit.
        predicted: its predicted cost.
        graph_digest: digest of the step it belongs to; see `graph_digest`.
        program: the order in which to compute and free.
        grid: numbers of tiles into which samples may be cut; empty if the step is not captured for the lever `tile`.
        decisions: the program in words.
        checkpointing: how checkpoints of the model itself are treated; see `memfit.fit`.
    """

    schema_version: int = SCHEMA_VERSION
    fingerprint: Annotated[dict[Name, Fact], Meta(max_length=1_000)]
    strategy: Name
    budget_bytes: Budget
    predicted: Prediction
    graph_digest: Name
    program: Program
    grid: Annotated[tuple[Count, ...], Meta(max_length=3)] = ()
    decisions: Annotated[tuple[Decision, ...], MOST_ITEMS] = ()
    checkpointing: Literal["refuse", "replace"] = "refuse"


class _Version(Struct):
    """The field of a plan file that every version has."""

    schema_version: int


def save_plan(path: str | os.PathLike[str], plan: PlanFile) -> None:
    """Writes a plan file that only its owner can read, and refuses a plan that could not be read back."""
    write_json(path, plan)


def load_plan(path: str | os.PathLike[str]) -> PlanFile:
    """Reads a plan file.

    Returns:
        A plan; compare its fingerprint and graph digest, and pass its program through `memfit.sim.verifier`.

    Raises:
        OSError: if the file cannot be read.
        PlanFileError: if it is no plan file, or one of another version.
    """
    content = read_bytes(path)
    version = decoded(path, content, _Version).schema_version
    if version != SCHEMA_VERSION:
        raise PlanFileError(
            f"{path} is a plan file of version {version}, and this memfit reads version {SCHEMA_VERSION}: make it anew"
        )
    return decoded(path, content, PlanFile)


def fingerprint_difference(expected: Mapping[str, Fact], found: Mapping[str, Fact]) -> list[str]:
    """Returns the differences between two fingerprints.

    Args:
        expected: fingerprint of the plan.
        found: fingerprint of the present step.

    Returns:
        One line for each fact that differs, empty if none does.
    """

    def shown(side: Mapping[str, Fact], name: str) -> str:
        return json.dumps(side[name], ensure_ascii=False) if name in side else "nothing"

    facts = [(name, shown(expected, name), shown(found, name)) for name in sorted({*expected, *found})]
    return [f"{name}: planned for {planned}, found {here}" for name, planned, here in facts if planned != here]
