"""The peak of the baseline step, counted while the module, its loss and autograd run on fake tensors.

A graph shows which op reads a tensor last, but Python frees the tensor when its last variable goes, autograd when a
node has run, and the engine adds gradients up as they arrive. A run of the unchanged step on tensors without memory
counts all of that: a dry run of eager PyTorch, as `torch._subclasses.fake_tensor` makes it possible. The workspace of
kernels is measured on samples (`memfit.profiling.sampled_workspace`).

The step runs twice, and the second run counts: tables and masks that a model caches are made in the first run. As in
the measurement of a real step, tensors that the model holds in addition to its parameters and buffers are not counted
once they exist.

A loop may hold the model's outputs in a variable until the backward pass ends, or only until the loss is computed. One
count gives both peaks: outputs that are freed before the end are added up.

Code may ask for values that its inputs decide, such as whether a mask is all ones
(`memfit.capture.eager.known_values`).

Known limits: code that reads other values cannot run on fake tensors, nor is a matrix exponential counted, whose terms
depend on values; then there is no count. Code that writes through NumPy into a tensor that is a plain attribute changes
that tensor. On a GPU, workspaces are unknown, and blocks of the allocator are not rounded up. Another thread that reads
the random state meanwhile is counted too.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.capture.allocation_tracker import LiveBytes, parts_of, tensors_in
from memfit.capture.dynamo.own_calls import own_call
from memfit.capture.eager.fake_kernels import rules_of_kernels
from memfit.capture.eager.fake_strides import strides_of_kernels
from memfit.capture.eager.hidden_fakes import hidden_fake_tensors
from memfit.capture.eager.known_values import KnownValues
from memfit.capture.eager.no_decomposition import gradients_of_eager
from memfit.capture.loss.reading import LossFunction, forward_and_backward
from memfit.capture.state.detached_inputs import detached
from memfit.capture.state.snapshot import preserved
from memfit.profiling.sampled_workspace import SampledWorkspace
from memfit.torch_compat.core import FakeTensor, FakeTensorMode, in_backward_pass, pytree

__all__ = ["BaselinePeak", "counted_step"]

log = logging.getLogger(__name__)

_aten = torch.ops.aten

_BY_VALUES = frozenset((_aten.linalg_matrix_exp.default,))
"""Ops whose memory depends on values: the terms of a matrix exponential on the norm of the matrix."""

_IN_PLACE = frozenset(
    (
        *(_aten.add.Tensor, _aten.scatter.src, _aten.scatter_add.default, _aten.put.default),
        *(_aten.index_put.default, _aten.index_add.default),
    )
)
"""Calls that gradient computation makes under a dispatch mode, and runs in place over the first operand without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselinePeak:
    """The peak of a baseline step, beyond the memory that is in use before the step.

    Attributes:
        step_bytes: peak of a step that frees the outputs once the loss is computed, `loss_fn(model(x)).backward()`.
        outputs_held_bytes: bytes that are added if a variable holds the outputs until the backward pass ends.
        at: the op at the peak; empty if it was measured.
        reads_values: whether the step asked for values that its inputs decide, so that it may take more for others.
        outputs_bytes: bytes of the outputs where no loss is known, so that the peak is one without a loss.
    """

    step_bytes: int
    outputs_held_bytes: int
    at: str = ""
    outputs_bytes: int = 0
    reads_values: bool = False


def counted_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss_fn: LossFunction | None,
    device_type: str,
    *,
    as_eager: bool = True,
    workspaces: bool = True,
    runs: int = 2,
) -> BaselinePeak | None:
    """Peak bytes of one baseline step, and the op at the peak.

    Parameters, buffers, inputs and existing gradients do not count.

    Args:
        model: module in training mode; it stays unchanged.
        args: positional inputs.
        kwargs: keyword inputs.
        loss_fn: the user's loss.
        device_type: only memory of this device type counts.
        as_eager: whether code that asks if its tensors are fake is told that they are not, as in eager mode, and a step
            with an op whose memory depends on values is not counted.
        workspaces: whether the workspaces of kernels count, for which kernels run on samples.
        runs: how often the step runs; the last run counts, and the first counts what a model caches too.

    Returns:
        None where the step cannot run on fake tensors.
    """
    inputs = detached(args, dict(kwargs))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known = KnownValues(mode)
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    try:
        with (
            preserved(model, args, kwargs, loss_fn, values=False),
            own_call(),  # no fitted module in it runs its plan
            rules_of_kernels(),
            strides_of_kernels(),
            gradients_of_eager(),
            hidden_fake_tensors() if as_eager else contextlib.nullcontext(),
        ):
            fakes: dict[str, torch.Tensor] = {name: known.fake(tensor) for name, tensor in held.items()}
            for name, tensor in held.items():
                if tensor.grad is not None:
                    fakes[name].grad = mode.from_tensor(tensor.grad)

            def taken(tensor: torch.Tensor) -> torch.Tensor:
                fake = known.fake(tensor)  # of a tensor that other code computed, it would have that code's graph
                return fake if fake.is_leaf else fake.detach().requires_grad_()

            ours, named = pytree.tree_map_only(torch.Tensor, taken, (inputs.args, inputs.kwargs))

            def step(counter: _BaselineBytes) -> bool:
                def output() -> Any:
                    return counter.hold(torch.func.functional_call(model, fakes, ours, named))

                return forward_and_backward(output, loss_fn, hold_outputs=False) is not None

            workspace = SampledWorkspace()
            for _ in range(runs):
                torch.clear_autocast_cache()  # a region around the step caches casts of weights; a step makes them
                counter = _BaselineBytes(known, device_type, workspace, by_values=not as_eager, asks=workspaces)
                with mode, known, counter, _random_states(counter):
                    has_loss = step(counter)
                for name, tensor in held.items():
                    if tensor.grad is None:
                        fakes[name].grad = None
            held_bytes = counter.held_peak - counter.peak
            return BaselinePeak(
                step_bytes=counter.peak,
                outputs_held_bytes=held_bytes,
                at=counter.at,
                outputs_bytes=0 if has_loss else counter.outputs_bytes,
                reads_values=known.asked,
            )
    except Exception as error:  # code of the user or of torch raised: the peak is unknown
        log.info("the baseline step does not run on fake tensors: %s: %s", type(error).__name__, error)
        return None


