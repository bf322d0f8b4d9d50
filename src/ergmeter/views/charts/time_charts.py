"""Charts over the time of a run, all on one axis: seconds since the start.

All charts have the same axis, marks and shade over uncounted time, and they zoom together.
The phase strip above them merges steps closer than a pixel into one span with its step count.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from ergmeter.errors import NotMeasurable
from ergmeter.metrics import timeline
from ergmeter.metrics.device_energy import boundary
from ergmeter.metrics.evidence.samples import sampled, why_absent
from ergmeter.units import duration, grouped, significant
from ergmeter.views.charts.chart import (
    SERIES,
    Chart,
    Scale,
    Table,
    chart_of,
    filled,
    framed,
    layer,
    nominal_colours,
    quantity,
    rounded,
    scale_for,
)
from ergmeter.views.charts.time_axis import (
    LEFT,
    NO_TITLE,
    dots,
    ground,
    line_layers,
    marks_left_out,
    marks_of,
    time_axis,
    value_axis,
    value_words,
    zoom,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.timeline import BoundedSeries
    from ergmeter.records import Device

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
        evidence.work  # noqa: B018  says why there are no steps
        raise NotMeasurable("no span was recorded")
    order = [*(_PHASES[span.phase] for span in spans), *(["marks"] if marks else [])]
    y: dict[str, Any] = {"field": "phase", "type": "nominal", "title": NO_TITLE, "sort": order}
    y |= {"scale": {"domain": order}, "axis": LEFT}
    x = time_axis(evidence)
    layers = [*ground(evidence), _span_layer(spans, x, y), _mark_points(marks, x, y)]
    described = ", ".join(f"{int(span.counts.sum())} {_PHASES[span.phase]}" for span in spans)
    spec = framed(f"phases over time: {described}", 26 * len(order), filled(layers))
    ranks = len(evidence.all_steps.lanes)
    whose = f"of the rank that told the most of {ranks}" if ranks > 1 else ""
    note = "; ".join(part for part in (whose, marks_left_out(evidence)) if part)
    table = _phase_table(spans, marks)
    return Chart("phases", "steps, phases and marks", "s", spec, table, note, on_time=True)


def _span_layer(
    spans: Sequence[timeline.PhaseSpans], x: dict[str, Any], y: dict[str, Any]
) -> dict[str, Any]:
    colours = dict(zip(_PHASES.values(), SERIES, strict=False))
    names = [_PHASES[span.phase] for span in spans]
    colour = {**nominal_colours("phase", {name: colours[name] for name in names}), "legend": None}
    encoding = {
        "x": x,
        "x2": {"field": "e"},
        "y": y,
        "color": colour,
        "stroke": colour,
        # Adjacent steps alternate in shade: a line between them would hide short ones.
        "opacity": {"condition": {"test": "datum.odd === 1", "value": 0.65}, "value": 1},
        "tooltip": [
            {"field": "phase", "title": "phase"},
            quantity("t", "from, s", format=".6~g"),
            quantity("e", "to, s", format=".6~g"),
            quantity("spans", "spans"),
        ],
    }
    mark = {"type": "rect", "clip": True, "height": {"band": 0.7}, "strokeWidth": 0.5}
    return layer("points", _span_rows(spans), mark, encoding, params=[zoom()])


def _span_rows(spans: Sequence[timeline.PhaseSpans]) -> list[dict[str, Any]]:
    return [
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


def _phase_table(spans: Sequence[timeline.PhaseSpans], marks: Sequence[dict[str, Any]]) -> Table:
    phases = (
        (
            _PHASES[span.phase],
            str(int(span.counts.sum())),
            f"{significant(float(span.start_s.min()))} s",
            f"{significant(float(span.end_s.max()))} s",
        )
        for span in spans
    )
    named = (
        (f"mark {mark['name']}", "", f"{significant(mark['t'])} s", mark["detail"])
        for mark in marks
    )
    return Table(("phase", "spans", "first from", "last to"), (*phases, *named))


def _mark_points(
    marks: list[dict[str, Any]], x: dict[str, Any], y: dict[str, Any]
) -> dict[str, Any]:
    words = [
        {"field": "name", "title": "mark"},
        {"field": "detail", "title": "detail"},
        quantity("t", "s", format=".6~g"),
    ]
    rows = [{**mark, "phase": "marks"} for mark in marks]
    triangle = {"type": "point", "shape": "triangle-down", "filled": True, "size": 70}
    triangle |= {"color": "var(--mark)", "clip": True}
    return layer("named_marks", rows, triangle, {"x": x, "y": y, "tooltip": words})


_LINES = 8  # that can be told apart
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
            _Column("sm_frac", "multiprocessors"),
            _Column("tensor_frac", "tensor pipes"),
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
    _Kind(
        "disk",
        "the node's disks",
        "B/s",
        (
            _Column("disk_read_bytes", "read", "node", is_counter=True),
            _Column("disk_written_bytes", "written", "node", is_counter=True),
        ),
        is_stepped=True,
    ),
    _Kind(
        "network",
        "the node's network",
        "B/s",
        (
            _Column("net_received_bytes", "received", "node", is_counter=True),
            _Column("net_sent_bytes", "sent", "node", is_counter=True),
        ),
        is_stepped=True,
    ),
)
IDS = ("phases", "power", "energy", *(kind.id for kind in _KINDS if kind.columns), "steps", "loss")
_Lines: TypeAlias = "tuple[dict[str, BoundedSeries], str]"  # lines by label, and a note


def time_charts(evidence: Evidence, only: Collection[str] = IDS) -> list[Chart]:
    """Return all charts over time, or some, in page order."""
    draws = {kind: partial(_line_chart, evidence, kind) for kind in _KINDS if kind.id in only}
    charts = [
        chart_of(kind.id, kind.title, kind.unit, draw, on_time=True) for kind, draw in draws.items()
    ]
    if "phases" in only:
        draw = partial(phase_chart, evidence)
        charts.insert(0, chart_of("phases", "steps, phases and marks", "", draw, on_time=True))
    return charts


def _sample_lines(evidence: Evidence, kind: _Kind) -> _Lines:
    """Return lines by label. Raises NotMeasurable if there are none."""
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
    return why_absent(device, column.name) or f"{device.name} did not say it in this run"


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


def _power_lines(evidence: Evidence) -> _Lines:
    devices = boundary(evidence)
    lines = _device_lines(evidence, devices, timeline.power_line)
    if not lines:
        raise NotMeasurable(f"{devices[0].name} tells energy and no power")
    return lines, _rest(devices)


def _energy_lines(evidence: Evidence) -> _Lines:
    devices = boundary(evidence)
    return _device_lines(evidence, devices, timeline.energy_line), _rest(devices)


def _device_lines(
    evidence: Evidence, devices: Sequence[Device], line_of: Callable[..., BoundedSeries | None]
) -> dict[str, BoundedSeries]:
    """Return the lines of the first devices by name; a single device by its full name."""
    points = _POINTS // min(_LINES, len(devices))
    names = names_of(evidence, devices)
    if len(devices) == 1:
        names = {devices[0].id: devices[0].name}
    lines = {
        names[device.id]: line_of(evidence, device, points=points) for device in devices[:_LINES]
    }
    return {name: line for name, line in lines.items() if line is not None}


def _rest(devices: Sequence[Device]) -> str:
    return f"{_LINES} of {len(devices)} devices are shown" if len(devices) > _LINES else ""


def _step_lines(evidence: Evidence) -> _Lines:
    line = timeline.step_line(evidence, points=_POINTS)
    way = "from one printed line" if evidence.from_output else "from each step's start"
    return {"step time": line}, f"{way} to the next, the warm-up included"


def _loss_lines(evidence: Evidence) -> _Lines:
    line = timeline.loss_line(evidence, points=_POINTS)
    return {"loss": line}, "as printed: no step tells it" if line.is_printed else ""


_LINES_OF: dict[str, Callable[[Evidence], _Lines]] = {
    "power": _power_lines,
    "energy": _energy_lines,
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
        raise NotMeasurable("nothing was read of it in this run")
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
    axes = {
        "x": time_axis(evidence),
        "y": value_axis(rows, scale, has_zero=kind.has_zero),
        "color": {
            "field": "s",
            "type": "nominal",
            "scale": {"domain": list(lines)},
            # For files: the page has legends that wrap.
            "legend": {"columns": {"expr": "max(1, floor(width / 170))"}},
        },
    }
    mark = {
        "strokeWidth": 1.5,
        "interpolate": "step-before" if _is_stepped(evidence, kind) else "linear",
        "point": dots(max(line.readings for line in lines.values()), 14),
    }
    words = [
        {"field": "s", "title": "line"},
        value_words(scale),
        quantity("t", "s", format=".6~g"),
    ]
    layers = [*ground(evidence), *line_layers(rows, mark, axes, words)]
    legend = tuple((label, f"c{number}") for number, label in enumerate(lines, start=1))
    return Chart(
        kind.id,
        kind.title,
        scale.unit,
        framed(description, 170, layers),
        _table(lines, scale),
        note,
        on_time=True,
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
