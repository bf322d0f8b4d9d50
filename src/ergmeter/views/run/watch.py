"""A run while it is going, on a terminal of 60 to 200 columns, or as lines where there is none.

The trap: a page that breaks where it is narrow. What does not fit is left out whole, first the
bases, then the curves, never half a number; a name goes on in the next line. What is not known
keeps its place and says why, as far as there is room for a whole clause.
"""

from __future__ import annotations

import re
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ergmeter.records import Missing, Reading
from ergmeter.runlog.reader import CUT_OFF, FINISHED, RUNNING
from ergmeter.units import NS_PER_S, duration, printable, scaled, significant
from ergmeter.views.run.card import value

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from ergmeter.metrics.live.frame import Gauges, LiveFrame
    from ergmeter.records import Result

_BARS = "▁▂▃▄▅▆▇█"
_FOR_BASES = 72  # columns, from which on there is room for them
_CURVE = (10, 80)  # cells at the least and at the most
_GAP = 2
_MOST_DEVICES = 16
_MOST_RANKS = 8
_MOST_ALERTS = 6
_OLD_S = 30.0  # from which on figures so far say how old they are
_GAUGES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("power_w", "power", lambda x: f"{x:.0f} W"),
    ("memory_bytes", "memory", lambda x: scaled(x, "B")),
    ("temperature_c", "heat", lambda x: f"{x:.0f} °C"),
    ("busy_frac", "busy", lambda x: f"{x * 100:.0f} %"),
)
# Of each row: its title, its figure lately, its curve, and its figure so far.
_ROWS = (
    ("tokens/s", "throughput.tokens_per_s", "tokens_per_s", "throughput.tokens_per_s"),
    ("step time", "time.step_s", "step_s", "time.step_s"),
    ("loss", "", "loss", ""),
    ("power", "energy.mean_w", "power_w", ""),
    ("energy", "", "", "energy.run_j"),
    ("J/token", "", "", "energy.joules_per_token"),
    ("MFU", "", "", "utilization.mfu_frac"),
    ("whole run", "", "", "throughput.whole_run_tokens_per_s"),
)
REPLACED = "replaced: another run was recorded here, and is shown"
_CALLED = {RUNNING: "going", CUT_OFF: "cut off: nobody writes it any more"}


def page(frame: LiveFrame, *, columns: int, lines: int | None = None) -> RenderableType:
    """Everything about a run, in so many columns. `lines`: the room there is for it."""
    parts: list[RenderableType] = [*_head(frame), Text(), _figures(frame, columns)]
    parts += [*_age(frame), *_missing(frame, columns)]
    parts += _devices(frame)
    parts += _ranks(frame)
    # What came last is what one looks for: of the rest as much as there is room for.
    room = _MOST_ALERTS if lines is None else max(2, min(_MOST_ALERTS, lines - 24))
    parts += _alerts(frame, room)
    return Group(*parts)


def line(frame: LiveFrame) -> str:
    """The same in one line, for a file or a pipe."""
    parts = [_progress(frame)]
    for title, key, _, _ in _ROWS:
        found = frame.recent.get(key)
        if isinstance(found, Reading):
            parts.append(value(found) if title == "tokens/s" else f"{title} {value(found)}")
        elif title == "loss" and frame.loss is not None:
            parts.append(f"loss {significant(frame.loss)}")
    for column, title, said in _GAUGES[1:3]:
        most = [one.values[column] for one in _shown_devices(frame) if column in one.values]
        if most:
            parts.append(f"{title} {said(max(most))}")
    for key, title in (("energy.joules_per_token", "J/token"), ("utilization.mfu_frac", "MFU")):
        found = frame.so_far.get(key)
        if isinstance(found, Reading):
            word = ", provisional" if frame.is_provisional else ""
            parts.append(f"{title} so far {value(found)} ({found.basis}{word})")
    parts.append(_eta(frame))
    return f"{_clock(frame, frame.newest_ns)} " + " | ".join(parts)


def alert_line(frame: LiveFrame, number: int) -> str:
    """One of its alerts, as a line of its own."""
    alert = frame.alerts[number]
    return f"{_clock(frame, alert.t_ns)} alert: {printable(alert.said)}"


