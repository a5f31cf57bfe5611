"""Which models that others wrote can be planned, exactly, in subgraphs or not at all: a table over families.

python -m benchmarks.coverage.main --only torchvision,timm --write

Rows are JSON lines, one for each model; a run that is begun again goes on where it stopped, and `--again crash,wrong`
tries those rows anew.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.coverage.job import SOURCES, source
from benchmarks.coverage.trial import STATUSES
from benchmarks.report import MARKER, environment
from benchmarks.worker import Died, TookTooLong, Worker

JOB = "benchmarks.coverage.job:run"

Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    again = set(filter(None, options.again.split(",")))
    rows = {(r["source"], r["name"]): r for r in _read(options.to) if r["status"] not in again}
    listed: dict[tuple[str, str], str] = {}
    with Worker(JOB, seconds=options.seconds, most_jobs=25) as worker:
        for of in options.only.split(","):
            try:
                names = [name for name in source(of).names() if re.search(options.match, name)]
            except ImportError as error:
                print(f"{of} is not run: {error}")
                continue
            for name in names[options.part[0] - 1 :: options.part[1]]:
                listed[of, name] = source(of).group(name)
                if (of, name) not in rows:
                    rows[of, name] = _row(worker, of, name, options.device)
                    with options.to.open("a") as file:
                        print(json.dumps(rows[of, name]), file=file)
                    print(_line(rows[of, name]), flush=True)
    print(tables([row for key, row in rows.items() if key in listed]))
    if options.write:
        readme = Path(__file__).with_name("README.md")
        before, _, after = readme.read_text().split(MARKER)
        body = f"{environment(torch.device('cpu'))}\n\n{tables(list(rows.values()))}"
        readme.write_text(f"{before}{MARKER}\n\n{body}\n\n{MARKER}{after}")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SOURCES), help=f"of {', '.join(SOURCES)}")
    parser.add_argument("--match", default="", help="names that this pattern is found in")
    parser.add_argument("--again", default="", help="statuses whose rows are made anew")
    parser.add_argument("--part", default="1/1", type=_part, help="K/N: every Nth row from the Kth, for N processes")
    parser.add_argument("--seconds", type=float, default=120.0, help="a row may take")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; scripts run on a CPU")
    parser.add_argument("--to", type=Path, default=Path("build/coverage.jsonl"), help="JSON lines of rows")
    parser.add_argument("--write", action="store_true", help="put the tables into the README")
    options = parser.parse_args(arguments)
    unknown = set(options.only.split(",")) - set(SOURCES)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(SOURCES)}")
    options.to.parent.mkdir(parents=True, exist_ok=True)
    return options


def _part(text: str) -> tuple[int, int]:
    first, _, of = text.partition("/")
    return int(first), int(of)


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _row(worker: Worker, of: str, name: str, device: str) -> Row:
    row: Row = {"source": of, "group": source(of).group(name), "name": name}
    try:
        return row | worker.call((of, name, device))
    except Died as error:
        return row | {"status": "crash", "reason": str(error), "seconds": 0.0}
    except TookTooLong as error:
        return row | {"status": "slow", "reason": str(error), "seconds": 0.0}


def _line(row: Row) -> str:
    return f"{row['source']} {row['name']}: {row['status']} ({row['seconds']} s) {row.get('reason', '')[:200]}"


def tables(rows: Sequence[Row]) -> str:
    """Families and what became of them, then every model that was not planned, with the reason."""
    statuses = [status for status in STATUSES if any(row["status"] == status for row in rows)]
    header = ("package", "family", "models", *statuses, "activations under plan %", "`fit` s, median", "peak, median %")
    lines = [_cells(header), _cells(["---"] * len(header))]
    families: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        families.setdefault((row["source"], row["group"]), []).append(row)
    for (of, group), members in families.items():
        counts = Counter(row["status"] for row in members)
        planned = [row for row in members if "share" in row]
        peaks = [100 * row["planned_bytes"] / row["plain_bytes"] for row in planned if row["plain_bytes"]]
        figures = (
            f"{100 * sum(row['share'] for row in planned) / len(planned):.1f}" if planned else "",
            f"{_median([row['fit_seconds'] for row in planned]):.1f}" if planned else "",
            f"{_median(peaks):.0f}" if peaks else "",
        )
        lines.append(_cells((of, group, len(members), *(counts[status] or "" for status in statuses), *figures)))
    lines += ["", _cells(("model", "", "why")), _cells(["---"] * 3)]
    for row in rows:
        if not row["status"].startswith("planned"):
            why = row.get("reason", "").replace("|", "\\|")[:160]
            lines.append(_cells((f"{row['source']}: {row['name']}", row["status"], why)))
    return "\n".join(lines)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _cells(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
