"""Python runs this file when it starts, in the child processes of `memfit run`, whose `PYTHONPATH` names this folder.

Another `sitecustomize` that it hides runs after it.
"""

import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent

if os.environ.get("MEMFIT_BUDGET"):
    from memfit.script.child import begin

    begin()

sys.path[:] = [path for path in sys.path if Path(path).resolve() != _HERE]
_own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
except ModuleNotFoundError:
    pass
finally:
    sys.modules.setdefault("sitecustomize", _own)
