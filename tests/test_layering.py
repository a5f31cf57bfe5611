"""Doors open one way: what plans and judges never imports torch, and `import memfit` costs nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import memfit

ROOT = Path(memfit.__file__).parent
ROOMS = (
    *("errors", "units", "tables", "feedback", "ir", "sim", "refusals", "planner", "strategies"),
    *(
        "torch_compat",
        "bits",
        "device_memory",
        "fxir",
        "ops",
        "passes",
        "distributed",
        "capture",
        "profiling",
        "runtime",
        "compiler",
        "fitted",
    ),
    *("pipelining", "zoo", "tools", "script", "report", "api", "integrations", "cli"),
)
"""Rooms, lowest first: each imports from those before it only."""

TESTS = Path(__file__).parent
CI = (TESTS.parent / ".ci" / "run").read_text()

WITHOUT_TORCH = ROOMS[: ROOMS.index("strategies") + 1]


def sources(room: str) -> list[Path]:
    return sorted([*ROOT.glob(f"{room}.py"), *(ROOT / room).rglob("*.py")])


def modules(room: str) -> list[str]:
    return [".".join(["memfit", *path.relative_to(ROOT).with_suffix("").parts]) for path in sources(room)]


def imports(path: Path) -> Iterator[str]:
    """Everything a file imports, at whatever depth, also for type checking only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.smoke
@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_through_its_doors(room: str) -> None:
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    for path in sources(room):
        for name in imports(path):
            package, _, rest = name.partition(".")
            if package == "memfit":
                assert rest.split(".")[0] in {"", *allowed}, f"{path} imports {name}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    path_of = {name: path for room in ROOMS for name, path in zip(modules(room), sources(room), strict=True)}
    path_of = {name.removesuffix(".__init__"): path for name, path in path_of.items()}
    found = {
        name: {i if i in path_of else i.rpartition(".")[0] for i in imports(path)} & path_of.keys() - {name}
        for name, path in path_of.items()
    }
    TopologicalSorter(found).prepare()  # raises CycleError, which names the circle


@pytest.mark.smoke
@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_what_plans_and_judges_imports_no_torch(room: str) -> None:
    for path in sources(room):
        for name in imports(path):
            assert name.partition(".")[0] not in {"torch", "torchvision", "transformers", "timm"}, f"{path}: {name}"


@pytest.mark.smoke
def test_private_interfaces_of_torch_are_imported_in_one_place() -> None:
    for path in ROOT.rglob("*.py"):
        if path.parent.name == "torch_compat":
            continue
        tree = ast.parse(path.read_text())
        chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for name in (*imports(path), *chains):
            first, *rest = name.split(".")
            if first == "torch" and rest[:1] != ["ops"]:
                private = [part for part in rest if part.startswith("_") and not part.startswith("__")]
                assert not private, f"{path} takes {name} from torch itself"


def test_every_file_is_in_a_room() -> None:
    names = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")}
    assert names == {*ROOMS, "__init__", "__main__"}


@pytest.mark.smoke
def test_planning_needs_no_torch() -> None:
    names = ["memfit", *(name.removesuffix(".__init__") for room in WITHOUT_TORCH for name in modules(room))]
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_imports_leave_random_states_as_they_were() -> None:
    """The first `memfit.fit` imports what it needs, also after the user has seeded Python and NumPy."""
    code = (
        "import random, sys, numpy, torch, torch._dynamo, torch.testing\n"
        "before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()\n"
        "import memfit.api, memfit.pipelining.api\n"
        "after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()\n"
        "sys.exit(before != after or 'rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_the_public_names_are_what_the_type_checker_sees() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (typing_only,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname: node.module for node in typing_only.body for alias in node.names}
    assert seen == memfit._MODULE_OF
    assert set(memfit.__all__) == set(seen) <= set(dir(memfit))


def test_public_errors_are_the_errors() -> None:
    from memfit.errors import BudgetError, MemfitError

    assert memfit.BudgetError is BudgetError
    assert all(issubclass(getattr(memfit, name), MemfitError) for name in memfit.__all__ if name.endswith("Error"))
    with pytest.raises(AttributeError, match="no attribute 'fits'"):
        memfit.fits  # noqa: B018


LARGE = [folder for folder in sorted(ROOT.rglob("*")) if folder.is_dir() and len([*folder.glob("*.py")]) > 8]


@pytest.mark.parametrize("folder", LARGE, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_large_folder_tells_what_lives_there_and_which_rooms_it_imports(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert len(text.splitlines()) <= 13
    own = folder.relative_to(ROOT).parts[0]
    names = [name.split(".") for path in folder.rglob("*.py") for name in imports(path)]
    rooms = {name[1] for name in names if name[0] == "memfit" and len(name) > 1} - {own, "__version__"}
    doors = text.rpartition("- **Doors:**")[2]
    assert {room for room in ROOMS if f"`{room}`" in doors} - {own} == rooms


TEST_FILES = sorted(path for path in TESTS.rglob("*.py") if path.parent.name != "scripts")
"""Without the scripts, which run in processes of their own."""


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_tests_import_at_their_top_only_packages_of_the_oldest_environment(path: Path) -> None:
    # The smoke tests run there, and pytest reads every file of tests before it selects some.
    installed = {name for line in CI.splitlines() if "torch==" in line for name in re.findall(r"[a-z]+", line)}
    allowed = {*sys.stdlib_module_names, *installed, "memfit", "tests", "benchmarks"}
    body = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in body:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        assert {name.partition(".")[0] for name in names} <= allowed
