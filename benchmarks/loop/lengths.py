"""How long the first step of each of 20 input sizes takes, once one size is planned.

python -m benchmarks.loop.lengths --write

Two copies of a model are trained side by side, one of them fitted; weights are compared after each step, and the peak
of another step of each size is counted. The budget is a share of the baseline peak of the longest input.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memfit
from benchmarks.report import Report
from memfit.fitted.installation import fitted_call
from memfit.profiling.memory import allocation_peak
from memfit.torch_compat.core import pytree

HERE = Path(__file__).parent
COLUMNS = (
    *("model", "sizes", "budget", "first plan, s", "second size, s"),
    *("others, median s", "most, s", "planned by", "weights", "peaks within the budget"),
)
SIZES = 20
_SHARE = 0.85
_SHARES = {"ResNet-18, images": 1.1}
"""Some smaller images take more memory than the largest: oneDNN copies them into padded layouts."""

_VOCABULARY = 1000
_IMAGES = 16

Batch = tuple[tuple[Any, ...], dict[str, Any]]
Subject = tuple[nn.Module, Callable[[int], Batch], Callable[[Any], Tensor], list[int]]


def _texts(length: int, rows: int = 4) -> dict[str, Any]:
    words = torch.randint(0, _VOCABULARY, (rows, length))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}


def _lengths(longest: int) -> list[int]:
    """The longest length first, then others in random order."""
    others = random.Random(0).sample(range(longest // 4, longest), SIZES - 1)
    return [longest, *others]


def gpt2(layers: int) -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=256, n_head=4, vocab_size=_VOCABULARY, n_positions=256, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), lambda n: ((), _texts(n)), lambda out: out.loss, _lengths(128)


def llama() -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=_VOCABULARY,
    )  # fmt: skip
    return LlamaForCausalLM(config), lambda n: ((), _texts(n)), lambda out: out.loss, _lengths(128)


def bert() -> Subject:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, vocab_size=_VOCABULARY
    )
    return BertForMaskedLM(config), lambda n: ((), _texts(n)), lambda out: out.loss, _lengths(128)


def resnet() -> Subject:
    from torchvision.models import resnet18

    def batch(size: int) -> Batch:
        return (torch.randn(_IMAGES, 3, size, size),), {}

    def loss(output: Tensor) -> Tensor:
        return F.cross_entropy(output, torch.arange(_IMAGES))

    return resnet18(), batch, loss, _lengths(112)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "GPT-2, 2 layers": lambda: gpt2(2),
    "GPT-2, 6 layers": lambda: gpt2(6),
    "Llama, 4 layers": llama,
    "BERT, 4 layers": bert,
    "ResNet-18, images": resnet,
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, loss: Callable[[Any], Tensor]) -> float:
    torch.manual_seed(0)
    begin = time.perf_counter()
    loss(model(*batch[0], **batch[1])).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begin


def peak_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, loss: Callable[[Any], Tensor]) -> int:
    """Peak of one more step, whose changes of buffers are undone."""
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
    there = [*model.parameters(), *model.buffers(), *state, *pytree.tree_leaves(batch)]
    buffers = [buffer.clone() for buffer in model.buffers()]
    more_bytes = allocation_peak(lambda: loss(model(*batch[0], **batch[1])).backward())
    optimizer.zero_grad()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in there if isinstance(t, Tensor)}
    return sum(held.values()) + more_bytes


def row(name: str) -> tuple[str, ...]:
    torch.manual_seed(0)
    model, batch, loss, sizes = SUBJECTS[name]()
    models = model.train(), copy.deepcopy(model).train()
    optimizers = [torch.optim.AdamW(one.parameters()) for one in models]
    args, kwargs = batch(sizes[0])
    estimate = memfit.estimate(model, args, kwargs, loss_fn=loss, optimizer=optimizers[0])
    budget = int(_SHARES.get(name, _SHARE) * estimate.peak)
    memfit.fit(models[1], budget=budget, optimizer=optimizers[1], loss_fn=loss, plain=False)
    more: list[float] = []
    equal = within = True
    for size in sizes:
        torch.manual_seed(size)
        example = batch(size)
        plain, fitted = (step(m, o, example, loss) for m, o in zip(models, optimizers, strict=True))
        more.append(fitted - plain)
        pairs = zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True)
        equal = equal and all(torch.equal(a, b) for a, b in pairs)
        within = within and peak_bytes(models[1], optimizers[1], example, loss) <= budget
    plans = fitted_call(models[1]).plans.values()
    carried = sum(plan.planned is not None and not plan.planned.is_measured for plan in plans)
    first, second, *others = more
    return (
        name, str(len(sizes)), f"{budget / 2**20:.0f} MiB", f"{first:.1f}", f"{second:.1f}",
        f"{statistics.median(others):.2f}", f"{max(others):.2f}", f"{carried} carried over",
        "equal" if equal else "DIFFERENT", "all" if within else "NOT ALL",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    report = Report(HERE / "README.md", write=args.write, device=torch.device("cpu"))
    table = report.table("First step of each of 20 sizes", COLUMNS)
    for name in SUBJECTS:
        if args.only in name:
            report.add(table, *row(name))


if __name__ == "__main__":
    main()
