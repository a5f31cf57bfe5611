"""Costs are kept, those of several processes beside each other; what is no cost is ignored."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from memfit.ir.graph import Variant
from memfit.profiling.cost_cache import CostCache, open_cache

CPU = torch.device("cpu")


def variant(seconds: float, *, chunks: int = 1) -> Variant:
    return Variant(chunks=chunks, seconds=seconds, workspace_bytes=64)


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "costs"))
    return tmp_path / "costs"


def test_what_is_saved_is_known_later(own_directory: Path) -> None:
    cache = open_cache(CPU)
    cache.update({"whole": (variant(1.0),), "in chunks": (variant(1.0), variant(0.5, chunks=4)), "other bits": ()})
    cache.save()
    assert dict(open_cache(CPU)) == dict(cache)
    (file,) = own_directory.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(own_directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("key", ['a", [1] "b', "back\\slash", "naïve", "x(('a',), [2, 3])", '"'])
def test_any_text_is_a_key(key: str) -> None:
    cache = open_cache(CPU)
    cache.update({"before": (variant(2.0),), key: (variant(1.0),)})
    cache.save()
    assert dict(open_cache(CPU)) == dict(cache)


def test_processes_that_measure_at_once_lose_nothing() -> None:
    one, other = open_cache(CPU), open_cache(CPU)
    one["one"], other["other"] = (variant(1.0),), (variant(2.0),)
    one.save()
    other.save()
    one["one"] = (variant(3.0),)  # measured anew
    one.save()
    assert dict(open_cache(CPU)) == {"one": (variant(3.0),), "other": (variant(2.0),)}


def test_a_file_is_written_only_where_something_is_new(own_directory: Path) -> None:
    cache = open_cache(CPU)
    cache["one"] = (variant(1.0),)
    cache.save()
    (file,) = own_directory.iterdir()
    before = file.read_bytes()
    for again in (cache, open_cache(CPU)):
        assert "one" in again
        again.save()
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        '["cut off", [[1, 0.',
        '["key"]',
        "7",
        '["whole", [[1, "s", 0]]]',
        '["parts first", [[2, 0.1, 0]]]',
        '["negative", [[1, -0.1, 0]]]',
        '["infinite", [[1, Infinity, 0]]]',
        "[" * 100000,
    ],
)
def test_what_is_no_cost_is_ignored(own_directory: Path, damage: str) -> None:
    cache = open_cache(CPU)
    cache["one"] = (variant(1.0),)
    cache.save()
    (file,) = own_directory.iterdir()
    file.write_text(file.read_text() + damage)
    found = open_cache(CPU)
    assert [key for key in found if key in found] == ["one"]
    found["two"] = (variant(2.0),)
    found.save()
    again = open_cache(CPU)
    assert again["one"] == (variant(1.0),) and again["two"] == (variant(2.0),)


def test_what_others_append_is_read_and_a_file_that_is_another_anew(own_directory: Path) -> None:
    cache = open_cache(CPU)
    cache["one"] = (variant(1.0),)
    cache.save()
    (file,) = own_directory.iterdir()
    line = '["other", [[1, 2.0, 64]]]'
    with file.open("a") as others:
        others.write(line[:12])
        others.flush()
        assert list(open_cache(CPU)) == ["one"]  # half of a line
        others.write(line[12:] + "\n")
    assert dict(open_cache(CPU)) == {"one": (variant(1.0),), "other": (variant(2.0),)}
    file.write_text(line + "\n")  # shorter
    assert dict(open_cache(CPU)) == {"other": (variant(2.0),)}
    replacing = file.with_suffix(".new")
    replacing.write_text('["third", [[1, 3.0, 64]]]\n' * 4)
    replacing.replace(file)
    assert dict(open_cache(CPU)) == {"third": (variant(3.0),)}
    file.write_bytes(b"\xff\n" * 200)
    assert not open_cache(CPU)


def test_a_place_that_cannot_be_written_is_no_error(own_directory: Path) -> None:
    own_directory.parent.mkdir(exist_ok=True)
    own_directory.write_text("a file, not a directory")
    cache = open_cache(CPU)
    cache["one"] = (variant(1.0),)
    cache.save()
    assert not CostCache()
