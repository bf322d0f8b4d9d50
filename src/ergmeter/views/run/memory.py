"""Memory over time, on the terminal: what each device held, whose it was, and in which phase.

The trap: a curve on a cut axis, on which 5 % more looks like twice as much. A full bar is all the
memory that the device has, and each bar is the most that was read in its share of the time. There
are no more bars than readings; a share in which nothing was read is empty.
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

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ergmeter.records import Device, FloatArray
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.segments import Series

CELLS = 44, 8  # bars: at most, and at least
_BARS = "▁▂▃▄▅▆▇█"
# What is shown of a device, in this order: a column, and whose it is.
_ROWS = {
    "gpu": {"memory_bytes": "in use by all", "process_bytes": "the program's"},
    "allocator": {"reserved_bytes": "reserved", "allocated_bytes": "in tensors"},
    "process": {"memory_bytes": "resident"},
}
# A reading may miss what is held between two of them; where a mark is kept, the card's peak is it.
_MARKS = {
    ("process", "memory_bytes"): "memory_peak_bytes",
    ("allocator", "allocated_bytes"): "allocated_peak_bytes",
}
_KEEPERS = {"process": "the kernel's mark", "allocator": "the allocator's mark"}
# The phase that a bar stands for is the first of these that was on in it.
_LETTERS = {"checkpoint": "c", "eval": "e", "train": "t", "prefill": "p", "decode": "d"}


@dataclass(frozen=True)
class _Row:
    device: Device
    whose: str
    series: Series
    marks: Series | None  # the high-water mark that somebody keeps of it


def timeline(run: Run) -> RenderableType:
    """The memory of every device of a run over its time; a sentence where there is none."""
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
    found = {
        column: run.series(column) for column in dict.fromkeys(c for k in _ROWS.values() for c in k)
    }
    order = list(_ROWS)
    devices = [device for device in run.devices.values() if device.kind in _ROWS]
    return [
        _Row(device, whose, found[column][device.id], _marks(run, device, column))
        for device in sorted(devices, key=lambda device: order.index(device.kind))
        for column, whose in _ROWS[device.kind].items()
        if device.id in found[column]
    ]


def _marks(run: Run, device: Device, column: str) -> Series | None:
    kept = _MARKS.get((device.kind, column))
    return run.series(kept).get(device.id) if kept else None


def _full(run: Run, row: _Row) -> float | None:
    """All the memory there is: the device's own, or that of the device an allocator takes from."""
    under = run.devices.get(str(row.device.facts.get("uuid")), row.device)
    total = under.facts.get("memory_total_bytes")
    return float(total) if total else None


def _peak(row: _Row, full: float | None) -> str:
    most = float(row.series.values.max())
    return scaled(most, "B") + (f" ({most / full * 100:.0f} %)" if full else "")


def _beyond(row: _Row) -> list[Text]:
    """The most by a mark, where that is more than was read."""
    most = float(row.marks.values.max()) if row.marks is not None else 0.0
    if most <= float(row.series.values.max()):
        return []
    said = f"up to {scaled(most, 'B')} between readings, by {_KEEPERS[row.device.kind]}"
    return [Text(f"{'':<17}{said}", "dim")]


def _bars(series: Series, edges_ns: FloatArray, full: float | None) -> str:
    cells = len(edges_ns) - 1
    places = np.clip(np.searchsorted(edges_ns, series.t_ns, side="right") - 1, 0, cells - 1)
    most = np.full(cells, -1.0)
    np.maximum.at(most, places, series.values)
    top = full or float(series.values.max()) or 1.0
    steps = len(_BARS) - 1
    return "".join(
        " " if one < 0 else _BARS[min(steps, round(float(one) / top * steps))] for one in most
    )


def _phases(run: Run, edges_ns: FloatArray) -> str:
    steps = read_steps(run).longest
    letters = [" "] * (len(edges_ns) - 1)
    if not len(steps):
        return "".join(letters)
    for phase, letter in reversed(_LETTERS.items()):
        own = steps["phase"] == PHASES.index(phase)
        starts, ends = np.sort(steps["start_ns"][own]), np.sort(steps["end_ns"][own])
        # More have begun before a cell's end than have ended before its start: one is on in it.
        begun = np.searchsorted(starts, edges_ns[1:], side="left")
        over = np.searchsorted(ends, edges_ns[:-1], side="right")
        for cell in np.flatnonzero(begun > over):
            letters[cell] = letter
    return "".join(letters)
