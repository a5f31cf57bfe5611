"""Cost of one call on the device, measured alone on made-up operands.

A call is measured whole, in chunks (`memfit.ops.chunking`), which count only if their bits are those of the whole, and
over an operand (`memfit.passes.conv_backward_split`), which avoids touching fresh memory.
`memfit.profiling.slice_benchmark` measures it slice by slice.

Known limits: an op that cannot run on made-up operands (`memfit.profiling.synthetic_inputs`) is priced by roofline.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from msgspec import structs
from torch import fx

from memfit.errors import CaptureError
from memfit.fxir.call import Call
from memfit.fxir.module_names import module_of
from memfit.fxir.signature import tensors_of
from memfit.ir.graph import Variant
from memfit.ops.accumulation import adding
from memfit.ops.chunking import call_in_chunks, candidate_chunks
from memfit.ops.kernels.convolution import convolution_input_gradient, convolution_input_slices
from memfit.ops.kernels.library import direct
from memfit.ops.registry import rule_of
from memfit.passes.concat_gradients import Cuts
from memfit.passes.concat_weight_gradients import operands_of_data
from memfit.profiling.one_run import equal, measured, timed
from memfit.profiling.roofline import roofline_seconds
from memfit.profiling.synthetic_inputs import operand_values, operands_of

__all__ = ["Costs", "costs_added", "recompute_costs", "costs_of", "variants_of", "whole_if_separable"]

log = logging.getLogger(__name__)

_aten = torch.ops.aten
_SHORT_SECONDS = 2e-3
_REPEATS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of a call, for each variant.

    Attributes:
        variants: whole, then in chunks; empty if the call gives other bits than the call that it would replace.
        in_slices: see `costs_in_slices`; empty if the call does not run in slices.
        in_place: over an operand; empty if the call does not run in place.
    """

    variants: tuple[Variant, ...]
    in_slices: tuple[Variant, ...] = ()
    in_place: tuple[Variant, ...] = ()


def recompute_costs(node: fx.Node, again: Call, over: int | None, device: torch.device) -> Costs:
    """Costs of the call that recomputes a batch normalisation; no variant if the call gives other bits."""
    try:
        args, kwargs = operands_of(node, device)
        result, mean, invstd = direct(node.target)(*args, **kwargs)[:3]
        same = equal(result, direct(again.target)(args[0], mean, invstd, *args[1:3]))
        del args, result
    except (RuntimeError, TypeError) as error:
        log.info("cannot run %s again from its statistics (%s)", node.name, error)
        return Costs(variants=())
    return costs_of(again, over, device) if same else Costs(variants=())


def costs_added(node: fx.Node, device: torch.device) -> Costs:
    """Costs of a call that adds its result to an existing gradient."""
    try:
        values = operand_values(node, device)
        args = fx.map_arg(node.args, values.__getitem__)
        (made,) = tensors_of(node)
        total = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=device).zero_()
        run = functools.partial(adding(node.target), total, *args)
        _, variant = measured(run, device)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        log.info("cannot time %s alone (%s); using its roofline", node.name, error)
        return Costs(variants=(Variant(chunks=1, seconds=roofline_seconds(node), workspace_bytes=0),))
    return Costs(variants=(structs.replace(variant, seconds=_seconds(run, variant.seconds, device)),))


def whole_if_separable(node: fx.Node, device: torch.device) -> tuple[Variant, ...]:
    """Cost of the weight gradient of a concatenation, computed whole; empty if its parts give other bits.

    Args:
        node: see `memfit.passes.concat_weight_gradients.separable_weight_gradients`.
        device: device to run on.
    """
    operands = operands_of_data(node)
    gradient, _, weight, *rest = cast(tuple[Any, ...], node.args)
    apart = Call(name=node.name, target=node.target, args=(gradient, operands, weight), meta=node.meta)
    *settings, mask = rest
    try:
        values = operand_values(apart, device)
        data = torch.cat([values[operand] for operand in operands], 1)

        def whole() -> tuple[torch.Tensor, ...]:
            made: tuple[torch.Tensor, ...] = _aten.convolution_backward.default(
                values[gradient], data, values[weight], *settings, mask
            )
            return made

        result, variant = measured(whole, device)
        start = 0
        chunks: list[torch.Tensor] = []
        of_bias: torch.Tensor | None = None
        for number, operand in enumerate(operands):
            channels = values[weight][:, start : start + values[operand].shape[1]]
            start += channels.shape[1]
            bias = bool(mask[2]) and number == 0
            made = _aten.convolution_backward.default(
                values[gradient], values[operand], channels, *settings, [False, True, bias]
            )
            chunks.append(made[1])
            of_bias = made[2] if bias else of_bias
        if not equal(result, (None, torch.cat(chunks, 1), of_bias)):
            return ()
        del result
        return (structs.replace(variant, seconds=_seconds(whole, variant.seconds, device)),)
    except (RuntimeError, TypeError) as error:
        log.info("cannot make %s from its operands (%s)", node.name, error)
        return ()


