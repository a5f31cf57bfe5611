"""Runs a training script within a budget; the script is not edited.

The models that it trains are found as they are called, and their training steps are planned at the first call. A script
that cannot be planned runs as it is, with the reason. Child processes are planned too: `memfit run --budget 8GiB
torchrun --nproc-per-node 2 train.py`. What memfit tells goes to stderr; the exit code is the script's.
"""

from __future__ import annotations

import argparse
import builtins
import os
import runpy
import shutil
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType

from memfit.cli.options import add_budget, add_levers, add_tiers
from memfit.errors import MemfitError, SpecError

__all__ = ["prepare_parser", "run"]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `memfit run`."""
    add_budget(parser, plain=False)
    add_levers(parser)
    add_tiers(parser)
    parser.add_argument(
        "--search-seconds", type=float, default=8.0, metavar="SECONDS", help="work of a search (default: 8)"
    )
    parser.add_argument("--dry-run", action="store_true", help="stop at the first training call; say how it is planned")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or a program that starts Python")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def run(args: argparse.Namespace) -> int:
    """Runs the script in this process, or the program in its place.

    Returns:
        The exit code of the script.

    Raises:
        SpecError: if there is no such script or program.
    """
    from memfit.script.options import ScriptOptions, into_environment

    options = ScriptOptions(
        budget=args.budget,
        levers=args.levers,
        tiers=args.tiers,
        search_seconds=args.search_seconds,
        dry_run=args.dry_run,
    )
    into_environment(options, os.environ)
    is_file = Path(args.script).is_file() and not os.access(args.script, os.X_OK)
    if not args.module and not is_file and not args.script.endswith(".py"):
        program = shutil.which(args.script)
        if program is None:
            raise SpecError(f"there is no script, and no program, of this name (script: {args.script!r})")
        os.execv(program, [args.script, *args.arguments])
    if not args.module and not Path(args.script).is_file():
        raise SpecError(f"there is no such script (script: {args.script!r})")

    from memfit.script.watch import watch

    watch(options)
    sys.argv = [args.script, *args.arguments]
    try:
        if args.module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            _run_file(Path(args.script))
    except MemfitError:
        raise
    except Exception as error:
        traceback.print_exception(error.with_traceback(_of_script(error.__traceback__)))
        return 1
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    return 0


def _of_script(found: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the script."""
    while found is not None and found.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        found = found.tb_next
    return found


def _run_file(path: Path) -> None:
    """Runs a file as Python does: in a module `__main__` that stays, since classes in it may be pickled at the end."""
    sys.path.insert(0, str(path.resolve().parent))
    main = ModuleType("__main__")
    main.__file__ = str(path)
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    # This file's own `from __future__` must not reach the script.
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), main.__dict__)
