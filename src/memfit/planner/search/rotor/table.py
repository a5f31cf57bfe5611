"""The dynamic program over the chain: least time to run blocks `s` to `t` forward and backward in `m` bytes.

    C(s, t, m) = min of
        an option for blocks s to e - 1:  forward, C(e, t, m - saved), backward
        a checkpoint before block c:      forward from s to c, C(c, t, m - its boundary), C(s, c - 1, m)

The boundary before `s` is counted outside. `m` is the rest of the whole budget, so a peak that is compared with `m`
includes the memory that the step uses at that place in every plan. Segments that do not end at the last block are
recomputed, and `t` determines the memory that the backward pass holds meanwhile.

Idea: Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019): the optimal persistent schedule, ops
run as often as needed. New here: options through several blocks at once, and carried storages that are counted once.

Known limits: bytes are rounded to slots, so each order is simulated before it is used; a boundary is held until the
segment after it is done.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from memfit.planner.search.rotor.priced_options import PricedOption, Site

__all__ = ["Table", "fill", "order_at"]

_SECONDS_PER_SLOT = 8e-6
"""Nominal seconds of a cell of the table."""

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OptionColumns:
    """The options from one block as columns, bytes in slots."""

    options: tuple[PricedOption, ...]
    stop: _Ints
    saved: _Ints
    first_need: _Ints
    down_need: _Ints
    recompute_rise: _Ints
    only_rise: _Ints
    first_seconds: _Floats
    recompute_seconds: _Floats
    only_seconds: _Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Least seconds of forward ops by first block, last block and slots of memory; infinite where nothing fits.

    Attributes:
        site: the chain that was planned.
        slot_bytes: bytes of a slot.
        cells: the table.
        columns: the options from each block.
        effort_seconds: work of the options and of the table, in nominal seconds.
    """

    site: Site
    slot_bytes: int
    cells: _Floats
    columns: tuple[_OptionColumns, ...]
    effort_seconds: float = 0.0

    @property
    def whole(self) -> _Floats:
        """Least seconds of the whole chain, by slots."""
        row: _Floats = self.cells[0, -1]
        return row


def fill(site: Site, *, slots: int, slot_bytes: int) -> Table:
    """Fills the table.

    Args:
        site: the chain and its options.
        slots: memory to plan for; the values of cells do not depend on it.
        slot_bytes: bytes of a slot.
    """
    count = len(site.chain.blocks)
    cells = np.full((count + 1, count, slots), np.inf)
    columns = tuple(_undominated(_columns(options, slot_bytes)) for options in site.options)
    table = Table(
        site=site,
        slot_bytes=slot_bytes,
        cells=cells,
        columns=columns,
        effort_seconds=site.effort_seconds + _SECONDS_PER_SLOT * slots * count * (count + 1) / 2,
    )
    memory = np.arange(slots)
    for last in range(count):
        for first in range(last, -1, -1):
            rows, _ = _rows(table, first, last, memory)
            cells[first, last] = rows.min(axis=0)
    return table


def order_at(table: Table, slots: int) -> list[int]:
    """The order behind a finite cell of `table.whole`."""
    order: list[int] = []
    _walk(table, 0, len(table.columns) - 1, slots, order)
    return order


