"""Fake results of torch's whole op database lie as the kernels' do, forward and backward, whatever the layout."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memfit.capture.eager.fake_strides import strides_of_kernels
from tests.op_database import samples_of, torchs_ops

MOST_ELEMENTS = 4_000
LAYOUTS = ("channels last", "transposed", "batch inside", "repeated", "sliced", "one, near", "one, far")
MIXED = ("channels last", "transposed", "one, near")
"""Layouts that the first operand also has alone."""
# Matrix algebra, sorting out by value and sparse tensors: what they make has shapes or numbers of its own.
ELSEWHERE = ("linalg", "sparse", "masked", "cholesky", "jiterator", "svd", "lu", "eig", "ormqr", "geqrf", "empty")
ELSEWHERE += ("triangular", "fft", "nested", "pca", "logdet", "qr", "pinverse", "lstsq", "special.")


VIEWS = (torch.ops.aten.view.default,)


def database() -> list[Any]:
    kept = [op for op in torchs_ops() if not any(name in op.name for name in ELSEWHERE)]
    return sorted(kept, key=lambda op: (op.name, op.variant_test_name))


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    found = tensor.detach().clone(memory_format=torch.contiguous_format)
    if layout == "channels last" and found.dim() == 4:
        return found.contiguous(memory_format=torch.channels_last)
    if layout == "transposed" and found.dim() > 1:
        return found.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "batch inside" and found.dim() > 1:
        return found.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "repeated" and found.dim() > 1 and found.shape[0] > 1:
        return found[:1].expand_as(found)
    if layout == "sliced" and found.dim() > 1:
        return torch.cat([found, found], -1)[..., : found.shape[-1]]
    if layout.startswith("one") and found.dim() > 1:
        found = found[:1].clone() if found.dim() != 3 else found[:, :1].clone()
        near = layout == "one, near"
        strides = [1 if n == 1 and near else s for n, s in zip(found.shape, found.stride(), strict=True)]
        return found.as_strided(found.shape, strides)
    return found


def _strides(tensor: Tensor) -> list[int]:
    """Also along axes of one element: kernels look there for whether an image is channels last."""
    return list(tensor.stride()) if tensor.numel() else []


def _faked(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Like the tensor."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, meta, torch.device("cpu"))


class Compared(TorchDispatchMode):
    """Makes each call with fake tensors too and notes where results lie otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: set[str] = set()
        self.ops: set[str] = set()
        self.wrong: dict[str, str] = {}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        is_view = func.is_view and func not in VIEWS
        if func.namespace != "aten" or is_view or any(t.layout is not torch.strided for t in operands):
            return func(*args, **(kwargs or {}))
        told = [(tuple(t.shape), t.stride()) for t in operands]
        others = [v for v in pytree.tree_leaves((args, kwargs)) if not isinstance(v, Tensor)]
        call = str((func, told, [t.dtype for t in operands], others))
        if call in self.tried:
            return func(*args, **(kwargs or {}))
        self.tried.add(call)
        with _disable_current_modes():
            fakes = pytree.tree_map_only(Tensor, functools.partial(_faked, self.mode), (args, kwargs or {}))
        made = func(*args, **(kwargs or {}))
        with _disable_current_modes(), self.mode:
            try:
                faked = func(*fakes[0], **fakes[1])
            except Exception:  # what depends on values has no fake result
                return made
        self.ops.add(str(func))
        for real, fake in zip(pytree.tree_leaves(made), pytree.tree_leaves(faked), strict=False):
            known = isinstance(real, Tensor) and isinstance(fake, Tensor) and real.layout is torch.strided
            if known and (_strides(real), real.dtype) != (_strides(fake), fake.dtype):
                self.wrong.setdefault(str(func), f"{told}: {real.stride()} {real.dtype}, {fake.stride()} {fake.dtype}")
        return made


def calls_of(op: Any, layouts: Sequence[str] = LAYOUTS) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    try:
        samples = list(itertools.islice(samples_of(op, torch.float32, requires_grad=op.supports_autograd), 1))
    except Exception:  # it has none of this dtype
        return
    for sample in samples:
        operands = (sample.input, sample.args, sample.kwargs)
        tensors = [t for t in pytree.tree_leaves(operands) if isinstance(t, Tensor)]
        if not tensors or any(t.layout is not torch.strided or t.numel() > MOST_ELEMENTS for t in tensors):
            continue
        tried: set[Any] = set()
        for layout in ("contiguous", *layouts):
            if layout.startswith("one") and "batch_norm" in op.name:  # it does not look whether its statistics fit
                continue
            for every in (False, True) if layout in MIXED else (layout != "contiguous",):
                first = tensors[0]

                def laid_out(t: Tensor, layout: str = layout, every: bool = every, first: Tensor = first) -> Tensor:
                    made = _laid_out(t, layout) if every or t is first else t.detach()
                    return made.requires_grad_(t.requires_grad)

                made = pytree.tree_map_only(Tensor, laid_out, operands)
                strides = tuple(t.stride() for t in pytree.tree_leaves(made) if isinstance(t, Tensor))
                if strides not in tried:
                    tried.add(strides)
                    yield made


def compared(ops: list[Any]) -> Compared:
    """Runs calls of ops and their backward passes; those that an op does not take are no calls."""
    found = Compared()
    for op in ops:
        for one, args, kwargs in calls_of(op):
            try:
                with found:
                    outputs = [o for o in pytree.tree_leaves(op(one, *args, **kwargs)) if isinstance(o, Tensor)]
                    outputs = [o for o in outputs if o.requires_grad and o.is_floating_point()]
                    leaves = [t for t in pytree.tree_leaves((one, args, kwargs)) if isinstance(t, Tensor)]
                    leaves = [t for t in leaves if t.requires_grad]
                    if outputs:
                        like = [torch.ones_like(o) for o in outputs]
                        torch.autograd.grad(outputs, leaves, like, allow_unused=True)
            except Exception:
                continue
    return found


@pytest.mark.filterwarnings("ignore")
def test_fake_results_lie_as_kernels_do_over_torchs_ops() -> None:
    torch.manual_seed(0)
    with strides_of_kernels():
        found = compared(database())
    assert len(found.ops) > 400 and len(found.tried) > 3_000
    assert not found.wrong, found.wrong
