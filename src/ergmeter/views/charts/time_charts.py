"""Charts over the time of a run, all on one axis: seconds since the start.

All charts have the same axis, marks and shade over uncounted time, and they zoom together.
The phase strip above them merges steps closer than a pixel into one span with its step count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from ergmeter.errors import NotMeasurable
from ergmeter.metrics import timeline
from ergmeter.metrics.device_energy import boundary
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.samples import sampled, why_absent
from ergmeter.metrics.timeline import BoundedSeries
from ergmeter.records import Device, Mark
from ergmeter.units import duration, grouped, significant
from ergmeter.views.charts import vega
from ergmeter.views.charts.chart import SERIES, Chart, Scale, Table, chart_of, rounded, scale_for

# The background that all charts share.


_MOST_MARKS = 200
_FIRST = (*("alert", "alert_over", "alert_failed", "alarm_failed"), *("stop_asked", "stop_failed"))
# Marks that are not shown.
PLAIN_MARKS = frozenset(
    {"opened", "closed", "ended", "ticks_missed", "alert_unjudged"}
    | {"device_used", "device_unused", "device_unknown"}
)


def time_axis(evidence: Evidence) -> vega.Channel:
    """Return the time axis, from the run's start to its end."""
    ends_s = (0, round(evidence.watched.duration_s, 6))
    return vega.axis(
        "t", "s since the run began", domain=ends_s, nice=False, grid=False, tick_px=70
    )


def _ground(evidence: Evidence) -> list[vega.Layer]:
    """Return the background: shade over uncounted time, and marks."""
    x = time_axis(evidence)
    shades = [{"t": start_s, "e": end_s} for start_s, end_s in timeline.uncounted_s(evidence)]
    shade = vega.rect("uncounted", shades, x=x, x2="e", color="shade", clip=True)
    marks = partial(vega.rule, "marks", marks_of(evidence), color="mark", strokeDash=[3, 3])
    return vega.filled([shade, marks(x=x, clip=True)])


def marks_of(evidence: Evidence) -> vega.Rows:
    """Return the marks to show, alerts preferred, in order of time."""
    marks = _worth_showing(evidence)
    first = sorted(marks, key=lambda mark: mark.name not in _FIRST)[:_MOST_MARKS]
    return [
        {
            "t": round(timeline.seconds(evidence, mark.t_ns), 6),
            "name": mark.name,
            "detail": mark.detail[:200],
        }
        for mark in sorted(first, key=lambda mark: mark.t_ns)
    ]


def _worth_showing(evidence: Evidence) -> list[Mark]:
    return [mark for mark in evidence.run.marks if mark.name not in PLAIN_MARKS]


# Phase strip.


_PHASES = {
    "train": "steps",
    "eval": "evaluation",
    "checkpoint": "checkpoint",
    "data": "data wait",
    "prefill": "prompts",
    "decode": "answers",
    "idle": "idle",
}


def phase_chart(evidence: Evidence) -> Chart:
    """Return spans by phase, and marks. Raises NotMeasurable without spans."""
    spans = timeline.phase_spans(evidence)
    marks = marks_of(evidence)
    if not spans:
        evidence.work  # noqa: B018  raises the reason why there are no steps
        raise NotMeasurable("no span was recorded")
    order = [*(_PHASES[span.phase] for span in spans), *(["marks"] if marks else [])]
    y = vega.axis("phase", vega.NO_TITLE, kind="nominal", sort=order, domain=order, **vega.LEFT)
    x = time_axis(evidence)
    layers = [*_ground(evidence), _span_layer(spans, x, y), _mark_points(marks, x, y)]
    described = ", ".join(f"{span.total} {_PHASES[span.phase]}" for span in spans)
    spec = vega.framed(f"phases over time: {described}", 26 * len(order), vega.filled(layers))
    ranks = len(evidence.all_steps.lanes)
    left_out = len(_worth_showing(evidence)) - _MOST_MARKS
    notes = [f"of the rank with the most spans of {ranks}"] if ranks > 1 else []
    notes += [f"{left_out} more marks are not shown"] if left_out > 0 else []
    return Chart(unit="s", spec=spec, table=_phase_table(spans, marks), note="; ".join(notes))


