"""`micro-batch:N`: the batch in N micro-batches, each with its own forward and backward pass; gradients are added up.

This is gradient accumulation as training loops write it, but exact: the loss sees the whole batch, so its own mean or
sum holds, and weights get one gradient each. Only the outputs of the module are saved, so the forward pass of each
micro-batch is recomputed for its backward pass. The strategy is for comparison: `auto` with the lever `tile` cuts only
the runs of ops where cutting pays, and saves the results that fit.

Known limits: a model with an op that mixes samples is refused; the statistics of batch normalisation are of the whole
batch, so a run of ops on a part of the batch ends there, in both passes.
"""

from __future__ import annotations

from memfit.errors import SpecError
from memfit.ir.graph import Op, Phase, StepGraph
from memfit.ir.program import Program
from memfit.strategies import tile

__all__ = ["program", "slices_of"]


def slices_of(parameter: str) -> int:
    """The number of micro-batches; 0 if the parameter is no such number."""
    return int(parameter) if parameter.isdecimal() and int(parameter) > 1 else 0


def program(graph: StepGraph) -> Program:
    """The program of a step captured for this many micro-batches; ignores the budget.

    Raises:
        SpecError: if an op mixes samples of the batch.
    """
    mixing = _mixing(graph)
    if mixing is not None:
        raise SpecError(
            f"the batch cannot be cut: {mixing.target} in {mixing.module or 'the model'} mixes its samples; "
            'levers="all" cuts it up to there'
        )
    return tile.program(graph)


def _mixing(graph: StepGraph) -> Op | None:
    """The first forward op that reads the whole batch and whose results go to ops that run on samples, or None."""
    samples: set[int] = set()
    constant: set[int] = set()  # for example an attention mask or position embeddings
    mixed: dict[int, Op] = {}
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            break
        slices = op.by_slices
        if constant.issuperset(op.reads if slices is None else slices.reads):
            constant.update(op.writes)
            continue
        if slices is not None and slices.first:
            found = next((mixed[s] for s in op.reads if s in mixed and s in slices.reads), None)
            if found is not None:
                return found
            if any(s in samples and s not in slices.reads for s in op.reads):
                return op
            samples.update(s for s in op.writes if s not in slices.sums)
            continue
        source = next((mixed[s] for s in op.reads if s in mixed), None)
        if source is not None or not samples.isdisjoint(op.reads):
            mixed.update(dict.fromkeys(op.writes, source or op))
    return None
