"""What a user would pick instead of memfit, each applied to a model the way its documentation shows.

- checkpoint per block, and `checkpoint_sequential` with k segments where the model is a sequence;
- selective checkpointing of each block, which saves the results of the named kinds of op;
- torch's partitioner with an activation memory budget, run without code generation (`aot_eager`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from memfit.capture.call_settings import CallSettings
from memfit.capture.dynamo.compiled_call import call_by_dynamo
from memfit.tools.sequential_pipeline import GPTEmbedding
from memfit.zoo.gpt import GPT

__all__ = ["Rival", "rivals_of"]

_aten = torch.ops.aten

_SAVED: dict[str, tuple[Any, ...]] = {
    "convolutions": (_aten.convolution.default,),
    "matmuls": (_aten.mm.default, _aten.addmm.default, _aten.bmm.default),
    "attention": (
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        # With dropout there is no fused attention on a CPU; its softmax is what it has of its own.
        _aten._safe_softmax.default,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """One alternative.

    Attributes:
        name: for people.
        model: a copy of the model, changed as the alternative asks for.
        call: runs it.
    """

    name: str
    model: nn.Module
    call: Callable[..., Any]


def rivals_of(model: nn.Module) -> Iterator[Rival]:
    """Every alternative that can be applied to a model, made when it is asked for.

    Args:
        model: a torchvision network or a `memfit.zoo.gpt.GPT`; stays as it is.
    """
    yield _per_block("checkpoint per block", model, {})
    for k in range(2, min(9, 1 + len(_units(model)))):
        twin = copy.deepcopy(model)
        units = nn.Sequential(*_units(twin))
        yield Rival(name=f"checkpoint_sequential {k}", model=twin, call=partial(_in_segments, units, k))
    for kinds in _kinds(model):
        saved = [op for kind in kinds for op in _SAVED[kind]]
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, saved)}
        yield _per_block(f"selective, saves {' and '.join(kinds)}", model, contexts)
    for tenth in range(1, 10):
        twin = copy.deepcopy(model)
        yield Rival(name=f"activation_memory_budget {tenth / 10}", model=twin, call=_Partitioned(twin, tenth / 10))


class _Partitioned:
    """A compiled call under an activation memory budget."""

    def __init__(self, model: nn.Module, budget: float) -> None:
        self._budget = budget
        self._compiled = call_by_dynamo(model, lookup_backend("aot_eager"), CallSettings(fullgraph=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=self._budget):
            return self._compiled(*args, **kwargs)


def _per_block(name: str, model: nn.Module, options: dict[str, Any]) -> Rival:
    twin = copy.deepcopy(model)
    for block in _blocks(twin):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    return Rival(name=name, model=twin, call=twin)


def _in_segments(units: nn.Sequential, segments: int, x: Tensor) -> Any:
    return checkpoint_sequential(units, segments, x, use_reentrant=False)


def _kinds(model: nn.Module) -> Sequence[tuple[str, ...]]:
    if isinstance(model, GPT):
        return [("matmuls",), ("attention",), ("matmuls", "attention")]
    return [("convolutions",)]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """What people wrap: residual units, the children of a trunk, transformer layers."""
    if isinstance(model, GPT):
        return list(model.blocks)
    trunk = getattr(model, "features", None)
    if isinstance(trunk, nn.Sequential):
        return list(trunk)
    stages = [model.get_submodule(f"layer{n}") for n in range(1, 5)]
    return [block for stage in stages for block in stage.children()]


def _units(model: nn.Module) -> list[nn.Module]:
    """The whole model as a sequence whose parts can be cut apart anywhere."""
    blocks, part = _blocks(model), model.get_submodule
    if isinstance(model, GPT):
        return [GPTEmbedding(model), *blocks, _Head(model)]
    if hasattr(model, "features"):
        pool = part("avgpool") if hasattr(model, "avgpool") else nn.AdaptiveAvgPool2d(1)
        return [*blocks, nn.Sequential(pool, nn.Flatten(), part("classifier"))]
    stem = nn.Sequential(part("conv1"), part("bn1"), part("relu"), part("maxpool"))
    return [stem, *blocks, nn.Sequential(part("avgpool"), nn.Flatten(), part("fc"))]


class _Head(nn.Module):
    """What a GPT does after its layers."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(x))
        return y
