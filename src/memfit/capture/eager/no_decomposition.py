"""Keeps calls whole that AOTAutograd would decompose while tracing, where the parts round differently.

memfit asks for no decompositions, but some are part of the ops themselves: under the Python dispatcher, resizing of
images runs as index arithmetic, gathers and sums, and a few losses and activations as formulas. Eager PyTorch runs a
kernel, which has different bits and takes less memory. While a graph is made these Python kernels are disabled, so that
autograd records the kernel and its own backward kernel. Results get the layouts of the kernels' results
(`memfit.capture.eager.fake_strides`), and tensors that are filled at random in place get the numbers of eager mode
(`memfit.capture.eager.random_fills`).

Every such Python kernel of torch's own ops is disabled, not only those that were seen to round differently. A few stay
enabled, because tracing needs them: `_NEEDED`.

Known limits: the ops are shared by the process, so graphs that another thread traces meanwhile keep these calls whole
too.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from functools import lru_cache

import torch

from memfit.capture.eager.backward_autocast import traced_backward
from memfit.capture.eager.composites import composites_of_eager
from memfit.capture.eager.dropout import draws_laid_out
from memfit.capture.eager.fake_strides import strides_of_kernels
from memfit.capture.eager.gradient_fills import fills_in_gradients
from memfit.capture.eager.gradients_on_values import gradients_on_values
from memfit.capture.eager.masked_fills import masked_fills_of_eager
from memfit.capture.eager.quantiles import no_quantiles, quantiles_of_eager
from memfit.capture.eager.random_fills import draws_kept, filled_as_in_eager
from memfit.torch_compat.core import DispatchKey, OpOverload, OpOverloadPacket, enable_python_dispatcher

__all__ = ["as_in_eager", "gradients_of_eager"]

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)

_NEEDED = frozenset(
    (
        # They write statistics and their schemas do not say so.
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        # They look at values: a class count, split positions.
        *("one_hot", "tensor_split"),
        # Fake tensors and functional graphs need them.
        *("to_dense", "empty", "lstm", "gru", "rnn_tanh", "rnn_relu"),
    )
)


_CONTEXTS = (
    strides_of_kernels,
    draws_laid_out,
    composites_of_eager,
    filled_as_in_eager,
    draws_kept,
    gradients_on_values,
    quantiles_of_eager,
    masked_fills_of_eager,
    fills_in_gradients,
    traced_backward,
)
"""Contexts under which some calls are traced as eager PyTorch runs them."""


@contextmanager
def as_in_eager() -> Iterator[None]:
    """While active, calls are traced as the kernels that eager PyTorch runs."""
    with _without_python_kernels(_NEEDED), ExitStack() as around:
        for context in _CONTEXTS:
            around.enter_context(context())
        yield


@contextmanager
def gradients_of_eager() -> Iterator[None]:
    """While active, calls on fake tensors take as much memory as in eager mode, also for gradients, outside of a trace.

    Calls whose memory depends on values raise NotImplementedError.
    """
    with (
        enable_python_dispatcher(),
        _without_python_kernels(frozenset()),
        gradients_on_values(),
        no_quantiles(),
        masked_fills_of_eager(),
    ):
        yield


@contextmanager
def _without_python_kernels(needed: Set[str]) -> Iterator[None]:
    """While active, torch's own ops have no Python kernels, except for the needed ones."""
    aside = [
        (overload, key, overload.py_kernels.pop(key))
        for overload in _overloads(_how_many_known())
        if overload.py_kernels and overload.overloadpacket.__name__ not in needed
        for key in (*_KEYS, *_meta_of_composite(overload))
        if key in overload.py_kernels
    ]
    for overload, _, _ in aside:
        overload._dispatch_cache.clear()
    try:
        yield
    finally:
        for overload, key, kernel in aside:
            overload.py_kernels[key] = kernel
            overload._dispatch_cache.clear()


def _meta_of_composite(overload: OpOverload) -> tuple[DispatchKey, ...]:
    """The meta device if the op consists of other ops: with a kernel of its own there it would have no gradient."""
    composite = overload.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    return (DispatchKey.Meta,) if composite else ()


def _how_many_known() -> int:
    """How many attributes torch's own ops have: attributes are added as overloads are first used, and stay."""
    packets = vars(torch.ops.aten).values()
    return sum(len(vars(packet)) for packet in packets if isinstance(packet, OpOverloadPacket))


@lru_cache(maxsize=1)
def _overloads(known: int) -> tuple[OpOverload, ...]:
    """Torch's own ops that Python code has used or registered kernels for; other ops have no Python kernels."""
    return tuple(
        overload
        for packet in list(vars(torch.ops.aten).values())
        if isinstance(packet, OpOverloadPacket)
        for overload in list(vars(packet).values())
        if isinstance(overload, OpOverload)
    )
