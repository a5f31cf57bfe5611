"""A model from the user's own file: `train.py:make_model`, `train.py:make_model?width=64`.

The factory gets the arguments for which it has parameters: `batch`, `shape`, `dtype`, `device`, `seed` and the options
after the `?`. It returns a module, `(module, args)`, `(module, args, kwargs)` or a whole `Example`; the file can import
modules from its own folder.

Known limits: the returned model and inputs are moved to the device and otherwise used unchanged; the factory must set
dtype and train mode.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import SpecError
from memfit.torch_compat.core import pytree
from memfit.zoo.example import Example, Request, as_text, random_batch
from memfit.zoo.query import unknown

__all__ = ["make"]


def make(request: Request) -> Example:
    """Runs a factory of a Python file.

    Args:
        request: `name` is `path/to/file.py:factory`.

    Raises:
        SpecError: if there is no such file or function, an option is not one of its parameters, or it returns something
            other than described above. Errors of the user's code pass through.
    """
    path, _, name = request.name.rpartition(":")
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise SpecError(f"there is no such file; check the path (file: {str(file)!r}, spec: {request.name!r})")
    with _importable(file.parent):
        factory = _find(file, name)
        made = factory(**_arguments(request, factory))
    example = _as_example(request, made)
    return dataclasses.replace(
        example,
        model=example.model.to(request.device),
        args=_to(example.args, request.device),
        kwargs=_to(example.kwargs, request.device),
        label=example.label or _label(request, example.args),
    )


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _find(file: Path, name: str) -> Callable[..., object]:
    module_name = f"memfit_spec_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    found: object = getattr(module, name, None)
    if not callable(found):
        raise unknown(f"function of {file.name}:", name, functions)
    return found


def _arguments(request: Request, factory: Callable[..., object]) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for key in request.options:
        if key not in parameters and not takes_all:
            raise unknown(f"option of {request.title}", key, list(parameters))
    asked = {key: getattr(request, key) for key in ("batch", "shape", "dtype", "device", "seed")}
    return {key: value for key, value in asked.items() if key in parameters} | dict(request.options)


def _as_example(request: Request, made: object) -> Example:
    match made:
        case Example():
            return made
        case nn.Module():
            inputs = () if request.shape is None else (random_batch(request, request.shape),)
            return Example(model=made, args=inputs)
        case (nn.Module() as model, tuple() | list() as args):
            return Example(model=model, args=tuple(args))
        case (nn.Module() as model, tuple() | list() as args, dict() as kwargs):
            return Example(model=model, args=tuple(args), kwargs=kwargs)
    got = f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__
    raise SpecError(
        f"{request.title} returned {got}; return a module, (module, args), (module, args, kwargs) or a "
        "memfit.zoo.Example, where args is a tuple and kwargs a dict"
    )


def _to(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


def _label(request: Request, args: tuple[Any, ...]) -> str:
    first = next((arg for arg in args if isinstance(arg, Tensor)), None)
    if first is None:
        return request.title
    return f"{request.title} · {as_text(first.shape)} {str(first.dtype).removeprefix('torch.')}"
