"""The warnings that memfit logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["OTHER_DATA", "OTHER_WAY", "notices"]

OTHER_WAY = "other memory than planned"
"""What memfit tells, among other words, of a step whose code took another way than when it was planned."""

OTHER_DATA = "other data may take more memory"
"""What memfit tells, among other words, of plain code whose memory depends on data or on random numbers."""


class _Noting(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def notices() -> Iterator[list[str]]:
    """Texts of the warnings that are logged meanwhile."""
    texts: list[str] = []
    handler = _Noting(texts)
    logger = logging.getLogger("memfit")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
