"""The script of each page on a trainer trains the weights that it trains without its lines of memfit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit

PAGES = Path(__file__).parent.parent / "docs" / "trainers"
TRAINED = ("transformers", "trl", "lightning", "accelerate", "keras", "loop")


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)


def without_memfit(code: str) -> str:
    return "".join(line for line in code.splitlines(keepends=True) if "memfit" not in line.lower())


def trained(code: str, name: str) -> list[Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, name, "exec"), names)
    model = names["model"]
    tensors = [w.value for w in model.weights] if hasattr(model, "weights") else [*model.state_dict().values()]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("page", TRAINED)
def test_the_weights_are_those_without_memfit(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    code = blocks(page)[0]
    plain = without_memfit(code)
    assert plain.count("\n") <= code.count("\n") - 2
    assert all(map(torch.equal, trained(code, f"{page}.md"), trained(plain, f"{page}.md")))
    assert not any("a gradient arrived for an output" in line for line in told)  # the loss is known from the start


def test_further_lines_on_the_trainer_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, attached, batch = blocks("transformers")
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(without_memfit(first).replace("trainer.train()\n", ""), "transformers.md", "exec"), names)
    for code in (attached, batch):
        exec(compile(code.replace("256", "8"), "transformers.md", "exec"), names)
    assert type(names["trainer"].callback_handler.callbacks[0]).__name__ == "MemfitCallback"
    arguments = names["trainer"].args
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 8


def test_a_policy_in_a_configuration_of_torchtitan() -> None:
    from memfit.integrations.torchtitan import BudgetAC

    names: dict[str, Any] = {}
    exec(compile(blocks("torchtitan")[0], "torchtitan.md", "exec"), names)
    policy = names["llama3_within_a_budget"]().activation_checkpoint.build()
    assert isinstance(policy, BudgetAC) and policy.config.budget == "40GiB"


def test_each_page_is_in_the_list() -> None:
    listed = re.findall(r"\]\((\w+)\.md\)", (PAGES / "README.md").read_text())
    assert sorted(listed) == sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "README")
    assert memfit.fit
