"""Ops that can run in chunks, one chunk after the other, with the same bits as the whole op.

The rules of an op say in how many chunks it may run and how (`memfit.ops.op_rule`): convolutions
(`memfit.ops.rules.convolution_chunks`) and the backward pass of batch normalisation (`memfit.ops.kernels.batch_norm`).

The profiler measures each variant on each shape and offers only variants with the same bits as the whole op
(`memfit.profiling.benchmark`); the planner chooses among them (`memfit.planner.finalize.variant_selection`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from memfit.fxir.call import Call
from memfit.ops.registry import rule_of

__all__ = ["call_in_chunks", "candidate_chunks"]


def candidate_chunks(node: fx.Node | Call) -> tuple[int, ...]:
    """Numbers of chunks in which a node could run, in addition to whole; empty if it runs whole only.

    Args:
        node: an op of the joint graph.

    Returns:
        Numbers above 1, to be tried by the profiler.
    """
    chunks = rule_of(node.target).chunks
    return () if chunks is None else chunks.candidates(node)


def call_in_chunks(target: Any) -> Callable[..., Any]:
    """The function that runs `target` in chunks; it takes the same arguments, and `chunks` by name."""
    chunks = rule_of(target).chunks
    assert chunks is not None
    return chunks.call
