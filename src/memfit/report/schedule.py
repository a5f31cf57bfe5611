"""The timeline of a pipeline's schedule, as text and as SVG: a row for each device, time from left to right.

Passes are numbered by micro-batch if there is space. In the text, a `b` marks backward passes, and a `w` marks the
deferred part of a backward pass. Both forms draw predicted times.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from memfit.planner.pipeline.schedule import Action, Pass, Schedule, StageTimes, simulate_schedule
from memfit.units import format_seconds

__all__ = ["schedule_svg", "schedule_text"]

_COLOURS = {
    Pass.FORWARD: ("#7fb3d5", "#5499c7"),
    Pass.BACKWARD: ("#f5b041", "#d68910"),
    Pass.INPUT: ("#f5b041", "#d68910"),
    Pass.WEIGHT: ("#82c99a", "#52a672"),
}
"""Colours of a pass: for a device's stages at even and at odd positions."""
_LETTERS = {Pass.FORWARD: "", Pass.BACKWARD: "b", Pass.INPUT: "b", Pass.WEIGHT: "w"}
_FILLS = {Pass.FORWARD: "─", Pass.BACKWARD: "═", Pass.INPUT: "═", Pass.WEIGHT: "┄"}
_ROW, _LEFT, _WIDTH = 28, 70, 1100


def schedule_text(schedule: Schedule, times: Sequence[StageTimes], *, width: int = 100) -> str:
    """The timeline as text.

    Args:
        schedule: the order of passes on each device.
        times: times of each stage.
        width: columns of the time axis.

    Returns:
        A line for each device, and a line with the time of the step.
    """
    timeline = simulate_schedule(schedule, times)
    scale = width / timeline.step_seconds if timeline.step_seconds else 0.0
    lines = []
    for device, order in enumerate(schedule.orders):
        row = [" "] * width
        for action in order:
            begin, end = _span(action, timeline.starts[action], times, scale)
            label = f"{_LETTERS[action.what]}{action.microbatch}"
            cells = label if len(label) <= end - begin else label[: max(1, end - begin)]
            fill = _FILLS[action.what]
            for place in range(begin, min(end, width)):
                offset = place - begin
                row[place] = cells[offset] if offset < len(cells) else fill
        lines.append(f"device {device} │{''.join(row).rstrip()}")
    step = format_seconds(timeline.step_seconds)
    lines.append(f"         {step} predicted, {schedule.name}, devices wait {timeline.bubble:.0%}")
    return "\n".join(lines)


def schedule_svg(schedule: Schedule, times: Sequence[StageTimes]) -> str:
    """The timeline as an SVG document."""
    timeline = simulate_schedule(schedule, times)
    scale = _WIDTH / timeline.step_seconds if timeline.step_seconds else 0.0
    height = _ROW * len(schedule.orders) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 10}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{_LEFT}" y="16">{escape(schedule.name)}: {format_seconds(timeline.step_seconds)} predicted, '
        f"devices wait {timeline.bubble:.0%}</text>",
    ]
    for device, order in enumerate(schedule.orders):
        top = 26 + _ROW * device
        parts.append(f'<text x="4" y="{top + 18}">device {device}</text>')
        numbers = sorted({action.stage for action in order})
        for action in order:
            left = _LEFT + timeline.starts[action] * scale
            wide = times[action.stage].of(action.what) * scale
            colour = _COLOURS[action.what][numbers.index(action.stage) % 2]
            name = (
                f"stage {action.stage}, micro-batch {action.microbatch}, {action.what.name.lower().replace('_', ' ')}"
            )
            parts.append(
                f'<rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_ROW - 4}" fill="{colour}" '
                f'stroke="white" stroke-width="0.5"><title>{name}</title></rect>'
            )
            if wide > 14:
                parts.append(f'<text x="{left + 3:.2f}" y="{top + 17}">{action.microbatch}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _span(action: Action, start: float, times: Sequence[StageTimes], scale: float) -> tuple[int, int]:
    begin = round(start * scale)
    return begin, max(begin + 1, round((start + times[action.stage].of(action.what)) * scale))
