"""Finds the first op in which a planned step differs from the baseline step.

Both steps run once under a recorder (`memfit.compiler.recorded_ops`). The first op of the baseline step whose result
occurs nowhere in the planned step is where the two steps diverge. A planned step rightly lacks some results: results of
ops that run slice by slice are never whole, and recomputed results may be made by other calls. An op is therefore
skipped if the planned step contains a later result of the same pass that was made from the op's result. Then both steps
run once more, and the operands, layout and result of the op that was found are compared with those of its nearest
counterpart.

*Idea:* as a debugger bisects two traces, by contents and not by names, since the planned step calls other ops.

Known limits: if nothing after the op has the same bits for other reasons (tiles), the op named is the first that is
rounded differently. A change that comes only from the order of accumulation in `.grad` is not the result of an op.
Differences in values that decide nothing further on, such as masks, are not seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from memfit.compiler.recorded_ops import RecordedOp, RecordedOps, RecordedTensor, Watched, modules_known
from memfit.fxir.op_family import op_family

__all__ = ["Difference", "first_difference"]

log = logging.getLogger(__name__)

_CLOSE = 0.01
"""The result of another op is a counterpart if it differs by no more than this share of the largest number."""

_SHAPE_ONLY = ("zeros", "ones", "full", "empty", "rand", "arange", "scalar_tensor", "new_")
"""Name prefixes of ops that do not read values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first op of the baseline step whose result the planned step does not make.

    Attributes:
        op: name of the op, such as `aten.native_dropout.default`.
        backward: whether the op runs in the backward pass.
        number: number of the op in the baseline step, from 0.
        module: path and class of the module that the op runs in; for a backward op, that of its forward op; "" if
            unknown.
        line: the user's line, as file, line and function; "" if unknown.
        dtype: dtype of its result.
        shape: shape of its result.
        strides: strides of its result in the baseline step.
        planned_op: the nearest counterpart in the planned step; None if there is none.
        planned_shape: shape of the counterpart's result.
        planned_strides: strides of the counterpart's result.
        max_difference: the largest difference of the two results; None if there is nothing to compare.
        same_operands: whether both ops read the same contents; None if there is nothing to compare.
        operand_layouts: strides of the operands with different layouts, plain and planned.
        is_random: whether the op draws random numbers.
    """

    op: str
    backward: bool
    number: int
    module: str
    line: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    planned_op: str | None = None
    planned_shape: tuple[int, ...] | None = None
    planned_strides: tuple[int, ...] | None = None
    max_difference: float | None = None
    same_operands: bool | None = None
    operand_layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    is_random: bool = False

    @property
    def is_layout(self) -> bool:
        """Whether tensors have different layouts where the steps diverge."""
        same_shape = self.planned_shape == self.shape and self.planned_strides is not None
        return bool(self.operand_layouts) or (same_shape and self.planned_strides != self.strides)

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        at = f" at {self.line}" if self.line else ""
        which = f"{self.op} ({'backward' if self.backward else 'forward'}, op {self.number} of the baseline step)"
        result = f"{self.dtype} {self.shape} with strides {self.strides}"
        return f"the first op that differs is {which}{where}{at}, whose result is {result}; {self._cause()}"

    def _cause(self) -> str:
        if self.planned_op is None:
            return "the planned step makes nothing like it"
        words = [f"the planned step has {'the same op' if self.planned_op == self.op else self.planned_op} there"]
        if self.max_difference is not None:
            words[0] += f", whose result differs by up to {self.max_difference:.3g}"
        if self.planned_shape != self.shape:
            words.append(f"its result has shape {self.planned_shape}")
        elif self.planned_strides != self.strides:
            words.append(f"its strides are {self.planned_strides}")
        if self.operand_layouts:
            pairs = ", ".join(f"{a} and {b}" for a, b in self.operand_layouts)
            words.append(f"operands are laid out otherwise (strides {pairs})")
        elif self.is_random:
            words.append("it draws random numbers, so an earlier op may have drawn others or more of them")
        elif self.same_operands:
            words.append("its operands are the same, so it is the kernel that differs")
        elif self.same_operands is not None:
            words.append("it reads other operands")
        return "; ".join(words)


def first_difference(plain: Callable[[], object], planned: Callable[[], object]) -> Difference | None:
    """Compares a plain and a planned step op by op.

    Args:
        plain: runs the plain forward pass, loss and backward pass, from a state that it restores itself, generators
            included; it may run twice.
        planned: runs the same step as planned, compiled before; it may run twice. Tensors that it returns count as
            made.

    Returns:
        The first op in which the steps differ; None if no op is found, or if the comparison fails. Only exceptions that
        interrupt the program are raised.
    """
    try:
        return _first_difference(plain, planned)
    except Exception as error:
        log.info("cannot tell which op differs first: %s: %s", type(error).__name__, error)
        return None


def _first_difference(plain: Callable[[], object], planned: Callable[[], object]) -> Difference | None:
    there = _run(planned, RecordedOps(operands=True))
    here = RecordedOps()
    with modules_known(here):
        _run(plain, here)
    number = _first_missing(here.ops, here.returned, there.contents)
    if number is None:
        return None
    op = here.ops[number]
    place = next(place for place, r in enumerate(op.results) if _is_missing(r, there.contents))
    result = op.results[place]
    made = {r.fingerprint for o in here.ops for r in o.results}
    counterpart = _counterpart(op, result, there.ops, made)
    found = Difference(
        op=op.name,
        backward=op.backward,
        number=number,
        module=op.place.module,
        line=op.place.line,
        dtype=str(result.dtype).removeprefix("torch."),
        shape=result.shape,
        strides=result.strides,
        is_random=op.is_random,
    )
    if counterpart is None:
        return found
    watched = _run(plain, RecordedOps(watch=number, hashes=False)).watched
    nearest = _run(planned, RecordedOps(watch=counterpart, hashes=False)).watched
    return _compared(found, watched, place, nearest, there.ops[counterpart])


def _run(step: Callable[[], object], recorder: RecordedOps) -> RecordedOps:
    with recorder:
        returned = step()
    recorder.end(returned)
    return recorder


def _first_missing(ops: Sequence[RecordedOp], returned: Collection[int], contents: set[bytes]) -> int | None:
    """The first op with a result that is not among `contents`, and from which no result among `contents` was made.

    An op on which gradients or returned tensors depend is preferred, if there is one.
    """
    readers: list[dict[int, list[int]]] = [{} for _ in ops]
    for number, op in enumerate(ops):
        for source, place in op.sources:
            readers[source].setdefault(place, []).append(number)
    missing: list[bool] = [False] * len(ops)
    excused: list[bool] = [False] * len(ops)
    for number in reversed(range(len(ops))):
        op = ops[number]
        absent = [] if op.is_view else [place for place, r in enumerate(op.results) if _is_missing(r, contents)]
        missing[number] = bool(absent)
        excused[number] = all(
            any(
                ops[reader].backward == op.backward
                and (excused[reader] if missing[reader] else _is_telling(ops[reader], contents))
                for reader in readers[number].get(place, ())
            )
            for place in absent
        )
    decides = [op.backward for op in ops]  # the program may only look at other results, or not use them
    for number in returned:
        decides[number] = True
    for number in reversed(range(len(ops))):
        decides[number] = decides[number] or any(decides[r] for read in readers[number].values() for r in read)
    culprits = [n for n in range(len(ops)) if missing[n] and not excused[n]]
    return next((n for n in culprits if decides[n]), culprits[0] if culprits else None)


def _is_missing(result: RecordedTensor, contents: set[bytes]) -> bool:
    return result.fingerprint is not None and result.size > 0 and result.fingerprint not in contents


def _is_telling(op: RecordedOp, contents: set[bytes]) -> bool:
    """Whether an op whose results are among `contents` shows that its operands were made too."""
    if op.is_view or op_family(op.name).startswith(_SHAPE_ONLY):
        return False
    return any(r.fingerprint in contents and r.size > 1 and r.dtype.is_floating_point for r in op.results)


def _counterpart(
    op: RecordedOp, result: RecordedTensor, ops: Sequence[RecordedOp], made: set[bytes | None]
) -> int | None:
    """The op of the planned step most like `op`, among the ops whose results the baseline step does not make."""

    def likeness(other: RecordedOp) -> int:
        new = any(r.fingerprint is not None and r.fingerprint not in made for r in other.results)
        if not new or other.is_view:
            return 0
        alike = any(r.shape == result.shape and r.dtype == result.dtype for r in other.results)
        same_op = op_family(other.name) == op_family(op.name)
        return (4 * same_op + 2 * alike + (other.backward == op.backward)) * (same_op or alike)

    best = max(range(len(ops)), key=lambda n: (likeness(ops[n]), -n), default=None)
    return None if best is None or not likeness(ops[best]) else best


def _compared(found: Difference, plain: Watched, place: int, planned: Watched, counterpart: RecordedOp) -> Difference:
    ours = plain.results[place]
    alike = (t for t in planned.results if t.shape == ours.shape and t.dtype == ours.dtype)
    theirs = next(alike, next(iter(planned.results)))
    difference = _max_difference(ours, theirs) if theirs.shape == ours.shape and ours.numel() else None
    if op_family(counterpart.name) != op_family(found.op):
        largest = _max_difference(ours, torch.zeros_like(ours))
        if difference is None or not difference <= _CLOSE * largest:
            return found  # of the same shape by chance
    contents = {t.fingerprint: t.strides for t in planned.operands}
    read = [t for t in plain.operands if t.fingerprint is not None and t.size > 1]
    layouts = tuple(
        (t.strides, contents[t.fingerprint])
        for t in read
        if t.fingerprint in contents and _matter(t.shape, t.strides) != _matter(t.shape, contents[t.fingerprint])
    )
    return replace(
        found,
        planned_op=counterpart.name,
        planned_shape=tuple(theirs.shape),
        planned_strides=tuple(theirs.stride()),
        max_difference=difference,
        same_operands=all(t.fingerprint in contents for t in read),
        operand_layouts=layouts,
    )


def _max_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return float((a.to(wide) - b.to(wide)).abs().max())


def _matter(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of the axes with more than one element."""
    return tuple(stride for size, stride in zip(shape, strides, strict=False) if size > 1)
