"""Perturbs parameters that hold only one number while a plan is proved: they can hide errors of a plan.

Models begin with biases of zero, scales of one, gates and layer scales near zero. A bias that is added in another
order, or a whole branch behind a gate, then does not change a single bit; after the first step of an optimizer it does.
So a proof on such values would hold for the first step only.

*Idea:* mutation of the state rather than of the program: each such parameter is moved by up to `SPREAD`, by the same
numbers each time, for the baseline step and for the planned one. `memfit.capture.state.snapshot` restores the values.
Autocast caches casts of parameters until its region ends, and does not see that values change, so its cache is cleared.

Known limits: only parameters that require gradients, since others stay as they are; not those of sharded modules, nor
parameters without room for a copy. Inputs that hold only one number still hide differences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from memfit.capture.state.snapshot import Snapshot
from memfit.capture.state.tensor import TensorState

__all__ = ["SPREAD", "constant_parameters", "perturb"]

SPREAD = 0.1
"""Large compared to the initial layer scales of 1e-6, small compared to weights of one."""


def constant_parameters(model: nn.Module, state: Snapshot) -> tuple[TensorState, ...]:
    """The parameters of a module that require gradients, hold only one number, and can be restored."""
    learning = {id(p) for p in model.parameters() if p.requires_grad and p.numel()}
    return tuple(s for s in state.tensors if id(s.tensor) in learning and s.copy is not None and _is_constant(s))


def _is_constant(state: TensorState) -> bool:
    if state.alias is None or 0 in state.alias.stride():  # one number in memory may stand for many elements
        return False
    return bool((state.alias == state.alias.reshape(-1)[0]).all())


@torch.no_grad()
def perturb(parameters: Sequence[TensorState]) -> None:
    """Moves each element of `parameters`, by numbers that depend only on the parameter's place and shape."""
    for place, state in enumerate(parameters):
        assert state.alias is not None
        numbers = torch.view_as_real(state.alias) if state.alias.is_complex() else state.alias
        moved = torch.rand(numbers.shape, generator=torch.Generator().manual_seed(place), device="cpu")
        numbers.add_((moved * (2 * SPREAD) - SPREAD).to(numbers))
    if parameters:
        torch.clear_autocast_cache()
