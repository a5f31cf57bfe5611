"""The published file format of steps, programs and plans: JSON schemas.

A program is compact: `["c", 12]` computes op 12, `["c", 12, 8]` computes it in 8 chunks, `["c!", 13, 1, 7]` computes op
13 in one chunk over the memory of storage 7, `["f", 5]` frees storage 5. `["s", 12, 8]` runs op 12 in 8 slices of the
batch; a `+` in the code says that the instruction is fused with the next one. `["o:disk", 5]` swaps storage 5 out to
the disk, `["i", 5]` swaps it in. `["t:disk", 5]` says that storage 5 lives on the disk. Fields that have their default
value are left out.

Known limits: a schema cannot state some rules, such as that indices exist; `memfit.ir.serialization` checks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.ir.graph import Phase, StorageKind
from memfit.ir.tiers import Tier

__all__ = ["GRAPH_SCHEMA", "INSTRUCTION_LENGTHS", "PLAN_SCHEMA", "PROGRAM_SCHEMA", "SCHEMA_VERSION"]

SCHEMA_VERSION = 4
INSTRUCTION_LENGTHS = {
    "c": (2, 3),
    "c!": (4,),
    "f": (2,),
    "s": (2, 3),
    "s!": (4,),
    "s+": (2, 3),
    "s!+": (4,),
    "f+": (2,),
    **{f"o:{tier}": (2,) for tier in Tier},
    "i": (2,),
    **{f"t:{tier}": (2,) for tier in Tier},
}
"""Codes of instructions and the numbers of entries that they may have."""


def _object(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _array(items: Mapping[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": most}


_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_NO_CONTROL_CHARACTERS = r"^(?![\s\S]*[\x00-\x08\x0b-\x1f\x7f-\x9f])"
_NAME = {"type": "string", "maxLength": 1000, "pattern": _NO_CONTROL_CHARACTERS}
_WORDS = {**_NAME, "maxLength": 100_000}
_BYTES = {"type": "integer", "minimum": 0, "maximum": 2**60}
_SECONDS = {"type": "number", "minimum": 0, "maximum": 1e9}
_FRACTION = {**_SECONDS, "minimum": -1}
_INDEX = {"type": "integer", "minimum": 0, "maximum": 2**31}
_INDICES = _array(_INDEX, 1_000_000)
_CHUNKS = {"type": "integer", "minimum": 1, "maximum": 2**31}
_FACT_BOUNDS = {**_WORDS, "minimum": -(2**63), "maximum": 2**63}
_FACT = {**_FACT_BOUNDS, "type": ["string", "integer", "boolean"]}
_FACTS = {**_FACT_BOUNDS, "type": ["string", "integer", "boolean", "array"], "items": _FACT, "maxItems": 100_000}
_FINGERPRINT = {
    "type": "object",
    "additionalProperties": {**_FACTS, "items": _FACTS},
    "propertyNames": _NAME,
    "maxProperties": 1000,
}

PROGRAM_SCHEMA: dict[str, Any] = {
    "$schema": _DRAFT,
    **_array(
        {
            "type": "array",
            "prefixItems": [{"enum": [*INSTRUCTION_LENGTHS]}, _INDEX, _CHUNKS, _INDEX],
            "minItems": 2,
            "maxItems": 4,
        },
        10_000_000,
    ),
}
"""A program: a list of `[code, index]`, with `chunks` and the overwritten storage where they matter."""

_VARIANT = _object({"chunks": _CHUNKS, "seconds": _SECONDS, "workspace_bytes": _BYTES})
_REACH = _object({name: {"type": "number", "minimum": -1e6, "maximum": 1e6} for name in ("scale", "before", "after")})
_BY_SLICES = _object(
    {"batch": _CHUNKS, "samples": _CHUNKS, "seconds": _SECONDS, "workspace_bytes": _BYTES, "reads": _INDICES},
    {
        "copy_seconds": _SECONDS,
        "copy_over_seconds": _SECONDS,
        "sums": _INDICES,
        "first": {"type": "boolean"},
        "accumulates": {"type": "boolean"},
        "grid": _array(_CHUNKS, 2),
        "extents": _array(_CHUNKS, 2),
        "reaches": _array(_array(_REACH, 2), 1_000),
    },
)
_OP = {
    "name": _NAME,
    "target": _NAME,
    "phase": {"enum": [str(phase) for phase in Phase]},
    "reads": _INDICES,
    "writes": _INDICES,
}
_OP_DETAILS = {
    "module": _NAME,
    "subgraph": _INDEX,
    "in_place_over": _INDICES,
    "seconds": _SECONDS,
    "workspace_bytes": _BYTES,
    "chunks": _CHUNKS,
    "variants": _array(_VARIANT, 1_000),
    "plain_variant": _VARIANT,
    "random_state_bytes": _BYTES,
    "recomputable": {"type": "boolean"},
    "in_place_seconds": _SECONDS,
    "plain_in_place": {"type": "boolean"},
    "plain_reads": _INDICES,
    "by_slices": _BY_SLICES,
    "half_of": _NAME,
}

_LINK = _object(
    {"bytes_per_second": {"type": "number", "minimum": 1, "maximum": 1e15}},
    {"latency_seconds": _SECONDS, "compute_seconds_per_byte": _SECONDS},
)
_TIER = _object(
    {"tier": {"enum": [str(tier) for tier in Tier]}, "out": _LINK, "into": _LINK},
    {"limit_bytes": _BYTES, "buffer_bytes": _BYTES},
)

GRAPH_SCHEMA: dict[str, Any] = {
    "$schema": _DRAFT,
    **_object(
        {
            "ops": _array(_object(_OP, {**_OP_DETAILS, "recompute_as": _object(_OP, _OP_DETAILS)}), 1_000_000),
            "storages": _array(
                _object(
                    {"name": _NAME, "nbytes": _BYTES, "kind": {"enum": [str(kind) for kind in StorageKind]}},
                    {"plain_nbytes": _BYTES, "reusable": {"type": "boolean"}},
                ),
                1_000_000,
            ),
        },
        {
            "outputs": _INDICES,
            "static_bytes": _BYTES,
            "after_step_bytes": _BYTES,
            "after_step_seconds": _SECONDS,
            "label": _WORDS,
            "tiers": _array(_TIER, len(Tier)),
        },
    ),
}
"""A step graph."""

PLAN_SCHEMA: dict[str, Any] = {
    "$schema": _DRAFT,
    **_object(
        {
            "schema_version": {"type": "integer", "minimum": SCHEMA_VERSION, "maximum": SCHEMA_VERSION},
            "fingerprint": _FINGERPRINT,
            "strategy": _NAME,
            "budget_bytes": {**_BYTES, "minimum": 1},
            "predicted": _object(
                {"peak_bytes": _BYTES, "step_seconds": _SECONDS, "overhead": _FRACTION},
                {
                    "plain_peak_bytes": _BYTES,
                    "bound_overhead": _FRACTION,
                    "least_peak_bytes": _BYTES,
                    **dict.fromkeys(("out_bytes", "in_bytes", "host_bytes", "disk_bytes"), _BYTES),
                    "overlap": _FRACTION,
                    "stall_seconds": _SECONDS,
                },
            ),
            "graph_digest": _NAME,
            "program": {key: rule for key, rule in PROGRAM_SCHEMA.items() if key != "$schema"},
        },
        {
            "grid": _array(_CHUNKS, 3),
            "decisions": _array(
                _object(
                    {
                        "block": _NAME,
                        "module": _WORDS,
                        "saves": _WORDS,
                        "saved_bytes": _BYTES,
                        "later": _WORDS,
                        "extra_seconds": _SECONDS,
                    },
                    {"reason": _WORDS},
                ),
                1_000_000,
            ),
        },
    ),
}
"""A plan file."""
