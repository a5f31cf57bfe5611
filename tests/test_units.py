"""Bytes and durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import SpecError
from memfit.units import format_bytes, format_percent, format_seconds, parse_bytes


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        ("1", 1),
        ("512B", 512),
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("8gib", 8 * 2**30),
        (" 1.5 MiB ", 3 * 2**19),
        (".5kB", 500),
        ("2.TB", 2 * 10**12),
        ("1TiB", 2**40),
        ("60%", 600),
        ("100 %", 1000),
        ("0.1%", 1),
        ("9007199254740993", 2**53 + 1),
        ("0.29GB", 290_000_000),
        ("7" * 400 + "TB", int("7" * 400) * 10**12),
    ],
)
def test_amounts_are_read(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text, whole_bytes=1000) == nbytes


@pytest.mark.parametrize(
    "text",
    [0, -1, "0", "0.4", "-8GiB", "", "GiB", "8 GiB 3", "8 XB", "1e9", "8,5GiB", "inf", "٨GiB", "0%", True, None, 1.5],
)
def test_what_is_no_amount_is_refused_with_its_value(text: object) -> None:
    with pytest.raises(SpecError, match=r"\(budget: ") as error:
        parse_bytes(text, whole_bytes=1000)  # type: ignore[arg-type]
    assert repr(text) in str(error.value)


def test_a_percentage_needs_a_whole() -> None:
    with pytest.raises(SpecError, match="a device whose memory is known"):
        parse_bytes("60%")


@given(st.integers(1, 2**80))
def test_every_count_of_bytes_is_exact(nbytes: int) -> None:
    assert parse_bytes(nbytes) == parse_bytes(str(nbytes)) == parse_bytes(f"{nbytes} B") == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**19, "1.5 MiB"),
        (-3 * 2**19, "-1.5 MiB"),
        (8 * 2**30, "8.00 GiB"),
        (9.6 * 2**30, "9.60 GiB"),
        (2**41, "2048.00 GiB"),
    ],
)
def test_amounts_are_written(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(1, 2**45))
def test_what_is_written_can_be_read(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 µs"), (5e-6, "5 µs"), (4.1e-3, "4.1 ms"), (-4.1e-3, "-4.1 ms"), (2, "2.00 s")]
)
def test_durations_are_written(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_fractions_are_written_signed() -> None:
    assert [format_percent(fraction) for fraction in (0.062, -0.01, 0)] == ["+6.2 %", "-1.0 %", "+0.0 %"]
