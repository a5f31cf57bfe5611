"""A model by one string, with a batch to train it on.

Benchmarks, tests, the command line and bug reports all name a model by the same kind of string:

- `torchvision:resnet50`, `timm:vit_small_patch16_224`, `hf:gpt2`: a model of another package, random weights;
- `zoo:unet`: a model of this package;
- `train.py:make_model`: a model of the user;
- `hf:gpt2?n_layer=6&n_embd=256`: any of them with options.

Nothing is downloaded, and torchvision, timm and transformers are imported when a spec first needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType

import torch

from memfit.errors import MemfitError, SpecError
from memfit.zoo import from_file, from_hf, from_timm, from_torchvision, own
from memfit.zoo.example import Example, Request
from memfit.zoo.query import parse_query, unknown

__all__ = ["Example", "build"]

_SOURCES: Mapping[str, Callable[[Request], Example]] = MappingProxyType(
    {
        "file": from_file.make,
        "hf": from_hf.make,
        "timm": from_timm.make,
        "torchvision": from_torchvision.make,
        "zoo": own.make,
    }
)


def build(
    spec: str,
    *,
    batch: int,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Example:
    """Builds a model, one batch of inputs and a loss.

    Weights, inputs and labels depend on the seed alone, not on the device; torch's random state stays unchanged.

    Args:
        spec: the model to build, as described above.
        batch: samples in the batch.
        shape: of one sample: (C, H, W) for images, (C, T, H, W) for videos, (T,) for tokens; `None` for the
            model's own.
        dtype: of parameters, buffers and floating inputs.
        device: device of the parameters, buffers and inputs; `"meta"` builds shapes without memory.
        seed: of weights, inputs and labels.

    Returns:
        The example, with the model in train mode.

    Raises:
        SpecError: if nothing can be built from the spec; the message has similar known names.
    """
    source, name, query = _split(spec)
    request = Request(
        title=f"{source} {spec.partition(':')[2]}" if source != "file" else spec,
        name=name,
        options=MappingProxyType(parse_query(query)),
        batch=_positive("batch", batch),
        shape=None if shape is None else tuple(_positive("shape", size) for size in shape),
        dtype=_floating(dtype),
        device=_device(device),
        seed=seed,
    )
    on_meta = torch.device("meta") if request.device.type == "meta" else nullcontext()
    with _seeded(seed), on_meta, nullcontext() if source == "file" else _refusals(request.title):
        return _SOURCES[source](request)


def _split(spec: str) -> tuple[str, str, str]:
    """Source, name and options of a spec; the name of a file spec is `file.py:factory`."""
    address, _, query = spec.partition("?")
    path, _, factory = address.rpartition(":")
    if path.endswith(".py") and factory:
        return "file", address, query
    if address.endswith(".py"):
        raise SpecError(f"say which function makes the model, such as {address}:make_model (spec: {spec!r})")
    source, _, name = address.partition(":")
    if not name:
        sources = ", ".join(sorted(_SOURCES.keys() - {"file"}))
        raise SpecError(f"a spec is file.py:factory or source:name with a source of {sources} (spec: {spec!r})")
    if source not in _SOURCES.keys() - {"file"}:
        raise unknown("source", source, _SOURCES.keys() - {"file"})
    return source, name, query


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds only the CPU generator, from which all random numbers here come, and restores its state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def _refusals(title: str) -> Iterator[None]:
    """Adds the spec to the error when a library refuses an option or a shape."""
    try:
        yield
    except MemfitError:
        raise
    except (AssertionError, ImportError, TypeError, ValueError) as error:
        raise SpecError(f"cannot build {title}; change its options or the shape: {error}") from error


def _positive(what: str, size: int) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise SpecError(f"sizes are whole numbers from 1 on ({what}: {size!r})")
    return size


def _floating(dtype: torch.dtype) -> torch.dtype:
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise SpecError(f"parameters are floating, such as torch.float32 or torch.bfloat16 (dtype: {dtype!r})")
    return dtype


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise SpecError(f"torch knows no such device; write 'cpu', 'cuda' or 'meta' (device: {device!r})") from error
