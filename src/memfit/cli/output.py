"""Where the results go: tables and the last sentence to people, JSON and CSV to programs.

Stdout belongs to whoever asked for it: with `--json` or `--csv` and no path it carries nothing else, and the
sentence goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from memfit.errors import BudgetError, SpecError

__all__ = ["check_output", "emit", "report_error", "write_text"]

_WIDE = 240


def check_output(args: argparse.Namespace) -> None:
    """Refuses what cannot be written, before hours of work.

    Raises:
        SpecError: if JSON and CSV both go to stdout, or a folder is missing.
    """
    paths = [getattr(args, kind, None) for kind in ("json", "csv")]
    if paths == ["-", "-"]:
        raise SpecError("JSON and CSV cannot both go to stdout; give one of them a path, such as --csv table.csv")
    for path in [*paths, getattr(args, "save", None)]:
        if path not in (None, "-") and not Path(path).resolve().parent.is_dir():
            raise SpecError(f"there is no folder for this file; make it first (path: {str(path)!r})")


def emit(result: object, args: argparse.Namespace, *, last: str | None = None) -> None:
    """Writes a result the ways the options ask for, and the sentence it ends in.

    Args:
        result: anything `memfit.report` knows.
        args: parsed options of `add_output`.
        last: the sentence; by default the one of the result.
    """
    from rich.console import Console

    from memfit.report.records import csv_text, json_text
    from memfit.report.sentence import sentence
    from memfit.report.table import show

    taken = "-" in (args.json, args.csv)
    if not taken:
        terminal = sys.stdout.isatty()
        show(result, Console(file=sys.stdout) if terminal else Console(file=sys.stdout, width=_WIDE, color_system=None))
    for target, text in ((args.json, json_text), (args.csv, csv_text)):
        if target is not None:
            write_text(target, text(result))
    print(sentence(result) if last is None else last, file=sys.stderr if taken else sys.stdout)


def report_error(error: Exception, args: argparse.Namespace) -> None:
    """One line on stderr, and a document where JSON was asked for."""
    message = " ".join(str(error).split()) or "no message"
    if isinstance(error, BudgetError):
        least = "" if str(error.least_bytes) in message else f" (least budget: {error.least_bytes} bytes)"
        print(f"Does not fit: {message}{least}", file=sys.stderr)
    else:
        print(f"memfit: {type(error).__name__}: {message}", file=sys.stderr)
    path = getattr(args, "json", None)
    if path is not None:
        facts = {
            "kind": "error",
            "fits": False,
            "error": type(error).__name__,
            "message": message,
            "least_bytes": getattr(error, "least_bytes", None),
        }
        try:
            write_text(path, json.dumps(facts, indent=2, ensure_ascii=False))
        except SpecError:
            pass  # that the file cannot be written is what is being reported


def write_text(path: str, text: str) -> None:
    """Writes to a file, or to stdout for `-`.

    Raises:
        SpecError: if the file cannot be written.
    """
    if path == "-":
        print(text.rstrip("\n"))
        return
    try:
        Path(path).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    except OSError as error:
        raise SpecError(f"cannot write the file: {error.strerror} (path: {path!r})") from error