def _columns(options: tuple[PricedOption, ...], slot_bytes: int) -> _OptionColumns:
    def slots(values: list[int]) -> _Ints:
        return -(-np.array(values, dtype=np.int64) // slot_bytes)

    return _OptionColumns(
        options=options,
        stop=np.array([w.stop for w in options]),
        saved=(np.array([w.saved_bytes for w in options], dtype=np.int64) + slot_bytes // 2) // slot_bytes,
        first_need=slots([w.first_need for w in options]),
        down_need=slots([w.down_need for w in options]),
        recompute_rise=np.array([w.recompute_rise for w in options], dtype=np.int64),
        only_rise=np.array([w.only_rise for w in options], dtype=np.int64),
        first_seconds=np.array([w.first_seconds for w in options]),
        recompute_seconds=np.array([w.recompute_seconds for w in options]),
        only_seconds=np.array([w.only_seconds for w in options]),
    )


def _undominated(columns: _OptionColumns) -> _OptionColumns:
    """Removes options that another option of the same blocks beats in memory and time."""
    arrays = [getattr(columns, f.name) for f in fields(columns) if f.name not in ("options", "stop")]
    table = np.stack(arrays, axis=1)
    keep = np.ones(len(table), dtype=bool)
    for i in range(len(table)):
        beaten = keep & (columns.stop == columns.stop[i]) & (table >= table[i]).all(axis=1)
        beaten[: i + 1] &= (table[: i + 1] > table[i]).any(axis=1)
        keep &= ~beaten
    return _OptionColumns(
        options=tuple(option for option, saved in zip(columns.options, keep, strict=True) if saved),
        **{f.name: getattr(columns, f.name)[keep] for f in fields(columns) if f.name != "options"},
    )


def _rows(table: Table, first: int, last: int, memory: _Ints) -> tuple[_Floats, list[PricedOption | int]]:
    """Time at each amount of memory for every choice at the start of a segment: an option, or a checkpoint."""
    here = table.columns[first]
    running_first = last == len(table.columns) - 1
    base = table.site.backward_base[last + 1]

    through = np.flatnonzero(here.stop <= last)
    ending = np.flatnonzero(here.stop == last + 1)
    if running_first:
        need, seconds = here.first_need[through], here.first_seconds[through]
        end_need, end_seconds = here.first_need[ending], here.first_seconds[ending]
    else:
        rise = -(-(base + here.recompute_rise[through]) // table.slot_bytes)
        need, seconds = np.maximum(here.down_need[through], rise), here.recompute_seconds[through]
        end_need, end_seconds = -(-(base + here.only_rise[ending]) // table.slot_bytes), here.only_seconds[ending]

    cuts = np.arange(first + 1, last + 1)
    cut_saved, cut_need, cut_seconds = _checkpoints(table, first, last, cuts)

    rows = np.full((len(through) + len(ending) + len(cuts), len(memory)), np.inf)
    saved = np.concatenate([here.saved[through], cut_saved])
    target = np.concatenate([here.stop[through], cuts])
    left = memory - saved[:, None]
    after = table.cells[target[:, None], last, np.maximum(left, 0)]
    after[left < 0] = np.inf
    rows[: len(through)] = after[: len(through)] + seconds[:, None]
    rows[len(through) : len(through) + len(ending)] = end_seconds[:, None]
    if len(cuts):
        rows[len(through) + len(ending) :] = (
            after[len(through) :] + table.cells[first, first:last][:, memory] + cut_seconds[:, None]
        )
    needs = np.concatenate([need, end_need, cut_need])
    rows[memory < needs[:, None]] = np.inf
    choices: list[PricedOption | int] = [here.options[i] for i in (*through, *ending)]
    return rows, [*choices, *cuts.tolist()]


def _checkpoints(table: Table, first: int, last: int, cuts: _Ints) -> tuple[_Ints, _Ints, _Floats]:
    """For each place to checkpoint: slots of its boundary, slots and seconds to reach it."""
    site = table.site
    passes = site.passes[first:last]
    saved = (np.array(site.checkpoint_bytes[first], dtype=np.int64)[cuts] + table.slot_bytes // 2) // table.slot_bytes
    if last == len(table.columns) - 1:
        need = [base + p.first_rise[first] for base, p in zip(site.forward_base[first:last], passes, strict=True)]
        seconds = [p.first_seconds for p in passes]
    else:
        need = [site.backward_base[last + 1] + p.recompute_rise[first] for p in passes]
        seconds = [p.recompute_seconds for p in passes]
    highest = np.maximum.accumulate(np.array(need, dtype=np.int64))
    return saved, -(-highest // table.slot_bytes), np.cumsum(np.array(seconds))


def _walk(table: Table, first: int, last: int, slots: int, order: list[int]) -> None:
    rows, choices = _rows(table, first, last, np.array([slots]))
    choice = choices[int(rows[:, 0].argmin())]
    running_first = last == len(table.columns) - 1
    site = table.site
    if isinstance(choice, int):
        for block, through in zip(site.chain.blocks[first:choice], site.passes[first:choice], strict=True):
            order.extend(range(block.first, block.last + 1) if running_first else through.again)
        saved = (site.checkpoint_bytes[first][choice] + table.slot_bytes // 2) // table.slot_bytes
        _walk(table, choice, last, slots - saved, order)
        _walk(table, first, choice - 1, slots, order)
        return
    if choice.stop == last + 1 and not running_first:
        order.extend(choice.only)
        return
    blocks = site.chain.blocks
    order.extend(range(blocks[first].first, blocks[choice.stop - 1].last + 1) if running_first else choice.forward)
    if choice.stop <= last:
        _walk(table, choice.stop, last, slots - (choice.saved_bytes + table.slot_bytes // 2) // table.slot_bytes, order)
    order.extend(choice.backward)
