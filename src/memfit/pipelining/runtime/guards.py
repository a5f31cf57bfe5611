"""Properties on which a pipeline's plan depends and which a caller may change between two steps.

Stages run without Dynamo, so without its guards. Therefore each step compares the properties that the model's code may
read: its modules and parameters, frozen parameters, hooks, training mode, plain attributes such as a dropout's
probability, autocast. A changed model is planned again.

Known limits: values inside lists and dicts of a module, and globals, are not compared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["pipeline_signature"]

_PLAIN = (bool, int, float, str, type(None))
_OWN = frozenset({dict, OrderedDict, set})  # types of attributes that every module has, skipped quickly
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def pipeline_signature(model: nn.Module, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Properties that must be equal for a plan to be used for another step.

    Args:
        model: the module.
        leaves: the inputs of a step.
    """
    inputs = tuple((tuple(t.shape), t.stride(), t.dtype) if isinstance(t, torch.Tensor) else t for t in leaves)
    device = next((t.device.type for t in leaves if isinstance(t, torch.Tensor)), "cpu")
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    modules = list(model.modules())
    parameters = tuple(
        (id(p), p.requires_grad, bool(p._backward_hooks), bool(p._post_accumulate_grad_hooks))
        for module in modules
        for p in module._parameters.values()
        if p is not None
    )
    return inputs, autocast, tuple(map(_of_module, modules)), parameters


def _of_module(module: nn.Module) -> tuple[Any, ...]:
    """Properties of one module. Written for speed: a network has hundreds of modules, a step may take milliseconds."""
    attributes = vars(module)
    plain = [item for item in attributes.items() if type(item[1]) not in _OWN and isinstance(item[1], _PLAIN)]
    hooks = [len(attributes[name]) for name in _HOOKS if name in attributes]
    return id(module), tuple(plain), tuple(hooks)
