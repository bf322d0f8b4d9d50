"""The live view of a run: 60 to 200 terminal columns, or plain lines without a terminal.

In a narrow terminal, basis labels are dropped first, then sparklines; numbers are never cut. An
unknown value keeps its row with the reason, as far as whole clauses fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ergmeter.metrics.catalog import in_view
from ergmeter.metrics.live.frame import Gauges, LiveFrame
from ergmeter.records import Missing, Reading, Result, value_text
from ergmeter.runlog.reader import CUT_OFF, FINISHED, RUNNING
from ergmeter.units import NS_PER_S, duration, grouped, printable, scaled, significant, sparkline

_FOR_BASES = 72  # columns from which they fit
_CURVE = (10, 80)  # fewest and most cells
_GAP = 2
_MOST_DEVICES = 16
_MOST_RANKS = 8
_MOST_ALERTS = 6
_OLD_S = 30.0  # totals older than this show their age
_GAUGES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("power_w", "power", lambda x: f"{x:.0f} W"),
    ("memory_bytes", "memory", lambda x: scaled(x, "B")),
    ("temperature_c", "heat", lambda x: f"{x:.0f} °C"),
    ("busy_frac", "busy", lambda x: f"{x * 100:.0f} %"),
)
_LOSS = "training.loss"  # the frame has it beside the metrics
REPLACED = "replaced: another run was recorded here, and is shown"
_CALLED = {RUNNING: "running", CUT_OFF: "cut off: its writer is gone"}


def page(frame: LiveFrame, *, columns: int, lines: int | None = None) -> RenderableType:
    """Render the live view in `columns` columns and at most `lines` lines."""
    parts: list[RenderableType] = [*_head(frame), Text(), _figures(frame, columns)]
    parts += [*_age(frame), *_missing(frame, columns)]
    parts += _devices(frame)
    parts += _ranks(frame)
    # Keep the last lines, and of the rest as many as fit.
    room = _MOST_ALERTS if lines is None else max(2, min(_MOST_ALERTS, lines - 24))
    parts += _alerts(frame, room)
    return Group(*parts)


def line(frame: LiveFrame) -> str:
    """Return the live view in one line, for a file or a pipe."""
    parts = [_progress(frame)]
    for key, at in in_view("watch").items():
        reading = frame.recent.get(key)
        if isinstance(reading, Reading):
            is_rate = reading.unit == "tokens/s"
            parts.append(value_text(reading) if is_rate else f"{at.label} {value_text(reading)}")
        elif key == _LOSS and frame.loss is not None:
            parts.append(f"loss {significant(frame.loss)}")
    devices = _shown_devices(frame)
    for column, title, format_value in _GAUGES[1:3]:
        most = [device.values[column] for device in devices if column in device.values]
        if most:
            parts.append(f"{title} {format_value(max(most))}")
    for key, title in (("energy.joules_per_token", "J/token"), ("utilization.mfu_frac", "MFU")):
        reading = frame.so_far.get(key)
        if isinstance(reading, Reading):
            word = ", provisional" if frame.is_provisional else ""
            parts.append(f"{title} so far {value_text(reading)} ({reading.basis}{word})")
    parts.append(_eta(frame))
    return f"{_clock(frame, frame.newest_ns)} " + " | ".join(parts)


def alert_line(frame: LiveFrame, number: int) -> str:
    """Return an alert as one line."""
    alert = frame.alerts[number]
    return f"{_clock(frame, alert.t_ns)} alert: {printable(alert.with_ranks)}"


def _head(frame: LiveFrame) -> list[Text]:
    style = {RUNNING: "cyan", FINISHED: "green"}.get(frame.status, "red")
    called = printable(_CALLED.get(frame.status, frame.status))
    title = Text.assemble((printable(frame.run.name), "bold"), "  ", (called, style))
    title.append(f"  {duration(frame.elapsed_s)}", "dim")
    if frame.trainings > 1:
        title.append(f"  training {frame.training} of {frame.trainings} (--training)", "dim")
    status = Text(f"{_progress(frame)}, {_eta(frame)}")
    if frame.total and frame.done is not None:
        share = min(1.0, frame.done / frame.total)
        filled = round(share * 20)
        bar = "█" * filled + "░" * (20 - filled)
        status = Text.assemble((bar, "cyan"), f" {share * 100:.0f} %  ", status)
    return [title, *([Text(REPLACED, "yellow")] if frame.replaced else []), status]


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
    if frame.eta_s is None:
        return f"no ETA: {printable(frame.no_eta)}"
    return f"{duration(frame.eta_s)} to go"


def _figures(frame: LiveFrame, columns: int) -> Table:
    with_bases = columns >= _FOR_BASES
    rows: list[list[str]] = []
    for key, at in in_view("watch").items():
        total = frame.so_far.get(key)
        printed = "as printed" if key == _LOSS and frame.loss_is_printed else ""
        basis = total.basis if isinstance(total, Reading) else printed
        figures = [_now(frame, key), _value(total) if key in in_view("so far") else ""]
        rows.append([at.label, *figures, *([basis] if with_bases else [])])
    so_far_head = "so far (provisional)" if frame.is_provisional else "so far"
    heads = ["", "recent", so_far_head, ""][: len(rows[0])]
    # Curves get the remaining width.
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
    for key, row in zip(in_view("watch"), rows, strict=True):
        if cells >= _CURVE[0]:
            row.insert(2, sparkline(frame.curves.get(key.rpartition(".")[2], ()), cells))
        table.add_row(*row)
    return table


def _age(frame: LiveFrame) -> list[Text]:
    old_s = (frame.newest_ns - frame.so_far_ns) / NS_PER_S
    if not frame.so_far or old_s < _OLD_S:
        return []
    return [Text(f"so far: as of {duration(old_s)} ago", "dim")]


def _now(frame: LiveFrame, key: str) -> str:
    if key == _LOSS:
        return "-" if frame.loss is None else significant(frame.loss)
    return _value(frame.recent.get(key)) if key in in_view("recent") else ""


def _value(result: Result | None) -> str:
    return value_text(result) if isinstance(result, Reading) else "-"


def _missing(frame: LiveFrame, columns: int) -> list[Text]:
    """Return the reasons of absent metrics, each once."""
    by_reason = grouped(
        (result.reason, at.label)
        for key, at in in_view("watch").items()
        for result in (frame.so_far.get(key), frame.recent.get(key))
        if isinstance(result, Missing)
    )
    return [
        Text(_clauses(f"no {', '.join(titles)}: {printable(reason)}", columns), "yellow")
        for reason, titles in by_reason.items()
    ]


def _clauses(text: str, columns: int) -> str:
    """Return as many whole clauses as fit into a line, at least two."""
    ends = [match.start() for match in re.finditer(r"[:;] | \(", text)][1:]
    ends = [end for end in ends if text.count("(", 0, end) == text.count(")", 0, end)]
    fitting = [end for end in (*ends, len(text)) if end <= columns]
    return text[: max(fitting, default=min(ends, default=len(text)))]


def _shown_devices(frame: LiveFrame) -> list[Gauges]:
    """Return the accelerators, else the process and the CPUs."""
    accelerators = [gauge for gauge in frame.gauges if gauge.device.kind == "gpu"]
    return accelerators or [
        gauge for gauge in frame.gauges if gauge.device.kind in ("cpu", "process")
    ]


def _devices(frame: LiveFrame) -> list[RenderableType]:
    devices = _shown_devices(frame)
    if not devices:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("device", overflow="fold")
    used = [g for g in _GAUGES if any(g[0] in device.values for device in devices)]
    for _, title, _ in used:
        table.add_column(title, justify="right", no_wrap=True)
    for number, device in enumerate(devices[:_MOST_DEVICES]):
        called = printable(device.device.name)
        name = f"{number} {called}" if device.device.kind == "gpu" else called
        cells = [
            format_value(device.values[c]) if c in device.values else "-"
            for c, _, format_value in used
        ]
        table.add_row(Text(name), *cells)
    more = len(devices) - _MOST_DEVICES
    return [Text(), table, *([Text(f"and {more} more", "dim")] if more > 0 else [])]


def _ranks(frame: LiveFrame) -> list[Text]:
    if len(frame.ranks) < 2:
        return []
    slowest = sorted(frame.ranks.items(), key=lambda entry: entry[1])
    counts = ", ".join(f"{rank}: {done:,}" for rank, done in slowest[:_MOST_RANKS])
    more = f", and {len(slowest) - _MOST_RANKS} more" if len(slowest) > _MOST_RANKS else ""
    return [Text(f"steps by rank, the slowest first: {counts}{more}", "dim")]


def _alerts(frame: LiveFrame, room: int) -> Iterator[RenderableType]:
    yield Text()
    if not frame.alerts:
        yield Text(f"no alert ({printable(', '.join(frame.rules))})", "dim")
    left_out = len(frame.alerts) - room
    if left_out > 0:
        yield Text(f"{left_out} earlier alerts", "dim")
    for alert in frame.alerts[-room:]:
        when = _clock(frame, alert.t_ns)
        timing = "" if alert.was_told else "  (found now, not reported during the run)"
        yield Text.assemble((f"{when} ! ", "red"), printable(alert.with_ranks), (timing, "dim"))
    unjudged = [f"{rule} ({why})" for rule, why in frame.unjudged.items()]
    if unjudged:
        yield Text(f"not judged: {printable('; '.join(unjudged))}", "dim")


def _clock(frame: LiveFrame, t_ns: int) -> str:
    """Return the local time of day."""
    wall_s = (t_ns + frame.run.wall_zero_ns) / NS_PER_S
    return datetime.fromtimestamp(wall_s).astimezone().strftime("%H:%M:%S")
