"""Memory that an optimizer will hold from its second step on, and temporary memory of its step.

State is created at the end of the first step, so a profile of one step misses it. The user's optimizer is only read.
The bytes that it holds are found in this order:

1. its own state, for the parameters that have some;
2. a fresh optimizer of the same class (`memfit.capture.optimizer.fresh`) steps on fake parameters (of distributed
   parameters: on fake shards); nothing is allocated. An optimizer that reads numbers from tensors (Adafactor: the norm
   of an update) reads ones there;
3. an optimizer that looks at values in another way or has custom kernels cannot run on fake tensors; then a fresh
   optimizer steps on small real parameters, and each state tensor is scaled by the dimensions that it shares with its
   parameter;
4. the caller states the bytes: a number stands for an optimizer.

L-BFGS holds flat copies of all parameters and evaluates the model within its step; a formula gives its memory.

Known limits: state that grows with the number of steps counts with its size after two steps; parameters that never
receive a gradient count as if they received one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.capture.allocation_tracker import LiveBytes
from memfit.capture.distributed.fsdp import local
from memfit.capture.dynamo.own_calls import own_call
from memfit.capture.optimizer.fresh import all_optimizers, fresh_optimizer, hooks_aside, stepper, steps_apart
from memfit.capture.optimizer.unwrapped import OptimizerLike, stated_bytes, unwrapped_optimizer
from memfit.errors import SpecError
from memfit.torch_compat.core import FakeTensorMode, TorchDispatchMode, pytree

__all__ = ["OptimizerCost", "OptimizerPart", "optimizer_cost", "part_of", "trained_bytes"]

log = logging.getLogger(__name__)

_PRIMES = (2, 3, 5, 7, 11, 13)
_SMALL_NUMEL = 64
_MOST_READS = 50
"""Numbers that an optimizer may read from fake tensors for each parameter, in all the steps that it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """`state_bytes` stay between steps; `step_bytes` exist while `step()` runs.

    `by_parameter` gives, by the identity of a parameter, the part of the state that belongs to it alone.
    """

    state_bytes: int = 0
    step_bytes: int = 0
    by_parameter: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPart:
    """An optimizer, restricted to some of its parameters.

    Attributes:
        optimizer: the whole optimizer; a number states its bytes.
        parameters: the identities of these parameters.
        share: the fraction of a stated number that belongs to these parameters.
    """

    optimizer: OptimizerLike
    parameters: frozenset[int]
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Bytes of state by parameter identity, of shared state, and of a step; `exact` if found on fake tensors."""

    by_parameter: Mapping[int, int]
    shared_bytes: int = 0
    step_bytes: int = 0
    exact: bool = False


def optimizer_cost(optimizer: OptimizerLike | OptimizerPart | OptimizerCost | None, device_type: str) -> OptimizerCost:
    """Predicts the memory of an optimizer, which is neither stepped nor changed.

    Args:
        optimizer: an optimizer or a wrapper of one; bytes, as a number or a string; None costs nothing.
        device_type: only state on this device type counts.

    Returns:
        Bytes of state (existing state included) and of the step's temporaries.

    Raises:
        SpecError: if it is no optimizer, or its memory cannot be predicted; its state can then be stated in bytes.
    """
    if optimizer is None or isinstance(optimizer, OptimizerCost):
        return optimizer or OptimizerCost()
    part = optimizer if isinstance(optimizer, OptimizerPart) else None
    of = unwrapped_optimizer(part.optimizer if part else optimizer)
    if not hasattr(of, "param_groups"):
        return OptimizerCost(state_bytes=int(stated_bytes(of) * (part.share if part else 1.0)))
    trained = _trained(of, part)
    if not trained:
        return OptimizerCost()
    if isinstance(of, torch.optim.LBFGS):
        return _of_lbfgs(of, trained)
    real = _held(of, [p for group in of.param_groups for p in group["params"]], device_type)
    missing = [p for p in trained if id(p) not in real.by_parameter]
    with own_call():  # the steps of its copies are not those of the loop
        predicted = _predicted(of, trained, device_type, needed=bool(missing))
    coming = {id(p) for p in (trained if predicted.exact else missing)}
    by_parameter = {id(p): real.by_parameter.get(id(p), 0) for p in trained}
    for key in by_parameter.keys() & coming:
        by_parameter[key] = max(by_parameter[key], predicted.by_parameter.get(key, 0))
    return OptimizerCost(
        state_bytes=sum(by_parameter.values()) + max(real.shared_bytes, predicted.shared_bytes),
        step_bytes=predicted.step_bytes,
        by_parameter=by_parameter,
    )


def part_of(optimizer: OptimizerLike, parameters: Sequence[torch.Tensor], whole_bytes: int = 0) -> OptimizerPart:
    """The optimizer, restricted to some of its parameters, as an argument for `optimizer_cost`.

    Args:
        optimizer: the whole optimizer, which does not change, or its bytes.
        parameters: the parameters of the part.
        whole_bytes: bytes of all its parameters, in proportion to which a stated number is divided.
    """
    mine = sum(p.nbytes for p in parameters if p.requires_grad)
    share = mine / whole_bytes if whole_bytes else 1.0
    return OptimizerPart(optimizer=optimizer, parameters=frozenset(map(id, parameters)), share=share)


def trained_bytes(optimizer: OptimizerLike, everything: Sequence[torch.Tensor]) -> int:
    """Bytes of the parameters that the optimizer trains; if it is a number, of all given parameters that train."""
    of = unwrapped_optimizer(optimizer)
    parameters = _trained(of, None) if hasattr(of, "param_groups") else [p for p in everything if p.requires_grad]
    return sum(p.numel() * p.element_size() for p in parameters)


def _trained(optimizer: Any, part: OptimizerPart | None) -> list[torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return [p for p in parameters if part is None or id(p) in part.parameters]


def _predicted(optimizer: Any, trained: Sequence[torch.Tensor], device_type: str, *, needed: bool) -> _Found:
    """Memory of a fresh optimizer: its state, and the temporaries of its step.

    Raises:
        SpecError: if the memory cannot be found and is needed.
    """
    reasons: list[str] = []
    for ones, closure in ((False, False), (False, True), (True, False), (True, True)):
        try:
            return _on_fakes(optimizer, trained, device_type, closure=closure, ones=ones)
        except Exception as error:  # a user's optimizer may raise anything
            reasons.append(_told(error))
    log.info("%s cannot step on fake tensors: %s", type(optimizer).__name__, reasons[0])
    for closure, sparse in ((False, False), (True, False), (False, True)):
        try:
            found = _on_small(optimizer, trained, closure=closure, sparse=sparse)
        except Exception as error:
            reasons.append(_told(error))
            continue
        if needed:
            log.warning(
                "the state of %s is estimated from its steps on small tensors, as it cannot step on fake ones (%s); "
                "what its step takes for a moment is not counted; optimizer='1.5GiB' states what it holds",
                *(type(optimizer).__name__, reasons[0]),
            )
        return found
    if not needed:
        log.info("what %s takes for a moment is unknown: %s", type(optimizer).__name__, reasons)
        return _Found(by_parameter={})
    raise SpecError(
        f"cannot tell what {type(optimizer).__name__} will hold: a fresh one cannot be made or stepped "
        f"({reasons[0]}; on small tensors: {reasons[-1]}); state the bytes of its state, optimizer='1.5GiB', or "
        "plan when it has stepped once"
    )


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


class _ReadsOnes(TorchDispatchMode):
    """While active, numbers read from tensors are ones, so that a step which scales by them can run.

    A truth value is not answered: it may skip a parameter and its state. Nor are more numbers than a step needs: code
    that searches until a number is small would never end. Both then fail, as on fake tensors without this mode.
    """

    def __init__(self, most_reads: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = most_reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is not torch.bool and self._left > 0:
            self._left -= 1
            return 1.0 if args[0].dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


def _on_fakes(
    optimizer: Any, trained: Sequence[torch.Tensor], device_type: str, *, closure: bool, ones: bool
) -> _Found:
    wanted = {id(p) for p in trained}
    reading = _ReadsOnes(_MOST_READS * (1 + len(trained))) if ones else contextlib.nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True), reading, hooks_aside():
        fakes: dict[int, torch.Tensor] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in wanted and p.requires_grad:
                    continue  # of another part
                held = local(p)
                fake = torch.empty_strided(tuple(held.shape), held.stride(), dtype=p.dtype, device=p.device)
                fakes[id(p)] = _stand_in(p, fake, None if id(p) not in wanted else torch.empty_like(fake))
        made = fresh_optimizer(optimizer, fakes)
        receiving = [fakes[id(p)] for p in trained]
        step = stepper(made, receiving, closure=closure)
        step_bytes = 0
        with LiveBytes(device_type) as counter:
            step()
            for _ in range(steps_apart(made)):
                counter.peak = counter.live
                step()
                step_bytes = max(step_bytes, counter.peak - counter.live)
            found = _held(made, list(fakes.values()), device_type)
    real = {id(fake): key for key, fake in fakes.items()}
    by_parameter = {real[key]: nbytes for key, nbytes in found.by_parameter.items()}
    return _Found(by_parameter=by_parameter, shared_bytes=found.shared_bytes, step_bytes=step_bytes, exact=True)


def _on_small(optimizer: Any, trained: Sequence[torch.Tensor], *, closure: bool, sparse: bool) -> _Found:
    """Steps on parameters with few elements; dimensions that a state shares with its parameter count in full size."""
    small: dict[int, torch.Tensor] = {}
    for p in trained:
        device = "cpu" if p.is_meta else p.device
        tensor = torch.ones(_small_shape(local(p)), dtype=p.dtype, device=device)
        small[id(p)] = _stand_in(p, tensor, torch.ones_like(tensor).to_sparse() if sparse else torch.ones_like(tensor))
    with hooks_aside():
        made = fresh_optimizer(optimizer, small)
        step = stepper(made, list(small.values()), closure=closure)
        for _ in range(1 + steps_apart(made)):
            step()
    by_parameter = {}
    for p in trained:
        states = [of.state.get(small[id(p)], {}) for of in all_optimizers(made)]
        tensors = {id(t): t for t in pytree.tree_leaves(states) if isinstance(t, torch.Tensor)}.values()
        here = [t for t in tensors if t.device == small[id(p)].device]
        by_parameter[id(p)] = sum(_scaled_bytes(t, small[id(p)], local(p)) for t in here)
    return _Found(by_parameter=by_parameter)


def _stand_in(parameter: torch.Tensor, tensor: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """A tensor in a parameter's place, with a gradient and the attributes that users set on the parameter."""
    for name, value in getattr(parameter, "__dict__", {}).items():
        if isinstance(value, bool | int | float | str):
            setattr(tensor, name, value)
    if parameter.requires_grad:
        tensor.requires_grad_()
        tensor.grad = gradient
    return tensor


