"""Options that several commands share, and functions that turn their values into models and optimizers.

Torch is imported when such a function is called, so that `memfit --help` answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from memfit.errors import SpecError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memfit.zoo import Example

__all__ = [
    "add_budget",
    "add_levers",
    "add_model",
    "add_output",
    "add_strategy",
    "add_tiers",
    "build_example",
    "example_of_size",
    "optimizer_factory",
    "whole_number",
    "whole_numbers",
    "words",
]

_MODEL = """\
torchvision:resnet50, timm:vit_small_patch16_224, hf:gpt2, zoo:unet, or your own file.py:factory;
options after a question mark: 'hf:gpt2?n_layer=6'"""
_OPTIMIZERS = {
    "sgd": ("SGD", {"lr": 0.01}),
    "momentum": ("SGD", {"lr": 0.01, "momentum": 0.9}),
}
"""Class of `torch.optim` and arguments of some names. Any other name is a class of `torch.optim` with its defaults."""


def add_model(parser: argparse.ArgumentParser, *, batch: bool = True) -> None:
    """Adds MODEL, `--shape`, `--dtype`, `--device` and `--optimizer`.

    Args:
        parser: parser of the command.
        batch: whether to add `--batch` too, as one number.
    """
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    if batch:
        parser.add_argument(
            "--batch", type=whole_number, default=8, metavar="N", help="samples in a batch (default: 8)"
        )
    parser.add_argument(
        "--shape",
        type=whole_numbers,
        metavar="C,H,W",
        help="of one sample: 3,224,224 or 128 (default: the model's own)",
    )
    parser.add_argument("--dtype", default="float32", help="of parameters and floating inputs (default: float32)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 (default: cpu)")
    parser.add_argument(
        "--optimizer",
        default="none",
        metavar="NAME",
        help="none, sgd, momentum, adam, adamw or any class of torch.optim; its state counts (default: none)",
    )


def add_budget(parser: argparse.ArgumentParser, *, required: bool = True, plain: bool = True) -> None:
    """Adds `--budget`.

    Args:
        parser: parser of the command.
        required: whether the option must be given.
        plain: whether the help text mentions budgets such as `40%plain`.
    """
    text = "peak of the whole step: bytes, 8GiB, 8GB, 60%% (of the device), auto (what is free)"
    if plain:
        text += ", or 40%%plain (of the baseline step's predicted peak)"
    parser.add_argument("--budget", required=required, metavar="BYTES", help=text)


def add_strategy(parser: argparse.ArgumentParser) -> None:
    """Adds `--strategy`, as one name."""
    parser.add_argument("--strategy", default="auto", metavar="NAME", help="auto, or a known strategy (default: auto)")


def add_tiers(parser: argparse.ArgumentParser) -> None:
    """Adds `--tiers`."""
    parser.add_argument(
        "--tiers",
        metavar="NAME,...",
        help="where tensors may be swapped: disk, host (CUDA), host:4GiB,disk, none (default: host on CUDA)",
    )


def add_levers(parser: argparse.ArgumentParser) -> None:
    """Adds `--levers`."""
    parser.add_argument(
        "--levers",
        default="bitwise",
        choices=("bitwise", "all"),
        help="bitwise: the same bits; all: tiles too, the same gradients up to rounding (default: bitwise)",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds `--json` and `--csv`; without a path, their value is `-`."""
    for kind in ("json", "csv"):
        parser.add_argument(
            f"--{kind}",
            nargs="?",
            const="-",
            metavar="PATH",
            help=f"write {kind.upper()} to a file, without PATH to stdout (put it after MODEL)",
        )


def build_example(args: argparse.Namespace, batch: int, *, device: str | None = None) -> Example:
    """Builds the model of the command line, with one batch of inputs.

    Args:
        args: parsed options of `add_model`.
        batch: samples in the batch.
        device: device of the model and the inputs; None for that of `--device`.

    Returns:
        The model, its inputs and its loss.

    Raises:
        SpecError: if an option is invalid, or the model cannot be built.
    """
    import torch

    from memfit import zoo

    dtype = getattr(torch, args.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SpecError(f"torch has no such dtype; write float32, bfloat16 or float64 (dtype: {args.dtype!r})")
    where = device or args.device
    if where.startswith("cuda") and not torch.cuda.is_available():
        raise SpecError(f"this torch sees no CUDA device; use --device cpu (device: {where!r})")
    return zoo.build(args.model, batch=batch, shape=args.shape, dtype=dtype, device=where)


def example_of_size(args: argparse.Namespace, batch: int, size: int) -> Example:
    """Builds the model of the command line as `build_example` does, with samples of a given size.

    Args:
        args: parsed options of `add_model`; unchanged when the function returns.
        batch: samples in the batch.
        size: length of each axis of a sample after the first, such as height and width of an image in pixels; for
            samples with one axis, its length, such as a number of tokens.

    Returns:
        The model, its inputs and its loss.

    Raises:
        SpecError: as `build_example`.
    """
    import torch

    from memfit.torch_compat.core import pytree

    given = args.shape
    try:
        example = build_example(args, batch) if given is None else None
        found = pytree.tree_leaves((example.args, example.kwargs)) if example is not None else []
        shape = given or next(tuple(t.shape[1:]) for t in found if isinstance(t, torch.Tensor))
        args.shape = (shape[0], *(size,) * (len(shape) - 1)) if len(shape) > 1 else (size,)
        return build_example(args, batch)
    finally:
        args.shape = given


def optimizer_factory(name: str) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None:
    """Returns a function that makes an optimizer from parameters.

    Args:
        name: `none`, a name of `_OPTIMIZERS` or a class of `torch.optim`, in upper or lower case.

    Returns:
        The function; None for `none`. It raises `SpecError` if the optimizer cannot be made from these parameters.

    Raises:
        SpecError: if there is no such optimizer.
    """
    import torch

    from memfit.zoo.query import unknown

    if name.lower() == "none":
        return None
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    class_name, options = _OPTIMIZERS.get(name.lower(), (name, {}))
    found: Any = classes.get(class_name.lower())
    if found is None:
        raise unknown("optimizer", name, ["none", *_OPTIMIZERS, *classes])

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            made: torch.optim.Optimizer = found(list(parameters), **options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SpecError(f"cannot make {found.__name__} for these parameters: {error}") from error
        return made

    return make


def whole_number(text: str) -> int:
    """Parses a whole number.

    Raises:
        ArgumentTypeError: if the number is less than 1.
        ValueError: if the text is not a whole number; argparse reports both errors to the user.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on is needed, not {text}")
    return value


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parses whole numbers that are separated by commas or `x`.

    Raises:
        ArgumentTypeError: as `whole_number`.
        ValueError: as `whole_number`.
    """
    return tuple(whole_number(part) for part in text.replace("x", ",").split(","))


def words(text: str) -> tuple[str, ...]:
    """Splits text at commas; empty words are left out."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))