def _head(frame: LiveFrame) -> list[Text]:
    style = {RUNNING: "cyan", FINISHED: "green"}.get(frame.status, "red")
    called = printable(_CALLED.get(frame.status, frame.status))
    title = Text.assemble((printable(frame.run.name), "bold"), "  ", (called, style))
    title.append(f"  {duration(frame.elapsed_s)}", "dim")
    if frame.trainings > 1:
        title.append(f"  training {frame.training} of {frame.trainings} (--training)", "dim")
    said = Text(f"{_progress(frame)}, {_eta(frame)}")
    if frame.total and frame.done is not None:
        share = min(1.0, frame.done / frame.total)
        filled = round(share * 20)
        bar = "█" * filled + "░" * (20 - filled)
        said = Text.assemble((bar, "cyan"), f" {share * 100:.0f} %  ", said)
    return [title, *([Text(REPLACED, "yellow")] if frame.replaced else []), said]


def _progress(frame: LiveFrame) -> str:
    if frame.step is None:
        return "no step yet"
    of = f" of {frame.total:,.0f}" if frame.total and frame.unit == "steps" else ""
    tokens = ""
    if frame.unit == "tokens" and frame.done is not None:
        tokens = f", {frame.done:,.0f} of {frame.total:,.0f} tokens"
    return f"step {frame.step:,}{of}{tokens}"


def _eta(frame: LiveFrame) -> str:
    if not frame.is_going:
        return "over"
    if frame.quiet_s is not None:
        return f"no ETA: last step {duration(frame.quiet_s)} ago"
    return (
        f"no ETA: {printable(frame.no_eta)}"
        if frame.eta_s is None
        else f"{duration(frame.eta_s)} to go"
    )


def _figures(frame: LiveFrame, columns: int) -> Table:
    with_bases = columns >= _FOR_BASES
    rows: list[list[str]] = []
    for title, now, _, so_far in _ROWS:
        found = frame.so_far.get(so_far)
        printed = "as printed" if title == "loss" and frame.loss_is_printed else ""
        basis = found.basis if isinstance(found, Reading) else printed
        figures = [_now(frame, title, now), _value(found) if so_far else ""]
        rows.append([title, *figures, *([basis] if with_bases else [])])
    so_far_head = "so far (provisional)" if frame.is_provisional else "so far"
    heads = ["", "lately", so_far_head, ""][: len(rows[0])]
    # The curves have what the figures leave.
    taken = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    cells = min(_CURVE[1], columns - sum(taken) - _GAP * (len(taken) + 1))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for number, head in enumerate(heads):
        if number == 2 and cells >= _CURVE[0]:
            table.add_column(
                "from the start" if cells >= len("from the start") else "curve", no_wrap=True
            )
        is_figure = number in (1, 2)
        style = "" if is_figure else "dim"
        table.add_column(head, style=style, justify="right" if is_figure else "left", no_wrap=True)
    for (_, _, curve, _), row in zip(_ROWS, rows, strict=True):
        if cells >= _CURVE[0]:
            row.insert(2, sparkline(frame.curves.get(curve, ()), cells))
        table.add_row(*row)
    return table


def _age(frame: LiveFrame) -> list[Text]:
    old_s = (frame.newest_ns - frame.so_far_ns) / NS_PER_S
    if not frame.so_far or old_s < _OLD_S:
        return []
    return [Text(f"so far: as of {duration(old_s)} ago", "dim")]


def _now(frame: LiveFrame, title: str, key: str) -> str:
    if title == "loss":
        return "-" if frame.loss is None else significant(frame.loss)
    return _value(frame.recent.get(key)) if key else ""


def _value(found: Result | None) -> str:
    return value(found) if isinstance(found, Reading) else "-"


