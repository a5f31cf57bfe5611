"""Options of a spec, written after its `?`: `layers=6&dropout=0.1&tied=false`.

A typing mistake must not silently measure another model, so every key is checked against the options of the model,
every value against the type of the default, and an error names the close matches.

Known limits: values are scalars (int, float, bool, str); nothing is percent-decoded.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping

from memfit.errors import SpecError

__all__ = ["Option", "check_for", "check_known", "parse_query", "unknown"]

_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}

Option = int | float | bool | str


def parse_query(text: str) -> dict[str, Option]:
    """Reads `key=value&key=value`.

    Args:
        text: the text after the `?`; may be empty.

    Returns:
        Each value as the first type that can parse it: int, float, bool (`true`, `false`) or str.

    Raises:
        SpecError: if a part is not `key=value`, or a key comes twice.
    """
    options: dict[str, Option] = {}
    for part in filter(None, text.split("&")):
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise SpecError(f"an option is written key=value, several are joined by & (option: {part!r})")
        if key in options:
            raise SpecError(f"the option {key!r} is given twice; keep one (options: {text!r})")
        options[key] = _parse_value(value)
    return options


def unknown(what: str, word: str, known: Collection[str]) -> SpecError:
    """The error for an unknown name, with similar known names."""
    close = difflib.get_close_matches(word, known, n=4, cutoff=0.5)
    if close:
        return SpecError(f"unknown {what} {word!r}; did you mean {' or '.join(close)}?")
    if len(known) <= 40:
        return SpecError(f"unknown {what} {word!r}; known: {', '.join(sorted(known)) or 'none'}")
    return SpecError(f"unknown {what} {word!r}, and nothing close among the {len(known)} known ones; check the name")


def check_known(what: str, options: Mapping[str, Option], known: Collection[str]) -> None:
    """Refuses keys that are not known.

    Raises:
        SpecError: with the close matches.
    """
    for key in options:
        if key not in known:
            raise unknown(f"option of {what}", key, known)


def check_for(function: Callable[..., object], what: str, options: Mapping[str, Option]) -> None:
    """Checks options against the keyword-only parameters of a function, by name and by the type of the default.

    A whole number may stand for a float. A parameter that is at least 1 by default stays at least 1.

    Raises:
        SpecError: if a key is unknown or a value has another type or is out of range.
    """
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    check_known(what, options, defaults.keys())
    for key, value in options.items():
        wanted = type(defaults[key])
        if not (type(value) is wanted or (wanted is float and type(value) is int)):
            raise SpecError(f"the option {key!r} of {what} takes {_TYPE_NAMES[wanted]} (value: {value!r})")
        if wanted is int and int(value) < min(defaults[key], 1):
            raise SpecError(f"the option {key!r} of {what} is at least {min(defaults[key], 1)} (value: {value!r})")


def _parse_value(text: str) -> Option:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