def _span_layer(
    spans: Sequence[timeline.PhaseSpans], x: vega.Channel, y: vega.Channel
) -> vega.Layer:
    colours = dict(zip(_PHASES.values(), SERIES, strict=False))
    names = [_PHASES[span.phase] for span in spans]
    colour = vega.by_value("phase", {name: colours[name] for name in names}, legend=False)
    words = [
        *vega.tooltip({"phase": "phase"}),
        vega.quantity("t", "from, s", format=".6~g"),
        vega.quantity("e", "to, s", format=".6~g"),
        vega.quantity("spans", "spans"),
    ]
    rows = [
        {
            "t": round(start, 6),
            "e": round(end, 6),
            "phase": _PHASES[span.phase],
            "spans": count,
            "odd": number % 2,
        }
        for span in spans
        for number, (start, end, count) in enumerate(
            zip(span.start_s.tolist(), span.end_s.tolist(), span.counts.tolist(), strict=True)
        )
    ]
    return vega.rect(
        "points",
        rows,
        x=x,
        x2="e",
        y=y,
        color=colour,
        stroke=colour,
        # Adjacent steps alternate in shade: a line between them would hide short ones.
        opacity=vega.constant(1, when=("datum.odd === 1", 0.65)),
        tooltip=words,
        params=[vega.zoom()],
        clip=True,
        band=0.7,
        strokeWidth=0.5,
    )


def _phase_table(spans: Sequence[timeline.PhaseSpans], marks: vega.Rows) -> Table:
    phases = (
        (
            _PHASES[span.phase],
            str(span.total),
            f"{significant(span.first_s)} s",
            f"{significant(span.last_s)} s",
        )
        for span in spans
    )
    named = (
        (f"mark {mark['name']}", "", f"{significant(mark['t'])} s", mark["detail"])
        for mark in marks
    )
    return Table(("phase", "spans", "first from", "last to"), (*phases, *named))


def _mark_points(marks: vega.Rows, x: vega.Channel, y: vega.Channel) -> vega.Layer:
    rows = [{**row, "phase": "marks"} for row in marks]
    words = [
        *vega.tooltip({"name": "mark", "detail": "detail"}),
        vega.quantity("t", "s", format=".6~g"),
    ]
    triangles = partial(vega.point, shape="triangle-down", filled=True, size=70, color="mark")
    return triangles("named_marks", rows, x=x, y=y, tooltip=words, clip=True)


# Lines.


_LINES = 8  # that can be distinguished
_POINTS = 1600  # of a chart, whatever the run's length


@dataclass(frozen=True, slots=True)
class _Column:
    """A sample column of one kind of device, with the label of its line."""

    name: str
    label: str
    kind: str = "gpu"
    is_counter: bool = False
    since: str = ""  # the column with the start of its first interval


@dataclass(frozen=True, slots=True)
class _Kind:
    """A chart of lines over time; without columns, its lines come from a function."""

    id: str
    title: str
    unit: str
    columns: tuple[_Column, ...] = ()
    has_zero: bool = True
    is_stepped: bool = False  # a reading holds for the interval that ends with it


def _node_rates(id_: str, title: str, **labels: str) -> _Kind:
    """Return the chart of a node's counters, each by its growth per second."""
    columns = (_Column(name, label, "node", is_counter=True) for name, label in labels.items())
    return _Kind(id_, title, "B/s", tuple(columns), is_stepped=True)


