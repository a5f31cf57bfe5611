"""All blocks, by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from benchmarks.fuzz.block import Block

__all__ = ["BLOCKS"]


def _found() -> dict[str, Block]:
    blocks: dict[str, Block] = {}
    for path in sorted(Path(__file__).parent.glob("blocks_*.py")):
        module = import_module(f"{__package__}.{path.stem}")
        for value in vars(module).values():
            if isinstance(value, Block):
                assert value.name not in blocks, f"two blocks are called {value.name}"
                blocks[value.name] = value
    return blocks


BLOCKS = MappingProxyType(_found())