def sparkline(points: tuple[float, ...], cells: int) -> str:
    """A curve in so many cells at most, each the mean of its points; "" of fewer than two."""
    known = np.array([point for point in points if np.isfinite(point)])
    if len(known) < 2:
        return ""
    edges = np.linspace(0, len(known), min(cells, len(known)) + 1).astype(int)
    means = np.array([known[a:b].mean() for a, b in pairwise(edges)])
    low, high = float(means.min()), float(means.max())
    level = (means - low) / (high - low) if high > low else np.zeros(len(means))
    return "".join(_BARS[round(float(x) * (len(_BARS) - 1))] for x in level)


def _missing(frame: LiveFrame, columns: int) -> list[Text]:
    """Why a figure is not there, each reason once and in one line."""
    said: dict[str, list[str]] = {}
    for title, now, _, so_far in _ROWS:
        for found in (frame.so_far.get(so_far), frame.recent.get(now)):
            if isinstance(found, Missing) and title not in said.setdefault(found.reason, []):
                said[found.reason].append(title)
    return [
        Text(_clauses(f"no {', '.join(titles)}: {printable(reason)}", columns), "yellow")
        for reason, titles in said.items()
        if titles
    ]


def _clauses(text: str, columns: int) -> str:
    """As many whole clauses as fit into a line, two at the least: what, and why."""
    ends = [found.start() for found in re.finditer(r"[:;] | \(", text)][1:]
    ends = [end for end in ends if text.count("(", 0, end) == text.count(")", 0, end)]
    fitting = [end for end in (*ends, len(text)) if end <= columns]
    return text[: max(fitting, default=min(ends, default=len(text)))]


def _shown_devices(frame: LiveFrame) -> list[Gauges]:
    """The accelerators; where there is none the program and the CPUs."""
    accelerators = [one for one in frame.gauges if one.device.kind == "gpu"]
    return accelerators or [one for one in frame.gauges if one.device.kind in ("cpu", "process")]


def _devices(frame: LiveFrame) -> list[RenderableType]:
    shown = _shown_devices(frame)
    if not shown:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("device", overflow="fold")
    used = [g for g in _GAUGES if any(g[0] in one.values for one in shown)]
    for _, title, _ in used:
        table.add_column(title, justify="right", no_wrap=True)
    for number, one in enumerate(shown[:_MOST_DEVICES]):
        called = printable(one.device.name)
        name = f"{number} {called}" if one.device.kind == "gpu" else called
        cells = [said(one.values[c]) if c in one.values else "-" for c, _, said in used]
        table.add_row(Text(name), *cells)
    more = len(shown) - _MOST_DEVICES
    return [Text(), table, *([Text(f"and {more} more", "dim")] if more > 0 else [])]


def _ranks(frame: LiveFrame) -> list[Text]:
    if len(frame.ranks) < 2:
        return []
    slowest = sorted(frame.ranks.items(), key=lambda one: one[1])
    said = ", ".join(f"{rank}: {done:,}" for rank, done in slowest[:_MOST_RANKS])
    more = f", and {len(slowest) - _MOST_RANKS} more" if len(slowest) > _MOST_RANKS else ""
    return [Text(f"steps by rank, the slowest first: {said}{more}", "dim")]


def _alerts(frame: LiveFrame, room: int) -> list[RenderableType]:
    parts: list[RenderableType] = [Text()]
    if not frame.alerts:
        parts.append(Text(f"no alert ({printable(', '.join(frame.rules))})", "dim"))
    left_out = len(frame.alerts) - room
    if left_out > 0:
        parts.append(Text(f"{left_out} earlier alerts", "dim"))
    for alert in frame.alerts[-room:]:
        when = _clock(frame, alert.t_ns)
        seen = "" if alert.was_told else "  (seen now, not told during the run)"
        parts.append(Text.assemble((f"{when} ! ", "red"), printable(alert.said), (seen, "dim")))
    unjudged = [f"{rule} ({why})" for rule, why in frame.unjudged.items()]
    if unjudged:
        parts.append(Text(f"not judged: {printable('; '.join(unjudged))}", "dim"))
    return parts


def _clock(frame: LiveFrame, t_ns: int) -> str:
    """The time of day, here."""
    wall_s = (t_ns + frame.run.wall_zero_ns) / NS_PER_S
    return datetime.fromtimestamp(wall_s).astimezone().strftime("%H:%M:%S")