_KINDS = (
    _Kind("power", "power", "W"),
    _Kind("energy", "energy since the first reading", "J"),
    _Kind(
        "memory",
        "memory",
        "B",
        (
            _Column("memory_bytes", "in use by all"),
            _Column("process_bytes", "the program's"),
            _Column("reserved_bytes", "reserved by the allocator", "allocator"),
            _Column("allocated_bytes", "in tensors", "allocator"),
            _Column("memory_bytes", "on the host", "process"),
        ),
    ),
    _Kind(
        "activity",
        "activity",
        "frac",
        (
            _Column("busy_frac", "busy (GPU util)"),
            _Column("sm_frac", "SMs"),
            _Column("tensor_frac", "tensor cores"),
            _Column("dram_frac", "memory bandwidth"),
        ),
        is_stepped=True,
    ),
    _Kind("clocks", "clock", "Hz", (_Column("clock_hz", "clock"),), has_zero=False),
    _Kind(
        *("temperature", "temperature", "C"),
        (_Column("temperature_c", "temperature"),),
        has_zero=False,
    ),
    _Kind("steps", "step time", "s", is_stepped=True),  # each holds until its end
    _Kind("loss", "loss", "", has_zero=False),
    _Kind(
        "node",
        "the node's CPU, beside accelerators",
        "frac",
        (
            _Column("busy_frac", "CPU of the node", "node", since="disk_read_bytes"),
            _Column("iowait_frac", "waiting for storage", "node", since="disk_read_bytes"),
            _Column("busy_frac", "accelerator busy"),
        ),
        is_stepped=True,
    ),
    _node_rates("disk", "the node's disks", disk_read_bytes="read", disk_written_bytes="written"),
    _node_rates(
        "network", "the node's network", net_received_bytes="received", net_sent_bytes="sent"
    ),
)
IDS = ("phases", "power", "energy", *(kind.id for kind in _KINDS if kind.columns), "steps", "loss")
_Lines: TypeAlias = "tuple[dict[str, BoundedSeries], str]"  # lines by label, and a note


def time_charts(evidence: Evidence, only: Collection[str] = IDS) -> list[Chart]:
    """Return all charts over time, or some, in page order."""
    draws: dict[_Kind, Callable[[], Chart]] = {
        _Kind("phases", "steps, phases and marks", ""): partial(phase_chart, evidence),
        **{kind: partial(_line_chart, evidence, kind) for kind in _KINDS},
    }
    return [
        chart_of(kind.id, kind.title, kind.unit, draw, on_time=True)
        for kind, draw in draws.items()
        if kind.id in only
    ]


def _sample_lines(evidence: Evidence, kind: _Kind) -> _Lines:
    """Return the lines of a chart's sample columns. Raises NotMeasurable if there are none."""
    wanted = [
        (device, column)
        for column in kind.columns
        for device in evidence.devices(column.kind)
        if device.id in evidence.series(column.name)
    ]
    first = kind.columns[0]
    is_there = any(column.kind == first.kind for _, column in wanted)
    # A machine without an accelerator has a memory of its own.
    if not is_there and (kind.id != "memory" or not wanted):
        raise NotMeasurable(_why_none(evidence, first))
    note = ""
    if len(wanted) > _LINES:
        main = wanted[0][1]
        wanted = [line for line in wanted if line[1] == main]
        note = f"of each device, {main.label}; `erg export` has the rest"
    if len(wanted) > _LINES:
        note += f"; {_LINES} of {len(wanted)} devices are shown"
        wanted = wanted[:_LINES]
    points = _POINTS // max(1, len(wanted))
    devices_by_kind = grouped((column.kind, device.id) for device, column in wanted)
    has_several_columns = len({column for _, column in wanted}) > 1
    names = names_of(evidence, [device for device, _ in wanted])
    lines: dict[str, BoundedSeries] = {}
    for device, column in wanted:
        line = timeline.line_of(
            evidence,
            device,
            column.name,
            points=points,
            is_counter=column.is_counter,
            since=column.since,
        )
        if line is not None:
            label = column.label
            if len(devices_by_kind[column.kind]) > 1:
                label = names[device.id] + (f": {label}" if has_several_columns else "")
            lines[label] = line
    return lines, note


def _why_none(evidence: Evidence, column: _Column) -> str:
    device = sampled(evidence, column.kind)[0]
    return why_absent(device, column.name) or f"{device.name} did not report it in this run"


def names_of(evidence: Evidence, devices: Iterable[Device]) -> dict[str, str]:
    """Return device names by id, unique across nodes."""
    names = {device.id: _short_name(device) for device in devices}
    hosts = {
        device.id: str(writer.header.get("host"))
        for writer in evidence.run.writers
        for device in writer.devices
    }
    for more in (hosts, {id_: id_ for id_ in names}):
        counts = Counter(names.values())
        names = {
            id_: name if counts[name] == 1 else f"{name} ({more.get(id_, id_)})"
            for id_, name in names.items()
        }
    return names


def _short_name(device: Device) -> str:
    """Return the name of a device, by its index if the driver has one."""
    index = device.facts.get("index")
    word = {"gpu": "GPU", "cpu": "CPU"}.get(device.kind, device.kind)
    return f"{word} {device.id[:12] if index is None else index}"


