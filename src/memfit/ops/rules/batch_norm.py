"""Batch normalisation: it mixes samples in its statistics only; once they are known, it is pointwise.

Its recomputation must not update the running statistics a second time (`memfit.ops.recompute`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.ops.batching.axes import rows
from memfit.ops.kernels import batch_norm as kernels
from memfit.ops.op_rule import Chunks, OpRule
from memfit.ops.tiling.same_tile import same_tile

__all__ = ["RULES"]

_aten = torch.ops.aten


def _without_data_gradient(call: fx.Node | Call) -> bool:
    """A kernel for all gradients mixes samples; for those of weight and bias alone it adds up over the samples."""
    return not cast(Sequence[bool], call.args[-1])[0]


def _values(node: fx.Node) -> list[torch.Tensor]:
    return [cast(fx.Node, a).meta["val"] for a in node.args[:2]]


def _chunk_counts(node: fx.Node) -> tuple[int, ...]:
    gradient, data = _values(node)
    return (kernels.chunks_of(data),) if kernels.takes_channels(node.args, gradient, data) else ()


def _takes_statistics_first(node: fx.Node, position: int) -> bool:
    result = node.meta["val"][0]
    return bool(result.device.type == "cpu" and result.dtype is torch.float32)


def _runs_by_channels(node: fx.Node, position: int) -> bool:
    return kernels.takes_channels(node.args, *_values(node))  # the kernel on the whole tensor writes to new memory


RULES = {
    _aten._native_batch_norm_legit_functional.default: OpRule(
        recompute_as=_aten.native_batch_norm.default,
        in_place={0: kernels.forward_over_input},
        in_place_if=_takes_statistics_first,
    ),
    _aten.native_batch_norm.default: OpRule(
        recompute_as=_aten.native_batch_norm.default, binding=torch.native_batch_norm
    ),
    _aten.miopen_batch_norm.default: OpRule(recompute_as=_aten.miopen_batch_norm.default),
    kernels.cudnn_batch_norm: OpRule(recompute_as=kernels.cudnn_batch_norm),
    kernels.cudnn_batch_norm_updating: OpRule(recompute_as=kernels.cudnn_batch_norm),
    _aten.native_batch_norm_backward.default: OpRule(
        batch=rows(0, 1, when=_without_data_gradient),
        tile=same_tile(0, 1, when=_without_data_gradient),
        chunks=Chunks(kernels.backward_in_chunks, _chunk_counts),
        sums=frozenset({1, 2}),
        in_place={0: kernels.backward_over_gradient, 1: kernels.backward_over_data},
        in_place_if=_runs_by_channels,
    ),
    kernels.normalise: OpRule(
        batch=rows(0),
        tile=same_tile(0),
        slices_keep_bits=True,
        in_place={0: kernels.normalise_over_data},
    ),
    kernels.sums_of_data: OpRule(batch=rows(0), tile=same_tile(0), sums=frozenset({0})),
    kernels.input_gradient_from_sums: OpRule(
        batch=rows(0, 1),
        tile=same_tile(0, 1),
        in_place={1: kernels.input_gradient_over_data},
    ),
}