def _small_shape(real: torch.Tensor) -> tuple[int, ...]:
    if real.numel() <= _SMALL_NUMEL:
        return tuple(real.shape)
    primes = iter(_PRIMES)
    return tuple(size if size < _PRIMES[-1] else next(primes, 1) for size in real.shape)


def _scaled_bytes(state: torch.Tensor, small: torch.Tensor, real: torch.Tensor) -> int:
    """Bytes of a parameter's state tensor if the parameter has its real dimensions instead of the small ones."""
    if state.numel() == small.numel() > 1:
        return real.numel() * state.element_size()
    sizes = dict(zip(small.shape, real.shape, strict=True))
    numel = 1
    for size in state.shape:
        numel *= sizes.get(size, size)
    return numel * state.element_size()


def _held(optimizer: Any, parameters: Sequence[torch.Tensor], device_type: str) -> _Found:
    """Bytes that an optimizer and its inner optimizers hold in addition to parameters and gradients."""
    seen = {_storage(t) for p in parameters for t in (p, p.grad) if t is not None}
    keys = {id(p) for p in parameters}

    def nbytes(values: object) -> int:
        total = 0
        for value in pytree.tree_leaves(values):
            if not isinstance(value, torch.Tensor) or value.device.type != device_type:
                continue
            total += _new_bytes(value, seen)
        return total

    by_parameter: dict[int, int] = {}
    shared = 0
    everyone = all_optimizers(optimizer)
    for state in {id(of.state): of.state for of in everyone}.values():
        for key, value in state.items():
            if not any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(value)):
                continue
            if id(key) in keys:
                by_parameter[id(key)] = by_parameter.get(id(key), 0) + nbytes(value)
            else:
                shared += nbytes(value)
    for of in everyone:
        shared += nbytes([v for name, v in vars(of).items() if name not in ("state", "param_groups", "defaults")])
    return _Found(by_parameter=by_parameter, shared_bytes=shared)


