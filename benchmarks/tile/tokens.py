"""What tiling along tokens is worth: the projection onto a vocabulary with its loss, and a whole language model.

python -m benchmarks.tile.tokens --write
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from benchmarks.report import Report
from memfit.capture.state.snapshot import preserved
from memfit.compiler.driver import plan_profiled
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile
from memfit.errors import BudgetError
from memfit.runtime.executable import compile_program
from memfit.sim.simulator import simulate_baseline
from memfit.tools.training_loop import interleaved_seconds, training_step
from memfit.tools.verify import verify
from memfit.zoo import Example, build

COLUMNS = (
    "model",
    "tokens",
    "budget",
    "fixed MiB",
    "baseline peak MiB",
    "peak MiB",
    "predicted peak MiB",
    "beyond fixed: plain over tiled",
    "plain s",
    "s",
    "over plain",
    "predicted over plain",
    "tensors beyond rounding",
)


class Projection(nn.Module):
    """The end of a language model: each token projected onto the vocabulary, and the mean loss of its next token."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(hidden).flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100)}


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    device = torch.device(options.device)
    report = Report(Path(__file__).with_name("README.md"), write=options.write, device=device)
    table = report.table("Tokens", COLUMNS, keys=3)
    for name in options.only.split(","):
        for tokens in map(int, options.tokens.split(",")):
            for row in _rows(name, tokens, options, device):
                report.add(table, name, str(tokens), *row)
            torch._dynamo.reset()
            gc.collect()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tile.tokens", description=__doc__)
    parser.add_argument("--only", default="projection,gpt2", help="projection or gpt2")
    parser.add_argument("--tokens", default="1024", help="of the one sequence in the batch")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument(
        "--budgets", default="least,8", help="least, or a share: N for an N-th of what plain takes beyond fixed bytes"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="interleaved steps of each that are timed")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    return parser.parse_args(arguments)


def _example(name: str, tokens: int, options: argparse.Namespace, device: torch.device) -> Example:
    width, vocabulary = options.width, options.vocabulary
    if name == "gpt2":
        size = f"n_layer={options.layers}&n_embd={width}&vocab_size={vocabulary}&n_positions={tokens}"
        return build(f"hf:gpt2?{size}&loss_only=true", batch=1, shape=(tokens,), device=device)
    torch.manual_seed(0)
    hidden = torch.randn(1, tokens, width).to(device).requires_grad_()
    labels = torch.randint(0, vocabulary, (1, tokens)).to(device)
    model = Projection(width, vocabulary).to(device)
    return Example(label=name, model=model, args=(hidden, labels), kwargs={}, loss_fn=None)


def _rows(name: str, tokens: int, options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, ...]]:
    example = _example(name, tokens, options, device)
    model, args, kwargs = example.model, tuple(example.args), dict(example.kwargs)
    request = Request(budget="auto", loss_fn=example.loss_fn, levers="all", label=name, tiers="none")
    step = capture_and_profile(model, args, kwargs, request)
    fixed = step[1].static_bytes + step[1].gradient_bytes
    beyond = simulate_baseline(step[1]).peak_bytes - fixed
    for budget in options.budgets.split(","):
        nbytes = 1 if budget == "least" else fixed + int(beyond / float(budget))
        try:
            plan = plan_profiled(model, args, kwargs, step, request, nbytes)
        except BudgetError as error:
            plan = plan_profiled(model, args, kwargs, step, request, error.least_bytes)
        result = verify(model, args, kwargs, plan)
        assert plan.planned is not None
        calls = [model, compile_program(model, plan.planned.capture, plan.program)]
        steps = [training_step(call, model, args, kwargs, loss_fn=example.loss_fn) for call in calls]
        with preserved(model):
            for run in steps:
                run()
            plain, planned = interleaved_seconds(steps, device, repeats=options.repeats)
        yield (
            budget if budget == "least" else f"plain's / {budget}",
            *map(_mib, (fixed, result.plain_peak_bytes, result.peak_bytes, plan.predicted.peak_bytes)),
            f"{(result.plain_peak_bytes - fixed) / (result.peak_bytes - fixed):.1f}",
            *(f"{plain:.3g}", f"{planned:.3g}", f"{planned / plain:.2f}", f"{1 + plan.predicted.overhead:.2f}"),
            str(len(result.differing)),
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


if __name__ == "__main__":
    main()
