"""The command line of memfit: one module for each command.

The module of a command has two functions. `prepare_parser(parser)` adds the options, and `run(args)` runs the command
and returns its exit code. The docstring of the module is the help text of the command; its first line is also in
`memfit --help`.

Exit codes:

- 0: success. If the command has a budget, the step fits; for `compare`, at least one row fits. For `verify` and `demo`,
  the results are also equal: bit by bit, or up to rounding for a step with tiles.
- 1: the step does not fit or runs out of memory, or the results differ.
- 2: bad input, or another error of memfit or of the operating system, such as a file that cannot be written.
- 3: an error that memfit does not know, or the reader of stdout has exited.
- 130: interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from types import MappingProxyType, ModuleType

from memfit.cli import calibrate, compare, demo, estimate, max_batch, max_size, pipeline, plan, run, verify
from memfit.cli.output import report_error
from memfit.errors import BudgetError, MemfitError, OutOfMemoryError
from memfit.script.child import leave

__all__ = ["main"]

COMMANDS = MappingProxyType(
    {
        "estimate": estimate,
        "run": run,
        "plan": plan,
        "verify": verify,
        "compare": compare,
        "max-batch": max_batch,
        "max-size": max_size,
        "pipeline": pipeline,
        "calibrate": calibrate,
        "demo": demo,
    }
)
FITS, DOES_NOT_FIT, BAD_INPUT, UNKNOWN_ERROR, INTERRUPTED = 0, 1, 2, 3, 130

_DESCRIPTION = "Makes a PyTorch training step fit the memory you have: one budget in bytes, the same gradients."
_EPILOG = """\
exit codes:
  0    fits; for verify and demo also: every bit is equal (in tiles: all but rounding)
  1    does not fit (the least budget that works is printed), out of memory, or not equal
  2    bad input: an argument, a model that cannot be captured, a damaged plan file; a file that cannot be written
  3    an error memfit does not know; -v shows where
  130  interrupted
"""
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Errors are written to stderr and not raised.

    Args:
        argv: arguments without the program's name; None for the arguments of the process.

    Returns:
        The exit code.
    """
    leave()
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # of argparse: 0 after --help, 2 after a mistake
        return int(stop.code or 0)
    if args.run is not run.run:  # a script sets up its own logging
        level = _LEVELS[min(args.verbose, 2)]
        logging.basicConfig(level=level, format="%(name)s: %(message)s", stream=sys.stderr)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("memfit: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout, such as `head`, has exited. Python flushes stdout at exit, which would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNKNOWN_ERROR
    except Exception as error:
        if args.verbose:
            logging.exception("the error came from here:")
        report_error(error, args)
        if isinstance(error, BudgetError | OutOfMemoryError):
            return DOES_NOT_FIT
        return BAD_INPUT if isinstance(error, MemfitError | OSError) else UNKNOWN_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memfit",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        _add_command(commands, name, module)
    return parser


def _add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, module: ModuleType) -> None:
    description = module.__doc__ or ""
    command = commands.add_parser(
        name,
        help=description.partition("\n")[0].replace("%", "%%"),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.prepare_parser(command)
    command.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="say what happens, and where an error comes from; -vv says more",
    )
    command.set_defaults(run=module.run)
