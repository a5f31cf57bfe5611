"""Outputs that the loss does not use: cut from the gradient, with recomputation if a gradient arrives after all.

AOTAutograd gives zeros to a differentiable output that receives no gradient: for the logits of a language model that
returns its own loss, these zeros are the largest tensor of the step. The plan cuts such outputs. If the training loop
differentiates a cut output after all, the gradient would silently be missing.

Idea: recompute the whole graph as `torch.utils.checkpoint` recomputes a region, but only in this case. A cut output
keeps an autograd edge to the node that runs the graph backward, so its gradient is known before that node runs. The
node then recomputes the graph's forward pass as plain code, from the same inputs and random state, and differentiates
all outputs at once, so that autograd sums in eager's order. Later calls are planned with all outputs.

An input that the graph reads and then overwrites, such as the running statistics of a normalisation, is copied before
the run.

Known limits: a graph whose other inputs have changed, or which adds gradients to existing ones, cannot be recomputed.
This is an error. The copies are in the measured peak, not in the predicted one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfit.capture.dynamo.dynamo_graph import attach_outputs, copied
from memfit.errors import PlanMismatchError
from memfit.fxir.alias_analysis import overwritten_inputs
from memfit.fxir.joint import JointReading
from memfit.ir.graph import Phase
from memfit.runtime.loop.gradient_terms import Parts, Terms, collect_terms

__all__ = ["Begun", "WholeGraph", "whole_graph", "with_anchor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGraph:
    """A graph with cut outputs.

    Attributes:
        call: runs the graph as plain code with no output cut; None if the graph cannot run a second time.
        random: whether the graph draws random numbers.
        cut: positions of the outputs that were cut.
        kept: positions of the inputs that the graph reads and overwrites.
    """

    call: Callable[..., Any] | None
    random: bool
    cut: tuple[int, ...]
    kept: tuple[int, ...] = ()


def whole_graph(gm: fx.GraphModule, cut: Sequence[int], reading: JointReading, *, aligned: bool) -> WholeGraph:
    """Record of a graph with cut outputs.

    Args:
        gm: Dynamo's graph.
        cut: positions of the outputs that were cut.
        reading: the reading of its joint graph.
        aligned: whether the backward pass returns a gradient for each input of Dynamo's graph.
    """
    forward = [op for op in reading.ops if op.phase is Phase.FORWARD]
    used = {*reading.output_storages, *(s for op in forward for s in op.reads)}
    once = {s for op in forward if not op.recomputable and used & {*op.writes} for s in op.reads}
    overwritten = once & overwritten_inputs(reading.module.graph, reading.storage_of)
    inputs = reading.module.graph.find_nodes(op="placeholder")[: len(gm.graph.find_nodes(op="placeholder"))]
    kept = [place for place, node in enumerate(inputs) if reading.storage_of.get(node) in overwritten]
    share_memory = len({reading.storage_of[inputs[place]] for place in kept}) < len(kept)
    whole = copied(gm) if aligned and not reading.accumulated and not share_memory else None
    if whole is not None:
        attach_outputs(whole, cut)
    return WholeGraph(
        call=None if whole is None else whole.forward,
        random=any(op.random for op in forward),
        cut=tuple(cut),
        kept=() if whole is None else tuple(kept),
    )


@dataclass(slots=True, eq=False)
class Begun:
    """A run of a graph with cut outputs, and the inputs and random states that recompute it.

    Attributes:
        whole: the graph.
        inputs: inputs of the run.
        versions: versions of the inputs that are tensors, before the run.
        after: the same versions, after the run.
        random_before: a CPU generator in the state before the run, None if the graph draws no random numbers; a Python
            object, so its 5 KiB do not count as tensor memory.
        cuda_states: state of each GPU's generator.
        autocast: by device type, the autocast dtype; None where autocast was off.
        kept: copies of the inputs that the graph reads and overwrites, by position.
    """

    whole: WholeGraph
    inputs: tuple[Any, ...]
    versions: tuple[int, ...]
    after: tuple[int, ...]
    random_before: torch.Generator | None
    cuda_states: tuple[torch.Tensor, ...]
    autocast: Mapping[str, torch.dtype | None]
    kept: Mapping[int, torch.Tensor]

    @classmethod
    def now(cls, whole: WholeGraph, inputs: tuple[Any, ...]) -> Begun:
        """Records the state right before the run."""
        devices = {"cpu"} | {t.device.type for t in inputs if isinstance(t, torch.Tensor)} - {"meta"}
        on = {d: torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in devices}
        before = torch.default_generator.clone_state() if whole.random else None
        cuda_states = tuple(torch.cuda.get_rng_state_all()) if whole.random and "cuda" in devices else ()
        kept = {place: inputs[place].detach().clone() for place in whole.kept}
        return cls(whole, inputs, _versions(inputs), (), before, cuda_states, on, kept)

    def done(self) -> None:
        """Records the versions right after the run."""
        self.after = _versions(self.inputs)

    def can_recompute(self) -> bool:
        """Whether the graph can run a second time, and its inputs are unchanged."""
        versions = zip(self.versions, self.after, _versions(self.inputs), strict=True)
        return self.whole.call is not None and not any(before == after != now for before, after, now in versions)

    def gradients(
        self, arrived: Mapping[int, torch.Tensor], *, in_autocast: bool, apart: Collection[int] = ()
    ) -> tuple[tuple[torch.Tensor | None, ...], Terms]:
        """The gradient of each input from all outputs that got a gradient, by plain autograd.

        Args:
            arrived: gradients by output.
            in_autocast: whether the backward pass runs inside the region of the forward pass.
            apart: places of the inputs whose gradients are wanted use by use.

        Returns:
            The gradients, and the terms of those that are wanted use by use.

        Raises:
            PlanMismatchError: if the graph cannot be recomputed.
        """
        call = self.whole.call
        if call is None or not self.can_recompute():
            raise PlanMismatchError(
                "a gradient arrived for an output that the loss given to memfit does not use, and the forward pass "
                "cannot be recomputed for it, since its inputs were overwritten; "
                "pass the loss you really use, memfit.fit(..., loss_fn=...)"
            )
        written = [before != after for before, after in zip(self.versions, self.after, strict=True)]
        leaves = [
            self._leaf(place, is_overwritten=overwritten) if isinstance(value, torch.Tensor) else value
            for place, (value, overwritten) in enumerate(zip(self.inputs, written, strict=True))
        ]
        with torch.enable_grad(), self._as_before():
            outputs = call(*leaves)
        terms = collect_terms((outputs[place] for place in arrived), leaves, apart)
        wanted = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        with self._region() if in_autocast else contextlib.nullcontext():
            found = torch.autograd.grad(
                [outputs[place] for place in arrived],
                [leaves[i] for i in wanted],
                list(arrived.values()),
                allow_unused=True,
            )
        made = dict(zip(wanted, found, strict=True))
        parts = {
            place: Parts(of, (whole.data_ptr(), whole._version))
            for place, of in terms.items()
            if (whole := made.get(place)) is not None and whole.layout is torch.strided
        }
        return tuple(made.get(i) for i in range(len(leaves))), parts

    def _leaf(self, place: int, *, is_overwritten: bool) -> torch.Tensor:
        """An input as it was before the run; the run may overwrite it again if it did before."""
        before = self.kept.get(place, self.inputs[place]).detach()
        leaf: torch.Tensor = before.clone() if is_overwritten else before
        return leaf.requires_grad_(self.inputs[place].requires_grad)

    @contextlib.contextmanager
    def _region(self) -> Iterator[None]:
        with contextlib.ExitStack() as around:
            for device, dtype in self.autocast.items():
                around.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
            yield

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        with contextlib.ExitStack() as around:
            around.enter_context(self._region())
            if self.random_before is not None:
                cuda = list(range(len(self.cuda_states)))
                around.enter_context(torch.random.fork_rng(cuda, enabled=True))
                torch.set_rng_state(self.random_before.get_state())
                for index, state in enumerate(self.cuda_states):
                    torch.cuda.set_rng_state(state, index)
            yield


class _Anchored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor, arrive: Callable[[torch.Tensor], None]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.arrive = arrive
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if gradient is not None:  # zeros are a gradient: optimizers decay weights whose gradient is zeros, not None
            ctx.arrive(gradient)
        return None, None, None


def with_anchor(output: torch.Tensor, anchor: torch.Tensor, arrive: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """A cut output with an edge to the node that made `anchor`; `arrive` gets its gradient before that node runs."""
    anchored: torch.Tensor = _Anchored.apply(output, anchor, arrive)
    return anchored


def _versions(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(v._version if isinstance(v, torch.Tensor) and not v.is_inference() else 0 for v in values)