def variants_of(node: fx.Node | Call, device: torch.device) -> tuple[Variant, ...]:
    """Costs of the op: whole, then in chunks where that gives the same bits."""
    return costs_of(node, None, device).variants


def costs_of(node: fx.Node | Call, over: int | None, device: torch.device) -> Costs:
    """Costs of a call: whole, in chunks and over an operand.

    Args:
        node: the call.
        over: position of the operand over which the call can run; None if it cannot.
        device: device to run on.
    """
    try:
        values = operand_values(node, device)
        args, kwargs = fx.map_arg(node.args, values.__getitem__), fx.map_arg(node.kwargs, values.__getitem__)
        call = direct(node.target)

        def whole() -> object:
            return call(*args, **kwargs)

        result, first = measured(whole, device)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        log.info("cannot time %s alone (%s); using its roofline", node.name, error)
        return Costs(variants=(Variant(chunks=1, seconds=roofline_seconds(node), workspace_bytes=0),))
    _check_metadata_only(node, args, result)
    found = [(first, whole)]
    for chunks in candidate_chunks(node) if first.workspace_bytes else ():
        in_chunks = functools.partial(_in_chunks, node, args, kwargs, chunks)
        variant = _measured_alike(in_chunks, result, device)
        if variant is not None:
            # A call that can write over an operand mostly does, which avoids touching fresh memory.
            over_first = rule_of(node.target).in_place.get(0)
            likely = in_chunks if over_first is None else functools.partial(over_first, *args, chunks=chunks, **kwargs)
            found.append((structs.replace(variant, chunks=chunks), likely))
    del result  # timed runs take the memory of earlier runs, as the ops of a step do
    variants = tuple(structs.replace(variant, seconds=_seconds(run, variant.seconds, device)) for variant, run in found)
    in_place: tuple[Variant, ...] = ()
    if over is not None:
        overwriting = functools.partial(direct(rule_of(node.target).in_place[over]), *args, **kwargs)
        # This run touches less memory than a run into fresh memory; if it seems slower, the machine was busy.
        seconds = min(variants[0].seconds, _seconds(overwriting, timed(overwriting, device), device))
        in_place = (Variant(chunks=1, seconds=seconds, workspace_bytes=variants[0].workspace_bytes),)
    return Costs(variants=variants, in_place=in_place)


def _seconds(run: Callable[[], object], once: float, device: torch.device) -> float:
    """The shortest time of several runs, one of them known: other work on the machine can only add time."""
    repeats = _REPEATS if once < _SHORT_SECONDS or device.type == "cuda" else 1
    return min(once, *(timed(run, device) for _ in range(repeats)))


def _in_chunks(node: fx.Node | Call, args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int) -> object:
    return call_in_chunks(node.target)(*args, chunks=chunks, **kwargs)


def _measured_alike(run: Callable[[], object], expected: object, device: torch.device) -> Variant | None:
    """Time and workspace of one run; None if its bits are not those expected."""
    try:
        result, variant = measured(run, device)
    except RuntimeError:  # a chunk is too small for the kernel of the whole
        return None
    return variant if equal(expected, result) else None


def _within(node: fx.Node | Call) -> str:
    name = module_of(node) if isinstance(node, fx.Node) else ""
    return f" of {name}" if name else ""


def _check_metadata_only(node: fx.Node | Call, args: Sequence[Any], found: object) -> None:
    """Checks that the input gradient alone has the bits of `convolution_backward`, on this machine and shape.

    Raises:
        CaptureError: if it does not.
    """
    cuts: Cuts | None = None
    if node.target is convolution_input_slices:
        *args, cuts = args
    elif node.target is not convolution_input_gradient:
        return
    gradient, metadata_only, weight, *rest = args
    data = torch.empty_strided(
        metadata_only.shape, metadata_only.stride(), dtype=metadata_only.dtype, device=gradient.device
    ).zero_()
    whole = _aten.convolution_backward.default(gradient, data, weight, *rest, [True, True, False])[0]
    expected = whole if cuts is None else [whole[:, start:stop].contiguous() for start, stop in cuts]
    if not equal(expected, found):
        raise CaptureError(
            f"the gradient of a convolution's input has other bits by itself than beside its weight's on this machine "
            f"({node.name}{_within(node)}, gradient {tuple(gradient.shape)}, weight "
            f"{tuple(weight.shape)} of {weight.dtype}); leave that module plain with @torch.compiler.disable on its "
            "forward, and please report it"
        )
