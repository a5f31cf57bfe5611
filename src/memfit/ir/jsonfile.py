"""JSON files: read as untrusted data, written whole and for their owner only.

A file from elsewhere is parsed as JSON, never as code, and `msgspec` validates it against the type of a record before
any code uses its content; the types of the fields say which values are allowed (`memfit.ir.fields`).
`msgspec.json.schema` gives the same rules as JSON Schema.

Known limits: rules that types cannot state, such as that indices exist, are checked by the modules of the records.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from memfit.errors import PlanFileError
from memfit.ir.fields import NO_CONTROL_CHARACTERS

__all__ = ["as_document", "decoded", "read_bytes", "read_json", "record_of", "write_json"]

T = TypeVar("T")

_LARGEST_FILE_BYTES = 64 * 2**20
_LONGEST_TEXT = 300


def read_json(path: str | os.PathLike[str], kind: type[T]) -> T:
    """Reads a record from a JSON file.

    Args:
        path: the file.
        kind: type of the record.

    Returns:
        The record.

    Raises:
        OSError: if the file cannot be read.
        PlanFileError: if the file is too large, not JSON, or no such record.
    """
    return decoded(path, read_bytes(path), kind)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file that is no larger than a file of memfit may be.

    Raises:
        OSError: if the file cannot be read.
        PlanFileError: if the file is too large.
    """
    with Path(path).open("rb") as file:
        content = file.read(_LARGEST_FILE_BYTES + 1)
    if len(content) > _LARGEST_FILE_BYTES:
        raise PlanFileError(f"{path} is larger than the {_LARGEST_FILE_BYTES} bytes a file of memfit may have")
    return content


def decoded(path: str | os.PathLike[str], content: bytes, kind: type[T]) -> T:
    """The record in the content of a file.

    Raises:
        PlanFileError: if it is not JSON, or no such record.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise PlanFileError(f"{path}: {_damaged(error)}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise PlanFileError(f"{path} is not JSON ({_printable(error)}); give a file that memfit has written") from None


def write_json(path: str | os.PathLike[str], record: msgspec.Struct) -> None:
    """Writes a record as a JSON file, mode 0600, one line per field; an existing file is replaced atomically.

    Args:
        path: the file.
        record: the record to write.

    Raises:
        OSError: if the file cannot be written.
        PlanFileError: if the record could not be read back, for example since a number is not finite.
    """
    content = _encoded(record)
    try:
        read = msgspec.json.decode(content, type=type(record))
    except msgspec.DecodeError as error:
        raise PlanFileError(f"nothing is written to {path}, since it could not be read: {_printable(error)}") from None
    if read != record:
        raise PlanFileError(f"nothing is written to {path}, since a number of it is not finite")
    fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    lines = (msgspec.json.encode(name) + b": " + bytes(field) for name, field in fields.items())
    text = b"{\n" + b",\n".join(lines) + b"\n}\n"
    if len(text) > _LARGEST_FILE_BYTES:
        raise PlanFileError(f"{path} would take {len(text)} bytes; a file of memfit has at most {_LARGEST_FILE_BYTES}")
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def as_document(record: msgspec.Struct) -> Any:
    """A record as parsed JSON, for another process or for a larger document.

    Raises:
        PlanFileError: if it has a value that JSON cannot represent.
    """
    return msgspec.json.decode(_encoded(record))


def record_of(document: object, kind: type[T]) -> T:
    """The record in parsed JSON.

    Raises:
        PlanFileError: if the document is no such record.
    """
    try:
        return msgspec.convert(document, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise PlanFileError(_damaged(error)) from None


def _encoded(record: msgspec.Struct) -> bytes:
    try:
        return msgspec.json.encode(record)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PlanFileError(f"{type(record).__name__} has a value that JSON cannot represent: {error}") from error


def _damaged(error: Exception) -> str:
    return f"{_printable(error)}; it is damaged or of another version of memfit: make it anew"


def _printable(error: Exception) -> str:
    """A message, which may hold text of a file, without control characters."""
    text = str(error).replace(f"matching regex {NO_CONTROL_CHARACTERS!r}", "without control characters")
    text = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text if not 0xD800 <= ord(c) <= 0xDFFF)
