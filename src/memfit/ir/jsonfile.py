"""JSON files: read as untrusted data, written whole and for their owner only.

A file from elsewhere is parsed as JSON, never as code, and validated against a schema before any code uses its content.
The schema is JSON Schema (draft 2020-12), so that the documented form is also the enforced form. The validator below
knows the part of JSON Schema that memfit's files use, and its messages say in words where a file is wrong.

Known limits: of JSON Schema only `type`, `enum`, `minimum`, `maximum`, `maxLength`, `pattern`, `minItems`,
`maxItems`, `prefixItems`, `items`, `properties`, `propertyNames`, `required`, `additionalProperties` and
`maxProperties` are known, and `1.0` is not an integer.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from memfit.errors import PlanFileError

__all__ = ["read_json", "validate", "write_json"]

_LARGEST_FILE_BYTES = 64 * 2**20
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def read_json(path: str | os.PathLike[str], *, schema: Mapping[str, Any]) -> Any:
    """Reads a JSON file.

    Args:
        path: the file.
        schema: the schema that it must satisfy.

    Returns:
        The document.

    Raises:
        OSError: if the file cannot be read.
        PlanFileError: if the file is too large, not JSON, or breaks the schema.
    """
    with Path(path).open("rb") as file:
        content = file.read(_LARGEST_FILE_BYTES + 1)
    if len(content) > _LARGEST_FILE_BYTES:
        raise PlanFileError(f"{path} is larger than the {_LARGEST_FILE_BYTES} bytes a file of memfit may have")
    try:
        document = json.loads(content.decode(), parse_constant=_refuse)
        validate(document, schema)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{path} is not JSON ({error}); give a file that memfit has written") from None
    except PlanFileError as error:
        raise PlanFileError(f"{path}: {error}") from None
    return document


def write_json(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Writes a JSON file, mode 0600, one line per entry; an existing file is replaced atomically.

    Args:
        path: the file.
        document: the data to write; finite numbers only.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if the document holds an infinite number or a NaN.
    """
    lines = (f"{json.dumps(name)}: {json.dumps(item, allow_nan=False)}" for name, item in document.items())
    content = "{\n" + ",\n".join(lines) + "\n}\n"
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="ascii") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def validate(document: object, schema: Mapping[str, Any], where: str = "$") -> None:
    """Validates a document against a schema.

    Args:
        document: parsed JSON.
        schema: a schema that uses only the part of JSON Schema known here.
        where: path of the document, for the message.

    Raises:
        PlanFileError: naming the first place that breaks the schema, and how.
    """
    for place, problem in _violations(document, schema, where):
        raise PlanFileError(f"{place} {problem}; it is damaged or of another version of memfit: make it anew")


def _violations(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """Yields every place that breaks the schema, and how."""
    rule = schema.get
    if "enum" in schema and not (isinstance(value, str) and value in schema["enum"]):
        yield where, f"is {_short(value)}, not one of {', '.join(schema['enum'])}"
    if names := rule("type"):
        names = [names] if isinstance(names, str) else names
        if not any(_is_a(value, name) for name in names):
            yield where, f"is {_short(value)}, not of type {' or '.join(names)}"
            return
    if isinstance(value, dict):
        yield from _violations_of_object(value, schema, where)
    elif isinstance(value, list):
        if not rule("minItems", 0) <= len(value) <= rule("maxItems", math.inf):
            yield where, f"has {len(value)} items, not {rule('minItems', 0)} to {rule('maxItems')}"
            return
        first = rule("prefixItems", ())
        for index, item in enumerate(value):
            item_schema = first[index] if index < len(first) else rule("items", {})
            yield from _violations(item, item_schema, f"{where}[{index}]")
    elif isinstance(value, str):
        if len(value) > rule("maxLength", math.inf):
            yield where, f"is {len(value)} characters long, more than {rule('maxLength')}"
        elif not re.search(rule("pattern", ""), value):
            yield where, f"is {_short(value)}, which holds characters that do not belong there"
    elif _is_a(value, "number") and not rule("minimum", -math.inf) <= value <= rule("maximum", math.inf):
        yield where, f"is {_short(value)}, not in {rule('minimum')} to {rule('maximum')}"


def _violations_of_object(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    if len(value) > schema.get("maxProperties", math.inf):
        yield where, f"has {len(value)} entries, more than {schema['maxProperties']}"
        return
    known = schema.get("properties", {})
    others = schema.get("additionalProperties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield where, f"has no {name!r}"
    for name, item in value.items():
        yield from _violations(name, schema.get("propertyNames", {}), where)
        if name not in known and others is False:
            yield where, f"has an unknown entry {_short(name)}"
        else:
            yield from _violations(
                item, known.get(name, others), f"{where}.{name if name.isidentifier() else _short(name)}"
            )


def _is_a(value: object, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _short(value: object) -> str:
    """A value as it appears in a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = json.dumps(value if not isinstance(value, str) else value[:60])
    return text if len(text) <= 80 else f"{text[:80]}..."


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")
