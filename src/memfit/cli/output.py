"""Output of the commands: tables and a last sentence for people, JSON and CSV for programs.

With `--json` or `--csv` without a path, stdout has only that document, so that a program can read it. Then no table is
written, and the sentence goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from memfit.errors import BudgetError, SpecError

__all__ = ["check_output", "emit", "report_error", "write_text"]

_WIDE = 240
"""Width of tables in columns if stdout is not a terminal."""


def check_output(args: argparse.Namespace) -> None:
    """Checks the output options before the work, which may take hours. It does not check permissions.

    Args:
        args: parsed options of `add_output`, and `--save` if the command has it.

    Raises:
        SpecError: if JSON and CSV both go to stdout, or the folder of a file does not exist.
    """
    paths = [getattr(args, kind, None) for kind in ("json", "csv")]
    if paths == ["-", "-"]:
        raise SpecError("JSON and CSV cannot both go to stdout; give one of them a path, such as --csv table.csv")
    for path in [*paths, getattr(args, "save", None)]:
        if path not in (None, "-") and not Path(path).resolve().parent.is_dir():
            raise SpecError(f"there is no folder for this file; make it first (path: {str(path)!r})")


def emit(result: object, args: argparse.Namespace, *, last: str | None = None) -> None:
    """Writes a result in the formats of the options, and one sentence after it.

    Args:
        result: an object of a type that `memfit.report` can format.
        args: parsed options of `add_output`.
        last: the sentence; None for `memfit.report.sentence.sentence(result)`.

    Raises:
        SpecError: if a file cannot be written.
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
    """Writes an error as one line on stderr, and as a JSON document if `--json` is given.

    Args:
        error: the error; a `BudgetError` is reported with its least budget in bytes.
        args: parsed options of the command.
    """
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
            pass  # stderr has the first error, which is the important one


def write_text(path: str, text: str) -> None:
    """Writes text to a file, or to stdout, with exactly one line break at its end.

    Args:
        path: path of the file, or `-` for stdout.
        text: the text.

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
