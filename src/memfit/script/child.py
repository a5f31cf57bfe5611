"""Begins to plan in a process whose environment has a budget, as soon as its code imports torch.

`MEMFIT_BUDGET=8GiB python train.py` is planned, and so are the processes that torchrun or accelerate start: the package
installs `memfit_budget.pth`, a line that Python runs when it starts (the `site` module).

Python asks the finders of `sys.meta_path` for each module (PEP 451). A finder in front of them sees the import of
torch, leaves it to the others, and adds one call after it. So a child process that does not use torch does not import
it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

__all__ = ["begin", "leave"]


class _TorchFinder:
    """A finder that has a function called when torch is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of torch, whose loader calls `_watch` afterwards; None for any other module."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader = None if spec is None else spec.loader
        if not isinstance(loader, importlib.machinery.SourceFileLoader):
            return spec
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _watch()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def begin() -> None:
    """Has the training steps of this process planned, once it imports torch."""
    if "torch" in sys.modules:
        _watch()
    else:
        sys.meta_path.insert(0, _TorchFinder())


def leave() -> None:
    """Leaves this process and its children as they are, although a budget is set: it runs a command of memfit."""
    os.environ.pop("MEMFIT_BUDGET", None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _TorchFinder)]


def _watch() -> None:
    from memfit.script.options import from_environment
    from memfit.script.watch import watch

    options = from_environment(os.environ)
    if options is not None:
        watch(options, in_child=True)
