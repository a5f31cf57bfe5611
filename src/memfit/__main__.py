"""`python -m memfit` runs the command `memfit`."""

from __future__ import annotations

import sys

from memfit.cli import main

if __name__ == "__main__":
    sys.exit(main())
