"""Device memory over time on the terminal: peaks, owners and phases.

A full bar is the memory of the device, and each bar is the highest reading of its interval. There
are no more bars than readings; an interval without a reading is empty.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from ergmeter.metrics.timeline import INTERVAL_PHASES, MemoryCurve, memory_curves
from ergmeter.units import duration, scaled
from ergmeter.views.run.card import BARS

if TYPE_CHECKING:
    from ergmeter.runlog.reader import Run

FEWEST_BARS, MOST_BARS = 8, 44
_MARK_OWNERS = {"process": "the kernel's mark", "allocator": "the allocator's mark"}


def timeline(run: Run) -> RenderableType:
    """Render device memory over time, or a sentence if there is none."""
    memory = memory_curves(run, fewest=FEWEST_BARS, most=MOST_BARS)
    if memory is None:
        return Text("no memory was read in this run: `erg report --all` says why")
    cell_s = memory.span_s / len(memory.phases)
    lines = [
        Text(f"memory over {duration(memory.span_s)}; a bar is the most of {duration(cell_s)}"),
        Text("a full bar is all that the device has; of a program on the host, its most", "dim"),
    ]
    if any(None in curve.highest_bytes for curve in memory.curves):
        lines.append(Text("no bar: nothing was read in that share of the time", "dim"))
    for _, curves in groupby(memory.curves, key=lambda curve: curve.device.id):
        own = list(curves)
        lines.append(Text(own[0].device.name, "bold"))
        for curve in own:
            lines += [_line(curve.owner, _bars(curve), _peak(curve)), *_beyond(curve)]
    letters = "".join(phase[:1] or " " for phase in memory.phases)
    legend = ", ".join(f"{phase[0]} {phase}" for phase in INTERVAL_PHASES)
    lines += [_line("phase", letters, ""), _line("", legend, "")]
    return Group(*lines)


def _line(label: str, bars: str, peak: str) -> Text:
    return Text.assemble((f"  {label:<15}", "dim"), bars, f"  {peak}".rstrip())


def _peak(curve: MemoryCurve) -> str:
    full = curve.capacity_bytes
    share = f" ({curve.peak_bytes / full * 100:.0f} %)" if full else ""
    return scaled(curve.peak_bytes, "B") + share


def _beyond(curve: MemoryCurve) -> list[Text]:
    """Return the peak recorded by a mark, if above all readings."""
    if curve.mark_bytes <= curve.peak_bytes:
        return []
    keeper = _MARK_OWNERS[curve.device.kind]
    text = f"up to {scaled(curve.mark_bytes, 'B')} between readings, by {keeper}"
    return [Text(f"{'':<17}{text}", "dim")]


def _bars(curve: MemoryCurve) -> str:
    top = curve.capacity_bytes or curve.peak_bytes or 1.0
    steps = len(BARS) - 1
    return "".join(
        " " if peak is None else BARS[min(steps, round(peak / top * steps))]
        for peak in curve.highest_bytes
    )
