"""Parameters that are all one number get others while a plan is proved: else they hide what a plan gets wrong.

Models begin with biases of zero, scales of one, gates and layer scales near zero. A bias that is added in another
order, or a whole branch behind a gate, then makes no bit of a difference; after the first step of an optimizer it does.
So a proof on such values would be one for the first step only.

*Idea:* mutation of the state rather than of the program: each such parameter is moved by up to `SPREAD`, by the same
numbers each time, for the plain step and for the planned one. `memfit.capture.state.snapshot` puts the values back.
Autocast keeps casts of parameters until its region ends, and does not see that values change, so its cache is cleared.

Known limits: only parameters that learn, since others stay as they are; not those of sharded modules, nor such that
have no room for a copy. Inputs that are all one number still hide differences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from memfit.capture.state.snapshot import Snapshot
from memfit.capture.state.tensor import TensorState

__all__ = ["SPREAD", "constant_parameters", "perturb"]

SPREAD = 0.1
"""Large against the scales of 1e-6 with which layers begin, small against weights of one."""


def constant_parameters(model: nn.Module, state: Snapshot) -> tuple[TensorState, ...]:
    """The parameters of a module that learn, hold one number only, and can be put back."""
    learning = {id(p) for p in model.parameters() if p.requires_grad and p.numel()}
    return tuple(s for s in state.tensors if id(s.tensor) in learning and s.copy is not None and _is_constant(s))


def _is_constant(state: TensorState) -> bool:
    if state.alias is None or 0 in state.alias.stride():  # one number may lie in memory once
        return False
    return bool((state.alias == state.alias.reshape(-1)[0]).all())


@torch.no_grad()
def perturb(parameters: Sequence[TensorState]) -> None:
    """Moves each element of some parameters, by numbers that depend on the parameter's place and shape only."""
    for place, state in enumerate(parameters):
        assert state.alias is not None
        numbers = torch.view_as_real(state.alias) if state.alias.is_complex() else state.alias
        moved = torch.rand(numbers.shape, generator=torch.Generator().manual_seed(place), device="cpu")
        numbers.add_((moved * (2 * SPREAD) - SPREAD).to(numbers))
    if parameters:
        torch.clear_autocast_cache()
