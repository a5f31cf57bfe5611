"""Every block of Python in README and guide runs as it stands, on a small model of the reader's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import memfit

DOCUMENTS = Path(__file__).parent.parent
SMALL = {"224, 224": "8, 8", '"cuda"': '"cpu"', "(2, 4)": "(1, 1)", "num_stages=4": "num_stages=1"}
"""Sizes and devices of the reader's, as small as a test's."""


def blocks(name: str) -> list[tuple[int, str]]:
    """The blocks of Python of a document, with their lines."""
    text = (DOCUMENTS / name).read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text[: match.start()].count("\n") + 1, match[1]) for match in found]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(1))
        self.head = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def readers_names() -> dict[str, Any]:
    """What the guide takes for granted: the reader's model, data and loop."""
    torch.manual_seed(0)
    model = Net()
    x, y = torch.randn(16, 3, 8, 8), torch.randint(10, (16,))
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_fn(output: torch.Tensor, target: torch.Tensor = y) -> torch.Tensor:
        return cross_entropy(output, target)

    def step() -> None:
        loss_fn(model(x)).backward()

    return {
        **{"memfit": memfit, "torch": torch, "cross_entropy": cross_entropy, "model": model, "x": x, "y": y},
        **{"optimizer": optimizer, "loss_fn": loss_fn, "loader": [(x, y)] * 2, "step": step, "make_model": Net},
        "make_loss": lambda n: lambda output: cross_entropy(output, torch.zeros(n, dtype=torch.long)),
    }


def test_the_first_block_of_the_readme_runs_as_it_stands() -> None:
    _, code = blocks("README.md")[0]
    exec(compile(code, "README.md", "exec"), {})


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """A group of one process, for what needs one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("line", "code"), blocks("docs/guide.md"), ids=lambda value: str(value)[:4].strip())
def test_a_block_of_the_guide(
    line: int, code: str, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMFIT_SWAP_DIR", str(tmp_path))
    names = readers_names() | {"init_device_mesh": init_device_mesh, "fully_shard": fully_shard}
    if "plan." in code or "plan," in code:  # it goes on from the block before
        names["plan"] = memfit.plan(names["model"], (names["x"],), budget="1GiB", loss_fn=names["loss_fn"])
    for of_readers, small in SMALL.items():
        code = code.replace(of_readers, small)
    if "max_batch" in code:
        code = code.replace("8GiB", "400KiB")
    if "pipeline" in code:
        code = code.replace("num_microbatches=16", "num_microbatches=4")
    exec(compile("\n" * line + code, "guide.md", "exec"), names)


def test_the_tree_of_the_design_names_each_file_in_its_folder() -> None:
    text = (DOCUMENTS / "docs" / "design.md").read_text()
    tree = text.split("src/memfit/\n", 1)[1].split("tests/ ", 1)[0]
    listed: dict[str, set[str]] = {}
    room = folder = ""
    for line in tree.splitlines():
        begin = re.match(r"( {2}| {4})(\w+)/", line)
        if begin:
            room = begin[2] if len(begin[1]) == 2 else room
            folder = room if len(begin[1]) == 2 else f"{room}/{begin[2]}"
        names = line[19:].split("  ── ")[0].split()
        if begin and len(begin[1]) == 2:
            continue  # its name and a few words
        files = {path.stem for path in (DOCUMENTS / "src" / "memfit" / folder).glob("*.py")}
        if files.intersection(names):
            listed.setdefault(folder, set()).update(name for name in names if not name.endswith("/"))
    assert len(listed) > 15
    for folder, names in listed.items():
        files = {path.stem for path in (DOCUMENTS / "src" / "memfit" / folder).glob("*.py")} - {"__init__"}
        assert names == files, folder
