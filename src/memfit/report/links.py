"""Link speeds that `memfit calibrate` measured, as a table, records and a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import structs

from memfit.report.records import Record, records, summary
from memfit.report.sentence import sentence
from memfit.report.table import Sheet, sheets
from memfit.runtime.offload.link_benchmark import Calibration, LinkSpeed
from memfit.units import format_bytes, format_seconds

__all__ = ["Links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The measured links of a device."""

    device: str
    calibrations: tuple[Calibration, ...]

    def directions(self) -> Iterator[tuple[str, str, LinkSpeed]]:
        """Tier, direction and speed of each link."""
        for one in self.calibrations:
            yield str(one.tier), "out", one.out
            yield str(one.tier), "in", one.into


@sheets.register
def _(result: Links) -> list[Sheet]:
    rows = [
        (
            *(
                tier,
                way,
                f"{format_bytes(speed.alone_bytes_per_second)}/s",
                f"{format_bytes(speed.bytes_per_second)}/s",
            ),
            f"{format_bytes(speed.pageable_bytes_per_second)}/s" if speed.pageable_bytes_per_second else "",
            format_seconds(speed.latency_seconds),
            f"{format_seconds(speed.compute_seconds_per_byte * 2**30)}/GiB",
        )
        for tier, way, speed in result.directions()
    ]
    headers = ("tier", "", "alone", "beside compute", "pageable", "latency", "compute takes longer")
    title = f"calibrate  {result.device} (measured)"
    return [Sheet(title=title, headers=headers, rows=tuple(rows), left=frozenset({0, 1}))]


@records.register
def _(result: Links) -> list[Record]:
    return [{"tier": tier, "direction": way, **structs.asdict(speed)} for tier, way, speed in result.directions()]


@summary.register
def _(result: Links) -> Record:
    return {"kind": "links", "device": result.device}


@sentence.register
def _(result: Links) -> str:
    words = (f"{tier} {way} {format_bytes(speed.bytes_per_second)}/s" for tier, way, speed in result.directions())
    return f"Measured: {', '.join(words)} beside compute."