def _boundary_lines(evidence: Evidence, line_of: Callable[..., BoundedSeries | None]) -> _Lines:
    """Return lines by name of the devices in the run's energy; one alone by its full name."""
    devices = boundary(evidence)
    points = _POINTS // min(_LINES, len(devices))
    names = names_of(evidence, devices)
    if len(devices) == 1:
        names = {devices[0].id: devices[0].name}
    lines = {
        names[device.id]: line_of(evidence, device, points=points) for device in devices[:_LINES]
    }
    present = {name: line for name, line in lines.items() if line is not None}
    if not present:
        raise NotMeasurable(f"{devices[0].name} reports energy but no power")
    rest = f"{_LINES} of {len(devices)} devices are shown" if len(devices) > _LINES else ""
    return present, rest


def _step_lines(evidence: Evidence) -> _Lines:
    line = timeline.step_line(evidence, points=_POINTS)
    way = "from one printed line" if evidence.from_output else "from each step's start"
    return {"step time": line}, f"{way} to the next, the warm-up included"


def _loss_lines(evidence: Evidence) -> _Lines:
    line = timeline.loss_line(evidence, points=_POINTS)
    return {"loss": line}, "as printed: no step has a loss" if line.is_printed else ""


_LINES_OF: dict[str, Callable[[Evidence], _Lines]] = {
    "power": partial(_boundary_lines, line_of=timeline.power_line),
    "energy": partial(_boundary_lines, line_of=timeline.energy_line),
    "steps": _step_lines,
    "loss": _loss_lines,
}


def _is_stepped(evidence: Evidence, kind: _Kind) -> bool:
    """True if a value holds for the interval that ends with it: also power by a counter alone."""
    if kind.id != "power":
        return kind.is_stepped
    powers = evidence.series("power_w")
    return not any(device.id in powers for device in boundary(evidence))


def _line_chart(evidence: Evidence, kind: _Kind) -> Chart:
    lines_of = _LINES_OF.get(kind.id, partial(_sample_lines, kind=kind))
    lines, note = lines_of(evidence)
    if not lines:
        raise NotMeasurable("it has no readings in this run")
    scale = scale_for(kind.unit, max(line.highest[0] for line in lines.values()))
    rows = [
        {"t": round(t_s, 6), "v": rounded(value, scale), "s": label}
        for label, line in lines.items()
        for t_s, value in zip(line.t_s.tolist(), line.values.tolist(), strict=True)
    ]
    if any(line.is_bounded for line in lines.values()):
        note = "; ".join(filter(None, (note, "lowest and highest of each moment are drawn")))
    unbroken = max(line.unbroken for line in lines.values())
    if unbroken:
        note += f"; {unbroken} gaps in the readings are too many to be drawn"
    description = f"{kind.title} over time: " + "; ".join(
        f"{label} from {scale.text(line.lowest[0])} to {scale.text(line.highest[0])}"
        for label, line in lines.items()
    )
    layers = vega.line_layers(
        rows,
        x=time_axis(evidence),
        y=vega.value_axis(rows, scale, has_zero=kind.has_zero),
        color=vega.by_value("s", list(lines), legend=vega.WRAPPED_LEGEND),
        tooltip=[
            *vega.tooltip({"s": "line"}),
            vega.value_words(scale),
            vega.quantity("t", "s", format=".6~g"),
        ],
        strokeWidth=1.5,
        interpolate="step-before" if _is_stepped(evidence, kind) else "linear",
        point=vega.dots(max(line.readings for line in lines.values()), 14),
    )
    legend = tuple((label, f"c{number}") for number, label in enumerate(lines, start=1))
    return Chart(
        unit=scale.unit,
        spec=vega.framed(description, 170, [*_ground(evidence), *layers]),
        table=_table(lines, scale),
        note=note,
        legend=() if list(lines) == [kind.title] else legend,
    )


def _table(lines: dict[str, BoundedSeries], scale: Scale) -> Table:
    head = ("line", "readings", "lowest", "at", "highest", "at")
    rows = tuple(
        (
            label,
            f"{line.readings:,}",
            scale.text(line.lowest[0]),
            duration(line.lowest[1]),
            scale.text(line.highest[0]),
            duration(line.highest[1]),
        )
        for label, line in lines.items()
    )
    return Table(head, rows)
