"""Random models, plain against fitted, bit by bit, over as many seeds as there is time for.

python -m benchmarks.fuzz.main --seeds 0-499 --mode bitwise --to fuzz.jsonl

Results are JSON lines, one for each seed, mode and budget; a run that is begun again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.fuzz.catalogue import BLOCKS
from benchmarks.fuzz.compare import CRASH, FAILURES
from benchmarks.fuzz.modes import MODES
from benchmarks.worker import Died, TookTooLong, Worker

JOB = "benchmarks.fuzz.job:run"


def main(arguments: list[str] | None = None) -> int:
    """Runs the fuzz; returns how many runs failed."""
    options = _options(arguments)
    done = _read(options.to)
    known = {(row["seed"], row["mode"]) for row in done}
    only = tuple(filter(None, options.blocks.split(",")))
    modes = sorted(MODES) if options.mode == "each" else options.mode.split(",")
    shares = tuple(float(share) for share in options.shares.split(",") if share)
    rows = list(done)
    with Worker(JOB, seconds=options.seconds) as worker, options.to.open("a") as file:
        for number, seed in enumerate(seeds_of(options.seeds)):
            for mode in [modes[number % len(modes)]] if options.in_turn else modes:
                if (seed, mode) in known:
                    continue
                for row in _rows(worker, (seed, mode, only, shares, options.device)):
                    rows.append(row)
                    print(json.dumps(row), file=file, flush=True)
                    _say(row)
    wanted = set(seeds_of(options.seeds))
    rows = [row for row in rows if row["seed"] in wanted and row["mode"] in modes]
    print(summary(rows))
    return sum(row["status"] in FAILURES for row in rows)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-99", help="FIRST-LAST, or numbers with commas between")
    parser.add_argument("--mode", default="bitwise", help=f"{', '.join(MODES)}, several with commas, or each")
    parser.add_argument("--in-turn", action="store_true", help="one mode for each seed, in turn, instead of all")
    parser.add_argument("--blocks", default="", help="these blocks in this order instead of random ones")
    parser.add_argument("--shares", default="", help="budgets as shares of the baseline peak; 0 is the least budget")
    parser.add_argument("--seconds", type=float, default=180.0, help="a seed may take")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--to", type=Path, default=Path("build/fuzz.jsonl"), help="JSON lines of results")
    options = parser.parse_args(arguments)
    for mode in filter(lambda name: name != "each", options.mode.split(",")):
        if mode not in MODES:
            parser.error(f"there is no mode {mode}; there are {', '.join(MODES)}")
    options.to.parent.mkdir(parents=True, exist_ok=True)
    return options


def seeds_of(text: str) -> Iterator[int]:
    """Seeds as the command line has them: FIRST-LAST, or numbers with commas between."""
    for part in text.split(","):
        first, dash, last = part.partition("-")
        yield from range(int(first), int(last if dash else first) + 1)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _rows(worker: Worker, job: tuple[int, str, tuple[str, ...], tuple[float, ...], str]) -> list[dict[str, Any]]:
    seed, mode, *_ = job
    nothing = {"seed": seed, "mode": mode, "blocks": [], "share": None, "problems": [], "seconds": 0.0}
    try:
        found: list[dict[str, Any]] = worker.call(job)
        return found
    except Died as error:
        return [nothing | {"status": CRASH, "error": str(error)}]
    except TookTooLong as error:
        return [nothing | {"status": "SLOW", "error": str(error)}]


def _say(row: dict[str, Any]) -> None:
    if row["status"] in FAILURES:
        what = "; ".join(row["problems"][:3]) or row.get("error", "")
        more = f" and {len(row['problems']) - 3} more" if len(row["problems"]) > 3 else ""
        print(f"{row['seed']} {row['mode']} {row['share']} {row['status']}: {what}{more} {row['blocks']}", flush=True)


def summary(rows: list[dict[str, Any]]) -> str:
    """Tables by status and mode, and of the blocks that are in failing models more often than in others."""
    modes = sorted({row["mode"] for row in rows})
    statuses = sorted({row["status"] for row in rows})
    counts = Counter((row["status"], row["mode"]) for row in rows)
    lines = ["", f"| status | {' | '.join(modes)} |", f"| --- |{' ---: |' * len(modes)}"]
    lines += [f"| {s} | {' | '.join(str(counts[s, m]) for m in modes)} |" for s in statuses]
    tried, failed = Counter[str](), Counter[str]()
    for row in rows:
        names = {block.partition("[")[0] for block in row["blocks"]}
        tried.update(names)
        failed.update(names if row["status"] in FAILURES else ())
    often = sorted((name for name in failed), key=lambda name: (-failed[name] / tried[name], -failed[name], name))
    lines += ["", "| block | family | runs | failed |", "| --- | --- | ---: | ---: |"]
    lines += [f"| {n} | {BLOCKS[n].family} | {tried[n]} | {failed[n]} |" for n in often]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(min(main(), 100))
