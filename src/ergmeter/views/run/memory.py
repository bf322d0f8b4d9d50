"""Device memory over time on the terminal: peaks, owners and phases.

A full bar is the memory of the device, and each bar is the highest reading of its interval. There
are no more bars than readings; an interval without a reading is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group
from rich.text import Text

from ergmeter.metrics.evidence.steps import read_steps
from ergmeter.records import PHASES
from ergmeter.units import NS_PER_S, duration, scaled
from ergmeter.views.run.card import BARS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ergmeter.records import Device, FloatArray
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.segments import Series

CELLS = 44, 8  # bars: most and fewest
# Rows of a device, in order: column and owner.
_ROWS = {
    "gpu": {"memory_bytes": "in use by all", "process_bytes": "the program's"},
    "allocator": {"reserved_bytes": "reserved", "allocated_bytes": "in tensors"},
    "process": {"memory_bytes": "resident"},
}
# Readings may miss a peak between them. Where a high-water mark exists, it is the card's peak.
_MARKS = {
    ("process", "memory_bytes"): "memory_peak_bytes",
    ("allocator", "allocated_bytes"): "allocated_peak_bytes",
}
_KEEPERS = {"process": "the kernel's mark", "allocator": "the allocator's mark"}
# A bar shows the first of these phases that occurred in its interval.
_LETTERS = {"checkpoint": "c", "eval": "e", "train": "t", "prefill": "p", "decode": "d"}


@dataclass(frozen=True)
class _Row:
    device: Device
    whose: str
    series: Series
    marks: Series | None  # its high-water mark


def timeline(run: Run) -> RenderableType:
    """Render device memory over time, or a sentence if there is none."""
    rows = _rows(run)
    if not rows:
        return Text("no memory was read in this run: `erg report --all` says why")
    most, least = CELLS
    cells = max(least, min(most, *(len(row.series.t_ns) for row in rows)))
    start_ns = min(int(row.series.t_ns[0]) for row in rows)
    end_ns = max(int(row.series.t_ns[-1]) for row in rows) + 1
    edges_ns = np.linspace(start_ns, end_ns, cells + 1)
    span_s = (end_ns - start_ns) / NS_PER_S
    lines = [
        Text(f"memory over {duration(span_s)}; a bar is the most of {duration(span_s / cells)}"),
        Text("a full bar is all that the device has; of a program on the host, its most", "dim"),
    ]
    gap_at = len(lines)
    is_whole = True
    for device in dict.fromkeys(row.device.id for row in rows):
        ours = [row for row in rows if row.device.id == device]
        lines.append(Text(ours[0].device.name, "bold"))
        for row in ours:
            full = _full(run, row)
            bars = _bars(row.series, edges_ns, full)
            is_whole &= " " not in bars
            lines += [_line(row.whose, bars, _peak(row, full)), *_beyond(row)]
    if not is_whole:
        lines.insert(gap_at, Text("no bar: nothing was read in that share of the time", "dim"))
    legend = ", ".join(f"{letter} {phase}" for phase, letter in _LETTERS.items())
    lines += [_line("phase", _phases(run, edges_ns), ""), _line("", legend, "")]
    return Group(*lines)


def _line(label: str, bars: str, peak: str) -> Text:
    return Text.assemble((f"  {label:<15}", "dim"), bars, f"  {peak}".rstrip())


def _rows(run: Run) -> list[_Row]:
    columns = {
        column: run.series(column) for column in dict.fromkeys(c for k in _ROWS.values() for c in k)
    }
    order = list(_ROWS)
    devices = [device for device in run.devices.values() if device.kind in _ROWS]
    return [
        _Row(device, whose, columns[column][device.id], _marks(run, device, column))
        for device in sorted(devices, key=lambda device: order.index(device.kind))
        for column, whose in _ROWS[device.kind].items()
        if device.id in columns[column]
    ]


def _marks(run: Run, device: Device, column: str) -> Series | None:
    mark = _MARKS.get((device.kind, column))
    return run.series(mark).get(device.id) if mark else None


def _full(run: Run, row: _Row) -> float | None:
    """Return the capacity: the device's own, or that of an allocator's device."""
    under = run.devices.get(str(row.device.facts.get("uuid")), row.device)
    total = under.facts.get("memory_total_bytes")
    return float(total) if total else None


def _peak(row: _Row, full: float | None) -> str:
    most = float(row.series.values.max())
    return scaled(most, "B") + (f" ({most / full * 100:.0f} %)" if full else "")


def _beyond(row: _Row) -> list[Text]:
    """Return the peak recorded by a mark, if above all readings."""
    most = float(row.marks.values.max()) if row.marks is not None else 0.0
    if most <= float(row.series.values.max()):
        return []
    text = f"up to {scaled(most, 'B')} between readings, by {_KEEPERS[row.device.kind]}"
    return [Text(f"{'':<17}{text}", "dim")]


def _bars(series: Series, edges_ns: FloatArray, full: float | None) -> str:
    cells = len(edges_ns) - 1
    places = np.clip(np.searchsorted(edges_ns, series.t_ns, side="right") - 1, 0, cells - 1)
    most = np.full(cells, -1.0)
    np.maximum.at(most, places, series.values)
    top = full or float(series.values.max()) or 1.0
    steps = len(BARS) - 1
    return "".join(
        " " if peak < 0 else BARS[min(steps, round(float(peak) / top * steps))] for peak in most
    )


def _phases(run: Run, edges_ns: FloatArray) -> str:
    steps = read_steps(run).longest
    letters = [" "] * (len(edges_ns) - 1)
    if not len(steps):
        return "".join(letters)
    for phase, letter in reversed(_LETTERS.items()):
        own = steps["phase"] == PHASES.index(phase)
        starts, ends = np.sort(steps["start_ns"][own]), np.sort(steps["end_ns"][own])
        # More phases began before a cell's end than ended before its start: one is active in it.
        begun = np.searchsorted(starts, edges_ns[1:], side="left")
        over = np.searchsorted(ends, edges_ns[:-1], side="right")
        for cell in np.flatnonzero(begun > over):
            letters[cell] = letter
    return "".join(letters)
