"""The parameters that each process holds: gradients of shared parameters, the whole model's state, freed memory.

A parameter that stages of several processes use (tied weights) has a copy in each of these processes. After a step, its
gradients are added in the order in which the unpipelined backward pass produces them, from the last stage to the first,
and all copies get the sum, so that all copies stay equal under the same optimizer.

Known limits: for parameters that stages share, gradients accumulated over several steps are set aside during each step,
and a gradient that is not contiguous is copied to be sent; this memory is not planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from memfit.distributed import process_group as processes
from memfit.pipelining.partition.stages import Stage

__all__ = ["SharedStates", "share_out"]

_AT_ONCE_BYTES = 1 << 20
"""Size of the chunks in which a shared parameter's gradient is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStates:
    """The processes that hold each parameter and buffer.

    Attributes:
        holders: for each parameter and buffer that a stage uses, the processes of its stages, in the order of stages.
        several: names of the parameters and buffers that several stages use.
        before: their gradients from before the current step.
        group: the processes of the pipeline; None for all.
    """

    holders: Mapping[str, tuple[int, ...]]
    several: frozenset[str] = frozenset()
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    group: dist.ProcessGroup | None = None

    def begin(self, model: nn.Module) -> None:
        """Sets gradients of shared parameters aside, so that stages add up the gradients of this step alone."""
        for name, parameter in self._shared(model):
            if parameter.grad is not None:
                self.before[name], parameter.grad = parameter.grad, None

    def drop_gradients(self, model: nn.Module) -> int:
        """Drops gradients of shared parameters, as before a step without earlier gradients; returns their bytes."""
        nbytes = 0
        for _, parameter in self._shared(model):
            nbytes += 0 if parameter.grad is None else parameter.grad.untyped_storage().nbytes()
            parameter.grad = None
        return nbytes

    def give_back(self, model: nn.Module) -> None:
        """After a failed step: restores the gradients of shared parameters from before it."""
        for name, parameter in self._shared(model):
            parameter.grad = self.before.pop(name, None)

    def add_gradients(self, model: nn.Module) -> None:
        """Adds gradients of shared parameters over their processes, then the gradients from before this step."""
        for name, parameter in self._shared(model):
            if len(self.holders[name]) > 1 and processes.world_size(self.group) > 1:
                self._add(parameter, self.holders[name])
            before = self.before.pop(name, None)
            if before is not None:
                parameter.grad = before.add_(parameter.grad) if parameter.grad is not None else before

    def keep_own(self, model: nn.Module) -> None:
        """Frees the memory of parameters that only other processes use; the parameters keep their shape."""
        if processes.world_size(self.group) == 1:
            return
        for name, parameter in model.named_parameters():
            if name in self.holders and processes.rank(self.group) not in self.holders[name]:
                parameter.grad = None
                parameter.data = parameter.data.new_empty(()).expand(parameter.shape)

    def restore(self, model: nn.Module) -> None:
        """Gives every process all parameters and buffers again."""
        for name, tensor in _tensors(model).items():
            if name not in self.holders or processes.world_size(self.group) == 1:
                continue
            source = self.holders[name][0]
            if processes.rank(self.group) not in self.holders[name]:
                tensor.data = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            data = tensor.data.contiguous()
            dist.broadcast(data, group=self.group, group_src=source)
            if data.data_ptr() != tensor.data.data_ptr():
                tensor.data.copy_(data)

    def gathered(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The state of the whole model, on every process."""
        first = {id(tensor): name for name, tensor in reversed(_tensors(model).items())}
        found: dict[str, torch.Tensor] = {}
        sent: dict[str, torch.Tensor] = {}
        for key, tensor in model.state_dict(keep_vars=True).items():
            name = first.get(id(tensor), key)
            if name not in self.holders or processes.world_size(self.group) == 1:
                found[key] = tensor.detach()
                continue
            if name not in sent:
                here = processes.rank(self.group) in self.holders[name]
                sent[name] = (
                    tensor.detach().contiguous()
                    if here
                    else torch.empty_like(tensor, memory_format=torch.contiguous_format)
                )
                dist.broadcast(sent[name], group=self.group, group_src=self.holders[name][0])
            found[key] = sent[name]
        return found

    def load(self, model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        """Loads the tensors that this process holds from a whole model's state.

        Raises:
            RuntimeError: if names or shapes differ.
        """
        own = model.state_dict(keep_vars=True)
        wrong = sorted(set(own) ^ set(state)) or [k for k in own if own[k].shape != state[k].shape]
        if wrong:
            raise RuntimeError(f"the state is not one of {type(model).__name__}: {', '.join(wrong[:5])} differ")
        first = {id(tensor): name for name, tensor in reversed(_tensors(model).items())}
        with torch.no_grad():
            for key, tensor in own.items():
                holders = self.holders.get(first.get(id(tensor), key))
                if holders is None or processes.rank(self.group) in holders or processes.world_size(self.group) == 1:
                    tensor.copy_(state[key])

    def _shared(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Parameters that several stages use, at least one of them in this process."""
        here = processes.rank(self.group)
        return [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
            and name in self.several
            and (here in self.holders[name] or processes.world_size(self.group) == 1)
        ]

    def _add(self, parameter: nn.Parameter, holders: Sequence[int]) -> None:
        """Sums from the last holder to the first, and sends the sum back; in chunks, as no memory is planned for it."""
        place = holders.index(processes.rank(self.group))
        total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = total = total.contiguous()
        parts = total.view(-1).split(max(1, _AT_ONCE_BYTES // total.element_size()))
        room = torch.empty_like(parts[0])
        for part in parts:
            if place + 1 < len(holders):
                later = room[: len(part)]
                dist.recv(later, group=self.group, group_src=holders[place + 1])
                part.copy_(later.add_(part))
            if place > 0:
                dist.send(part, group=self.group, group_dst=holders[place - 1])
                dist.recv(part, group=self.group, group_src=holders[place - 1])
            if place + 1 < len(holders):
                dist.send(part, group=self.group, group_dst=holders[place + 1])


def share_out(
    stages: Sequence[Stage], device_of: Mapping[int, int], group: dist.ProcessGroup | None = None
) -> SharedStates:
    """The processes that hold each parameter and buffer, given the device of each stage."""
    holders: dict[str, dict[int, None]] = {}
    for stage in stages:
        for name in stage.states:
            holders.setdefault(name, {})[device_of[stage.index]] = None
    uses = [name for stage in stages for name in stage.states]
    return SharedStates(
        holders={name: tuple(devices) for name, devices in holders.items()},
        several=frozenset(name for name in holders if uses.count(name) > 1),
        group=group,
    )


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