def _storage(tensor: torch.Tensor) -> int:
    held = local(tensor)
    return id(tensor) if held.layout is not torch.strided else held.untyped_storage()._cdata


def _new_bytes(tensor: torch.Tensor, seen: set[int]) -> int:
    """Bytes of a tensor's memory unless it was seen before."""
    held, key = local(tensor), _storage(tensor)
    if key in seen:
        return 0
    seen.add(key)
    if held.layout is not torch.strided:
        parts = (held._indices(), held._values()) if held.layout is torch.sparse_coo else ()
        return sum(p.numel() * p.element_size() for p in parts)
    return int(held.untyped_storage().nbytes())


def _of_lbfgs(optimizer: torch.optim.LBFGS, trained: Sequence[torch.Tensor]) -> OptimizerCost:
    """Memory of L-BFGS in flat copies of the parameters: the history of its changes, and the tensors that `step` holds.

    The step evaluates the model, so tensors that the step holds meanwhile count as state: direction, gradient, previous
    gradient, and the direction's first form; with a line search also the parameters and gradients that bound the
    search.
    """
    flat_bytes = sum(local(p).numel() * p.element_size() for p in trained)
    group = optimizer.param_groups[0]
    meanwhile = 4 if group["line_search_fn"] is None else 10
    return OptimizerCost(
        state_bytes=(2 * int(group["history_size"]) + meanwhile) * flat_bytes, step_bytes=2 * flat_bytes
    )
