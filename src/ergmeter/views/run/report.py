"""`erg report`: the sections of a run's page, and the document of its memory.

Each value has its interval, basis and window, and on the page opens to its formula and inputs.
Absent values keep their row with the reason. The environment is read from the headers of the run:
the machine that makes the report may be another one.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ergmeter.errors import NotMeasurable
from ergmeter.metrics import timeline
from ergmeter.metrics.catalog import catalogue, every_metric, expected_in, in_view
from ergmeter.metrics.checks import fitness
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.explain.waterfall import explain
from ergmeter.metrics.live.recent_window import remaining
from ergmeter.records import Device, Missing, Reading, Summary, interval_text, or_none, value_text
from ergmeter.runlog.reader import RUNNING, Run
from ergmeter.units import BARS, duration, grouped, number_of, scaled
from ergmeter.version import __version__
from ergmeter.views.charts.chart import Chart
from ergmeter.views.charts.run_charts import figure_charts
from ergmeter.views.charts.time_charts import time_charts
from ergmeter.views.document import (
    ChartGrid,
    ChartPart,
    Document,
    HeadlinePart,
    Items,
    MetricCard,
    MetricCards,
    Paragraph,
    Part,
    Section,
    Table,
    TimeZoom,
)
from ergmeter.views.reading_text import accelerators, label_lines, reader_notes, short_reason
from ergmeter.views.run.check import finding_notes
from ergmeter.views.run.explain import CHANGES, change_table, remark_notes

_LONGEST_FACT = 300  # characters
_MOST_DEVICES = 16


def page_sections(evidence: Evidence, summary: Summary) -> list[Section]:
    """Return the sections of the page."""
    run, on_time, explained = evidence.run, time_charts(evidence), explain(evidence)
    figures = {figure.id: figure for figure in figure_charts(evidence, summary, explained)}
    spent = [figures["time_spent"], figures["energy_spent"]]
    drawn = tuple(chart for chart in spent if chart.spec is not None)
    changes = change_table(explained)
    sections: dict[str, tuple[str, Sequence[Part]]] = {
        "figures": ("figures", _figures(run, summary)),
        "progress": ("progress", _progress(evidence, summary)),
        "ladder-section": ("the ladder", _charts(run, [figures["ladder"]])),
        "waterfall-section": (
            "where the rest of the peak went",
            (
                *_charts(run, [figures["waterfall"]]),
                *remark_notes(explained),
                *([Section("changes", CHANGES, changes)] if changes else []),
            ),
        ),
        "spent": ("where it went", (ChartGrid(drawn), *_absent_charts(run, spent))),
        "time": ("over time", (*_zoom(evidence, on_time), *_charts(run, on_time))),
        "steps-section": ("step times", _charts(run, [figures["step_times"]])),
        "roofline-section": ("roofline", _charts(run, [figures["roofline"]])),
        "check": ("findings", _findings(evidence)),
        "all": ("every metric", _metric_tables(summary)),
        "environment": ("environment", _environment(evidence)),
        "cite": ("how to cite", _citation(run, summary)),
    }
    return [
        Section(id_, title, tuple(parts), media=("html",))
        for id_, (title, parts) in sections.items()
        if parts
    ]


def _figures(run: Run, summary: Summary) -> list[Part]:
    window = summary.readings["time.window_s"]
    if isinstance(window, Missing):
        over = f"There is no window to compute metrics over: {window.reason}."
    else:
        over = f"The window: {window.note}. Figures are over it, unless they say otherwise."
    cards = (
        _card(key, reading)
        for key in in_view("report")
        if isinstance(reading := summary.readings[key], Reading)
    )
    missing = (
        (catalogue()[key].title, result.reason)
        for key in expected_in("report")
        if isinstance(result := summary.readings[key], Missing)
    )
    labels, notes = tuple(label_lines(run)), reader_notes(summary)
    return [
        *([Section("labels", "labels", (Table(("label", "text"), labels),))] if labels else []),
        Paragraph(over, style="dim"),
        MetricCards(tuple(cards)),
        *_reasons(missing, run),
        *([Section("to-know", "Notes", (Items(notes),))] if notes else []),
    ]


def _card(key: str, reading: Reading) -> MetricCard:
    metric = catalogue()[key]
    details = {
        "formula": metric.formula,
        "needs": ", ".join(metric.needs),
        "of this run": reading.note,
        "key": key,
    }
    return MetricCard(
        metric.title,
        value_text(reading),
        interval_text(reading),
        reading.basis,
        reading.impossible,
        tuple(details.items()),
    )


def _reasons(named_reasons: Iterable[tuple[str, str]], run: Run) -> Iterator[Paragraph]:
    """Yield absent items grouped by reason, without the messages of probes."""
    for why, titles in grouped((why, title) for title, why in named_reasons).items():
        short = short_reason(why, run)
        more = " (see the probes under Environment)" if short != why else ""
        yield Paragraph(f"Not shown: {', '.join(titles)}. Why: {short}{more}", style="dim")


def _charts(run: Run, charts: Sequence[Chart]) -> list[Part]:
    """Return the charts, those that are not drawn with their reasons below."""
    drawn = [ChartPart(chart) for chart in charts if chart.spec is not None]
    return [*drawn, *_absent_charts(run, charts)]


def _absent_charts(run: Run, charts: Sequence[Chart]) -> Iterator[Paragraph]:
    return _reasons(((chart.title, chart.reason) for chart in charts if chart.spec is None), run)


def _zoom(evidence: Evidence, charts: Sequence[Chart]) -> list[TimeZoom]:
    if all(chart.spec is None for chart in charts):
        return []
    run_s = (0.0, evidence.watched.duration_s)
    return [TimeZoom(run_s, or_none(timeline.counted_s, evidence) or run_s)]


def _progress(evidence: Evidence, summary: Summary) -> list[Paragraph]:
    """Return the progress of a running run."""
    if summary.status != RUNNING:
        return []
    try:
        return [Paragraph(remaining(evidence).text)]
    except NotMeasurable as error:
        return [Paragraph(f"Unknown: {error}", style="dim")]


def _findings(evidence: Evidence) -> list[Part]:
    verdict = fitness(evidence)
    return [HeadlinePart(text=verdict.text), *finding_notes(verdict, evidence.run)]


def _metric_tables(summary: Summary) -> list[Section]:
    results = summary.readings.items()
    rows = tuple(
        (
            *(key, value_text(reading), interval_text(reading), reading.basis),
            "; ".join(filter(None, (reading.impossible, reading.note))),
            every_metric()[key].formula,
        )
        for key, reading in results
        if isinstance(reading, Reading)
    )
    by_reason = grouped(
        (result.reason, key) for key, result in results if isinstance(result, Missing)
    )
    absent_rows = tuple((reason, ", ".join(keys)) for reason, keys in by_reason.items())
    titles = ("metric", "value", "interval", "how", "of this run", "formula")
    absent = f"{len(results) - len(rows)} that are absent, and why"
    return [
        Section("metrics", f"{len(rows)} metrics", (Table(titles, rows),), is_folded=True),
        Section("absent", absent, (Table(("why", "metrics"), absent_rows),), is_folded=True),
    ]


def _environment(evidence: Evidence) -> list[Part]:
    """Return command, host, versions, settings and devices."""
    run = evidence.run
    first = run.writers[0].header if run.writers else {}
    facts = [
        ("command", shlex.join(str(word) for word in run.header.get("command") or [])),
        ("directory", run.header.get("directory")),
        ("run", run.header.get("id")),
        ("hosts", ", ".join(dict.fromkeys(str(w.header.get("host")) for w in run.writers))),
        ("python", first.get("python")),
        ("platform", first.get("platform")),
        ("ergmeter", run.header.get("ergmeter")),
        *(_mapping("version", first.get("versions"))),
        *(_mapping("setting", evidence.settings.as_json())),
        *(_mapping("workload", run.workload)),
    ]
    rows = tuple((name, _short(fact)) for name, fact in facts if fact)
    return [
        Table(("what", "value"), rows),
        *_devices(evidence),
        *_unavailable_probes(evidence),
        *(Paragraph(f"Damaged, left out: {line}") for line in run.damage),
    ]


def _mapping(name: str, values: object) -> list[tuple[str, object]]:
    if not isinstance(values, dict):
        return []
    return [(f"{name} {key}", inner) for key, inner in values.items()]


def _short(fact: object) -> str:
    text = fact if isinstance(fact, str) else json.dumps(fact, default=str)
    return text if len(text) <= _LONGEST_FACT else f"{text[:_LONGEST_FACT]}..."


def _devices(evidence: Evidence) -> list[Section]:
    devices = [device for device in evidence.run.devices.values() if device.kind != "self"]
    rows = tuple(
        (device.name, device.kind, device.probe, device.id, _facts(evidence, device))
        for device in devices[:_MOST_DEVICES]
    )
    if not rows:
        return []
    table = Table(("device", "kind", "probe", "id", "facts"), rows)
    left_out = len(devices) - len(rows)
    more = [Paragraph(f"and {left_out} more")] if left_out else []
    return [Section("devices", number_of(len(devices), "device"), (table, *more), is_folded=True)]


def _facts(evidence: Evidence, device: Device) -> str:
    """Return whether the run used a GPU, if that was recorded, and the facts of its probe."""
    use = evidence.gpu_use.get(device.id)
    facts = {"use": (use and use.state) or None, **device.facts}
    return "; ".join(f"{name} {_short(fact)}" for name, fact in facts.items() if fact is not None)


def _unavailable_probes(evidence: Evidence) -> list[Section]:
    probes = grouped((why, name) for name, why in evidence.run.unavailable.items())
    if not probes:
        return []
    rows = tuple((", ".join(names), why) for why, names in probes.items())
    table = Table(("probe", "what it said"), rows)
    is_folded = bool(evidence.devices("gpu"))
    return [Section("probes", "probes that had nothing to read", (table,), is_folded=is_folded)]


def _citation(run: Run, summary: Summary) -> list[Paragraph]:
    figures = [
        f"{catalogue()[key].title} {value_text(reading)}"
        f"{f' [{interval_text(reading)}]' if interval_text(reading) else ''} ({reading.basis})"
        for key in in_view("citation")
        if isinstance(reading := summary.readings[key], Reading)
    ]
    window = summary.readings["time.window_s"]
    over = window.note if isinstance(window, Reading) else "the whole run"
    text = (
        f"ergmeter {__version__} ({accelerators(run, summary) or 'no accelerator'};"
        f" run {run.header.get('id') or summary.run},"
        f" {str(run.header.get('created') or '')[:10]}), {over}:"
        f" {'; '.join(figures) or 'no figures'}."
    )
    about = Paragraph("A sentence to cite, with the basis of each value:")
    return [about, Paragraph(text, is_to_copy=True)]


# Memory.


_FEWEST_BARS, _MOST_BARS = 8, 44
_MARK_OWNERS = {"process": "the kernel's mark", "allocator": "the allocator's mark"}


def memory_document(run: Run) -> Document:
    """Return device memory over time as bars: peaks, owners and phases.

    A full bar is the memory of the device, and each bar is the highest reading of its interval.
    There are no more bars than readings; an interval without a reading is empty.
    """
    title = f"{run.name}: memory over time"
    memory = timeline.memory_curves(run, fewest=_FEWEST_BARS, most=_MOST_BARS)
    if memory is None:
        reason = "no memory was read in this run: `erg report --all` says why"
        return Document(title, (Paragraph(reason),))
    interval_s = memory.span_s / len(memory.phases)
    lines = [
        f"memory over {duration(memory.span_s)}; a bar is the most of {duration(interval_s)}",
        "a full bar is the memory of the device; of a program on the host, its peak",
    ]
    if any(None in curve.highest_bytes for curve in memory.curves):
        lines.append("no bar: nothing was read in that share of the time")
    for _, curves in groupby(memory.curves, key=lambda curve: curve.device.id):
        of_device = list(curves)
        lines.append(of_device[0].device.name)
        for curve in of_device:
            lines.append(_memory_line(curve.owner, _bars(curve), _peak(curve)))
            if curve.mark_bytes > curve.peak_bytes:
                peak, owner = scaled(curve.mark_bytes, "B"), _MARK_OWNERS[curve.device.kind]
                lines.append(_memory_line("", f"up to {peak} between readings, by {owner}"))
    lines.append(_memory_line("phase", "".join(phase[:1] or " " for phase in memory.phases)))
    legend = ", ".join(f"{phase[0]} {phase}" for phase in timeline.INTERVAL_PHASES)
    lines.append(_memory_line("", legend))
    return Document(title, (Paragraph("\n".join(lines), is_to_copy=True),))


def _memory_line(label: str, bars: str, peak: str = "") -> str:
    return f"  {label:<15}{bars}" + (f"  {peak}" if peak else "")


def _peak(curve: timeline.MemoryCurve) -> str:
    full = curve.capacity_bytes
    share = f" ({curve.peak_bytes / full * 100:.0f} %)" if full else ""
    return scaled(curve.peak_bytes, "B") + share


def _bars(curve: timeline.MemoryCurve) -> str:
    top = curve.capacity_bytes or curve.peak_bytes or 1.0
    steps = len(BARS) - 1
    return "".join(
        " " if peak is None else BARS[min(steps, round(peak / top * steps))]
        for peak in curve.highest_bytes
    )