class _UncountableError(Exception):
    """The step contains an op whose memory depends on values, so the step is not counted."""


class _BaselineBytes(LiveBytes):
    """Counts as `LiveBytes` does, plus kernel workspace; real tensors that code brings along exist already."""

    def __init__(
        self, known: KnownValues, device_type: str, workspace: SampledWorkspace, *, by_values: bool, asks: bool
    ) -> None:
        super().__init__(device_type)
        self._by_values = by_values
        self._asks = asks
        self._known = known
        self.at = ""
        self._workspace = workspace
        self._reserve_bytes = 0
        self._reserves: dict[int, int] = {}
        self.held_peak = 0  # the peak if the outputs stay
        self._outputs: set[int] = set()
        self.outputs_bytes = 0
        self._freed_output_bytes = 0

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor that code makes without an op of torch."""
        self._count(tensor, set())
        self.peak = max(self.peak, self.live)
        self.held_peak = max(self.held_peak, self.live + self._freed_output_bytes)
        return tensor

    def hold(self, output: Any) -> Any:
        """Notes the storages of the model's output, which is returned."""
        tensors = [t for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) for t in parts_of(leaf)]
        self._outputs = {t.untyped_storage()._cdata for t in tensors} & self._seen.keys()
        self.outputs_bytes = sum(self._seen[key] for key in self._outputs)
        return output

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op; see `LiveBytes`."""
        if func in _BY_VALUES and not self._by_values:
            raise _UncountableError(f"the memory of {func} depends on values")
        kwargs = kwargs or {}
        if not all(isinstance(t, FakeTensor) for t in tensors_in((args, kwargs))):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        before, held_before = self.peak, self.held_peak
        self._reserve_bytes = self._workspace.reserve_of(func, args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if _is_in_place(func, args):
            self.peak, self.held_peak = before, held_before
            return result
        asked = pytree.tree_map_only(torch.Tensor, self._with_its_size, args) if self._reserves else args
        during = self.live + (self._workspace.of_values(func, asked, kwargs, result) if self._asks else 0)
        self.peak = max(self.peak, during)
        self.held_peak = max(self.held_peak, self.peak, during + self._freed_output_bytes)
        self.at = str(func) if self.peak > before else self.at
        return result

    def _nbytes(self, tensor: torch.Tensor) -> int:
        """Bytes of a result; a fused layer's reserve, which is empty as a fake tensor, counts with its real size."""
        if self._reserve_bytes == 0 or tensor.numel() or tensor.dtype is not torch.uint8:
            return super()._nbytes(tensor)
        self._reserves[tensor.untyped_storage()._cdata] = self._reserve_bytes
        return self._reserve_bytes

    def _gone(self, key: int) -> None:
        if key in self._outputs:
            self._outputs.discard(key)
            self._freed_output_bytes += self._seen[key]
        super()._gone(key)

    def _with_its_size(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() or tensor.dtype is not torch.uint8:
            return tensor
        with self._known.mode:
            return torch.empty(self._reserves.get(tensor.untyped_storage()._cdata, 0), dtype=torch.uint8)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._known.fake(tensor)


@contextlib.contextmanager
def _random_states(counter: _BaselineBytes) -> Iterator[None]:
    """While active, copies of the random state count: a checkpoint saves one until it recomputes, 5 KiB on a CPU.

    Neither a mode nor a hook sees them, so the function that copies is replaced, and put back in any case.
    """
    modules = vars(torch), vars(torch.random)
    before = [module["get_rng_state"] for module in modules]

    def counted() -> torch.Tensor:
        return counter.bring(torch.default_generator.get_state())

    for module in modules:
        module["get_rng_state"] = counted
    try:
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module["get_rng_state"] = function


def _is_in_place(func: Any, args: Sequence[Any]) -> bool:
    """Whether autograd writes over the first operand if no mode is active: it adds up and scatters gradients in place.

    If another reference holds that operand, the autograd engine does not add in place, and the next op shows that. A
    view shares its storage with its base, so the engine does not add into a view. A formula of autograd that adds two
    tensors of one shape looks the same, but few formulas do.
    """
    if func not in _IN_PLACE or not in_backward_pass():
        return False
    one, other = args[0], args[1]
    if func is not _aten.add.Tensor:
        return True
    alike = isinstance(other, torch.Tensor) and one.shape == other.shape and one.dtype == other.dtype
    return alike and any(_aten.is_non_overlapping_and_dense.default(t) and not t._is_view() for t in (one, other))
