"""Convolutions and their gradients: the input gradient slice by slice, the weight gradient as a sum.

`convolution_backward` is split into its halves (`memfit.passes.conv_backward_split`); the input gradient alone uses the
input for its shape only.
"""

from __future__ import annotations

import torch

from memfit.ops.batching.axes import rows, rows_beside_shape
from memfit.ops.kernels.conv_weight_gemm import add_weight_product, is_weight_product
from memfit.ops.kernels.convolution import (
    convolution_input_gradient,
    convolution_input_slices,
    input_gradient_beside_stand_in,
)
from memfit.ops.op_rule import Accumulation, Chunks, OpRule
from memfit.ops.rules.convolution_chunks import (
    channel_counts,
    convolution_in_chunks,
    input_gradient_in_chunks,
    input_slices_in_chunks,
    sample_counts,
    weight_gradient_in_chunks,
)
from memfit.ops.rules.convolution_tiles import (
    convolution_tiles,
    input_gradient_tiles,
    input_slices_tiles,
    makes_weight_gradient_only,
    weight_gradient_tiles,
)

__all__ = ["RULES"]

_aten = torch.ops.aten


RULES = {
    _aten.convolution.default: OpRule(
        batch=rows(0),
        tile=convolution_tiles,
        chunks=Chunks(convolution_in_chunks, sample_counts),
        slices_keep_bits=True,
        binding=torch.convolution,
    ),
    _aten.convolution_backward.default: OpRule(
        batch=rows(0, 1, when=makes_weight_gradient_only),
        tile=weight_gradient_tiles,
        chunks=Chunks(weight_gradient_in_chunks, channel_counts),
        sums=frozenset({1, 2}),
        accumulation=Accumulation(add_weight_product, is_weight_product),
    ),
    convolution_input_gradient: OpRule(
        batch=rows_beside_shape(0),
        tile=input_gradient_tiles,
        chunks=Chunks(input_gradient_in_chunks, sample_counts),
        shape_only=(1,),
    ),
    convolution_input_slices: OpRule(
        batch=rows_beside_shape(0),
        tile=input_slices_tiles,
        chunks=Chunks(input_slices_in_chunks, sample_counts),
        shape_only=(1,),
    ),
    input_gradient_beside_stand_in: OpRule(batch=rows_beside_shape(0), tile=input_gradient_tiles, shape_only=(1,)),
}
