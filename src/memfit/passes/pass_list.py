"""The passes over a joint graph, by name and in order.

Each pass rewrites the graph in place and keeps its results bit by bit, or with the lever `tile` its gradients up to
rounding. The technique is that of compilers, an ordered list of named passes with a verifier between them (xDSL,
tinygrad, `GraphTransformObserver` in Inductor): `memfit.passes.verifier` looks at the nodes that a pass changed.

Two graphs are made of one trace: the graph that is planned, and that of the baseline step, which gets only the passes
that write down what eager mode runs in place of what AOTAutograd traced.

Known limits: no pass states which passes must run before it; only the order of the list says it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from memfit.ops.kernels.conv_weight_gemm import separate_weight_products
from memfit.passes import (
    batch_norm_split,
    concat_gradients,
    concat_weight_gradients,
    conv_backward_split,
    dropout_split,
)
from memfit.passes.common_subexpressions import merge_repeated
from memfit.passes.cudnn_batch_norm import take_cudnn_batch_norm
from memfit.passes.fused_cross_entropy import rewrite_by_rows
from memfit.passes.group_norm_split import split_group_norm
from memfit.passes.sum_before_cast import sum_before_casting
from memfit.passes.used_views import take_out
from memfit.passes.verifier import changed_nodes, node_states, verify

__all__ = ["PASSES", "Pass", "PassSettings", "run_passes"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """Choices that passes depend on.

    Attributes:
        num_forward_outputs: how many outputs of the joint graph belong to the forward pass.
        separate: whether a weight gradient is made part by part, given its `separable_key`
            (`memfit.passes.concat_weight_gradients`).
        grid: for the lever `tile`, the numbers of tiles into which samples may be cut along height and width, such as
            (4, 1), and the number of parts of the batch, such as (1, 1, 8); without the number of parts, the batch is
            cut as is best for the cache. Gradients are then the same only up to rounding, and ops of both passes can
            run slice by slice not only when they are recomputed. Empty without the lever.
        as_made: whether ops that can add accumulated gradients directly do so (`memfit.ops.accumulation`).
        cast_once: the inputs that autocast casts once (`memfit.capture.eager.cast_weights`).
    """

    num_forward_outputs: int
    separate: Callable[[str], bool]
    grid: tuple[int, ...] = ()
    as_made: bool = False
    cast_once: frozenset[int] = frozenset()


def _always(settings: PassSettings) -> bool:
    return True


def _in_tiles(settings: PassSettings) -> bool:
    return bool(settings.grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A rewrite of the joint graph.

    Attributes:
        name: its name, for messages.
        rewrite: rewrites the graph in place.
        applies: whether it is needed.
        baseline: whether the graph of the baseline step needs it.
        planned: whether the graph that is planned needs it.
    """

    name: str
    rewrite: Callable[[fx.GraphModule, PassSettings], object]
    applies: Callable[[PassSettings], bool] = _always
    baseline: bool = False
    planned: bool = True


PASSES = (
    Pass(name="used views", rewrite=lambda gm, _: take_out(gm), baseline=True),
    Pass(
        name="sum before cast",
        rewrite=lambda gm, s: sum_before_casting(gm, s.num_forward_outputs, s.cast_once),
        baseline=True,
    ),
    Pass(name="common subexpressions", rewrite=lambda gm, _: merge_repeated(gm)),
    Pass(
        name="noise of dropout at once",
        rewrite=lambda gm, _: dropout_split.noise_at_once(gm),
        baseline=True,
        planned=False,
    ),
    Pass(name="dropout masks in bytes", rewrite=lambda gm, _: dropout_split.mask_by_bytes(gm)),
    Pass(name="clones before convolutions", rewrite=lambda gm, _: conv_backward_split.drop_clones(gm)),
    Pass(
        name="convolution backward",
        rewrite=lambda gm, s: conv_backward_split.split_convolution_backward(gm, rounded=bool(s.grid)),
    ),
    Pass(name="slices of a concatenation's gradient", rewrite=lambda gm, _: concat_gradients.separate_input_slices(gm)),
    Pass(name="late slices copied out", rewrite=lambda gm, _: concat_gradients.copy_out_late_slices(gm)),
    Pass(name="masks before unpooling", rewrite=lambda gm, _: conv_backward_split.mask_before_unpooling(gm)),
    Pass(name="shape operands", rewrite=lambda gm, _: conv_backward_split.metadata_only_shape_operands(gm)),
    Pass(name="weight gradients first", rewrite=lambda gm, _: conv_backward_split.hoist_weight_gradients(gm)),
    Pass(
        name="group normalisation",
        rewrite=lambda gm, _: split_group_norm(gm),
        applies=lambda s: max(s.grid[:2], default=1) > 1,
    ),
    Pass(name="batch normalisation", rewrite=lambda gm, _: batch_norm_split.split_batch_norm(gm), applies=_in_tiles),
    Pass(
        name="batch normalisation backward",
        rewrite=lambda gm, _: batch_norm_split.split_batch_norm_backward(gm),
        applies=_in_tiles,
    ),
    Pass(name="dropout", rewrite=lambda gm, _: dropout_split.split_dropout(gm), applies=_in_tiles),
    Pass(name="cross-entropy by rows", rewrite=lambda gm, _: rewrite_by_rows(gm), applies=_in_tiles),
    Pass(name="batch normalisation of cuDNN", rewrite=lambda gm, _: take_cudnn_batch_norm(gm), baseline=True),
    Pass(
        name="weight gradients of concatenations",
        rewrite=lambda gm, s: concat_weight_gradients.separate_weight_gradients(gm.graph, s.separate),
    ),
    Pass(
        name="weight products apart",
        rewrite=lambda gm, _: separate_weight_products(gm.graph),
        # Slices of such a gradient are added to each other.
        applies=lambda s: s.as_made and not s.grid,
    ),
    Pass(name="dead code", rewrite=lambda gm, _: gm.graph.eliminate_dead_code(), baseline=True),
)
"""The passes in their order."""


def run_passes(
    module: fx.GraphModule, settings: PassSettings, *, baseline: bool = False, verifying: bool | None = None
) -> None:
    """Runs the passes that apply.

    Args:
        module: the joint graph, rewritten in place.
        settings: choices that passes depend on.
        baseline: whether the graph is that of the baseline step, where passes only write down what eager mode runs.
        verifying: whether the graph is verified after each pass; by default where debug messages are shown (`-vv`).

    Raises:
        GraphError: if the verifier finds a fault.
    """
    verifying = log.isEnabledFor(logging.DEBUG) if verifying is None else verifying
    for one in PASSES:
        if not (one.baseline if baseline else one.planned) or not one.applies(settings):
            continue
        before = node_states(module.graph) if verifying else {}
        one.rewrite(module, settings)
        if verifying:
            changed = changed_nodes(module.graph, before)
            log.debug("%s: %d of %d nodes changed", one.name, len(changed), len(module.graph.nodes))
            verify(module.graph, changed, one.name)
