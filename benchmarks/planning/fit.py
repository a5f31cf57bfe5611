"""Seconds of `memfit.fit`, of this checkout and of another one, in turns.

python -m benchmarks.planning.fit --against DIR --rounds 3

Each measurement is a process of its own that begins with nothing imported; measured costs are known from the first
round on, which is dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
_SHARE, _SEARCH_SECONDS = 0.9, 0.5


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout; by default none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measured()))
        return
    trees = [HERE, *([options.against.resolve()] if options.against else [])]
    rounds = [[_of(tree) for tree in trees] for _ in range(options.rounds + 1)][1:]
    print("| model | `fit` s | before s | ratio |\n| --- | --- | --- | --- |")
    for name in rounds[0][0]:
        seconds = [statistics.median(one[place][name] for one in rounds) for place in range(len(trees))]
        ratio = statistics.median(one[0][name] / one[-1][name] for one in rounds)
        before = f"{seconds[1]:.1f} | {ratio:.2f}" if len(trees) > 1 else " | "
        print(f"| {name} | {seconds[0]:.1f} | {before} |")


def _of(tree: Path) -> dict[str, float]:
    """Seconds by model, of one checkout's code."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure"]
    paths = {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured() -> dict[str, float]:
    """Seconds of `fit` by model, at a share of the baseline peak or, where that does not fit, at the least budget."""
    import torch
    import torchvision
    from torch import nn
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    import memfit

    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
    ids = torch.randint(0, 200, (4, 64))
    tokens, image = {"input_ids": ids, "labels": ids}, torch.randn(2, 3, 64, 64)
    subjects: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]] = {
        "BERT, 6 layers": (BertForMaskedLM(BertConfig(num_hidden_layers=6, **sizes)), (), tokens),
        "Llama, 6 layers": (LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, use_cache=False, **sizes)), (), tokens),
        "ResNet-50": (torchvision.models.resnet50(num_classes=10), (image,), {}),
    }
    seconds = {}
    for name, (model, args, kwargs) in subjects.items():
        model.train()
        loss_fn = None if kwargs else _square
        budget = int(memfit.estimate(model, args, kwargs, loss_fn=loss_fn).peak * _SHARE)
        begin = time.perf_counter()
        try:
            memfit.fit(model, args, kwargs, budget=budget, loss_fn=loss_fn, plain=False, search_seconds=_SEARCH_SECONDS)
        except memfit.BudgetError as error:
            least = error.least_bytes
            memfit.fit(model, args, kwargs, budget=least, loss_fn=loss_fn, plain=False, search_seconds=_SEARCH_SECONDS)
        seconds[name] = time.perf_counter() - begin
    return seconds


def _square(output: object) -> object:
    return output.square().mean()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
