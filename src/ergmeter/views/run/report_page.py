"""The HTML report of a run (`erg report --html`).

Each value has its interval, basis and window, and opens to its formula and inputs. Absent values
keep their row with the reason. The environment is read from the headers of the run: the machine
that makes the report may be another one.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.metrics import timeline
from ergmeter.metrics.catalog import catalogue, expected_in, in_view
from ergmeter.metrics.checks import fitness
from ergmeter.metrics.explain.waterfall import Explanation, explain
from ergmeter.metrics.live.recent_window import remaining
from ergmeter.records import Device, Missing, Reading, Summary
from ergmeter.runlog.reader import RUNNING, Run
from ergmeter.units import duration, grouped, number_of, tallied
from ergmeter.version import __version__
from ergmeter.views.charts.chart import Chart, Table
from ergmeter.views.charts.run_charts import figure_charts
from ergmeter.views.charts.time_charts import time_charts
from ergmeter.views.documents import label_lines
from ergmeter.views.html.page import (
    absent,
    bullet_list,
    figure,
    header,
    page,
    reasons,
    section,
    table,
    text,
)
from ergmeter.views.run.card import OF_A_LOG, interval, is_of_a_log, reader_notes, value
from ergmeter.views.run.explain import CHANGES, change_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.metrics.evidence.evidence import Evidence

# Explain.


SECTION = "waterfall-section"
_TITLE = "Where the rest of the peak went"


def waterfall_section(run: Run, explanation: Explanation, chart: Chart) -> str:
    """Return the report's section: waterfall, notes and advice."""
    tries = bullet_list(change_lines(explanation))
    if tries:
        tries = f"<h3>{text(CHANGES.capitalize())}</h3>{tries}"
    drawing = _charts_html(run, [chart])
    return section(SECTION, _TITLE, drawing, bullet_list(explanation.remarks), tries)


# Environment.


_LONG = 300  # characters of a value
_DEVICES = 16


def environment(evidence: Evidence) -> str:
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
    facts_table = Table(
        ("what", "value"), tuple((name, _short(fact)) for name, fact in facts if fact)
    )
    return (
        table(facts_table, caption="environment")
        + _devices(evidence)
        + _silent_probes(evidence)
        + "".join(f"<p>Damaged, left out: {text(line)}</p>" for line in run.damage)
    )


def _silent_probes(evidence: Evidence) -> str:
    probes = grouped((why, name) for name, why in evidence.run.unavailable.items())
    if not probes:
        return ""
    rows = tuple((", ".join(names), why) for why, names in probes.items())
    silent = table(Table(("probe", "what it said"), rows), caption="probes")
    is_open = "" if evidence.devices("gpu") else " open"
    summary = "<summary>probes that had nothing to read</summary>"
    return f'<div id="probes"><details{is_open}>{summary}{silent}</details></div>'


def _devices(evidence: Evidence) -> str:
    devices = [device for device in evidence.run.devices.values() if device.kind != "self"]
    rows = tuple(
        (
            *(device.name, device.kind, device.probe, device.id),
            "; ".join(_facts({**_use(evidence, device), **device.facts})),
        )
        for device in devices[:_DEVICES]
    )
    if not rows:
        return ""
    more = f"<p>and {len(devices) - _DEVICES} more</p>" if len(devices) > _DEVICES else ""
    devices_table = table(
        Table(("device", "kind", "probe", "id", "facts"), rows), caption="devices"
    )
    many = number_of(len(devices), "device")
    return f"<details><summary>{many}</summary>{devices_table}{more}</details>"


def _use(evidence: Evidence, device: Device) -> dict[str, str]:
    """Return whether the run used a GPU, if that was recorded."""
    use = evidence.gpu_use.get(device.id)
    return {"use": use.state} if use is not None and use.state else {}


def _facts(facts: dict[str, Any]) -> list[str]:
    return [f"{name} {_short(fact)}" for name, fact in facts.items() if fact is not None]


def _mapping(what: str, object: object) -> list[tuple[str, object]]:
    return (
        [(f"{what} {name}", value) for name, value in object.items()]
        if isinstance(object, dict)
        else []
    )


def _short(object: object) -> str:
    words = object if isinstance(object, str) else json.dumps(object, default=str)
    return words if len(words) <= _LONG else f"{words[:_LONG]}..."


_ZOOMS = {
    "all": "whole run",
    "counted": "counted window",
    "nearer": "zoom in",
    "farther": "zoom out",
    "earlier": "earlier",
    "later": "later",
}


def report(evidence: Evidence, summary: Summary) -> str:
    """Return the HTML report."""
    on_time, explained = time_charts(evidence), explain(evidence)
    figures = figure_charts(evidence, summary, explained)
    by_id = {figure.id: figure for figure in figures}
    run = evidence.run
    sections = [
        section("figures", "Figures", _window(summary), _cards(run, summary), _notes(summary)),
        _progress(evidence, summary),
        section("ladder-section", "The ladder", _charts_html(run, [by_id["ladder"]])),
        waterfall_section(run, explained, by_id["waterfall"]),
        section("spent", "Where it went", _pair(run, [by_id["time_spent"], by_id["energy_spent"]])),
        section("time", "Over time", _zoom_bar(on_time), _charts_html(run, on_time)),
        section("steps-section", "Step times", _charts_html(run, [by_id["step_times"]])),
        section("roofline-section", "Roofline", _charts_html(run, [by_id["roofline"]])),
        section("check", "Findings", _findings(evidence)),
        section("all", "Every metric", _every_metric(summary)),
        section("environment", "Environment", environment(evidence)),
        section("cite", "How to cite", _citation(evidence, summary)),
    ]
    return page(
        title=f"{summary.run}: what it came to",
        header=_header(evidence, summary),
        sections=sections,
        charts=[*on_time, *figures],
        whole_s=_run_span(evidence),
        counted_s=_counted(evidence),
    )


def _run_span(evidence: Evidence) -> tuple[float, float]:
    try:
        return 0.0, evidence.watched.duration_s
    except NotMeasurable:
        return 0.0, 1.0


def _counted(evidence: Evidence) -> tuple[float, float]:
    try:
        span = evidence.span
        return timeline.seconds(evidence, span.start_ns), timeline.seconds(evidence, span.end_ns)
    except NotMeasurable:
        return _run_span(evidence)


def _header(evidence: Evidence, summary: Summary) -> str:
    run = evidence.run
    hosts = dict.fromkeys(str(writer.header.get("host")) for writer in run.writers)
    where = f"{_accelerators(evidence)} on {', '.join(list(hosts)[:4])}"
    if is_of_a_log(run, summary):
        where = OF_A_LOG
    links = {
        "figures": "figures",
        SECTION: "the rest of the peak",
        "spent": "where it went",
        "time": "over time",
        "check": "findings",
        "all": "every metric",
        "environment": "environment",
        "cite": "cite",
    }
    about = [summary.status, where, f"began {_when(run.header.get('created'))}"]
    if (directory := run.path.resolve().name) != summary.run:
        about.append(f"directory {directory}")
    return header(summary.run, " · ".join(about), links, more=_labels(run))


def _labels(run: Run) -> str:
    """Return tags and notes."""
    rows = [f"<dt>{text(what)}</dt><dd>{text(words)}</dd>" for what, words in label_lines(run)]
    return f'<dl id="labels">{"".join(rows)}</dl>' if rows else ""


def _when(created: object) -> str:
    """Return the start time to the minute, or the header's text if it is no UTC time."""
    when = str(created or "at a time not recorded")
    is_utc = when.endswith("+00:00") and when[10:11] == "T"
    return f"{when[:10]} {when[11:16]} UTC" if is_utc else when


def _window(summary: Summary) -> str:
    window = summary.readings["time.window_s"]
    if isinstance(window, Missing):
        return f'<p class="dim">There is no window to give figures of: {text(window.reason)}.</p>'
    sentence = f"The window: {window.note}. Figures are over it, unless they say otherwise."
    return f'<p class="dim">{text(sentence)}</p>'


def _cards(run: Run, summary: Summary) -> str:
    cards = [
        _card(key, reading)
        for key in in_view("report")
        if isinstance(reading := summary.readings[key], Reading)
    ]
    missing = (
        (catalogue()[key].title, result.reason)
        for key in expected_in("report")
        if isinstance(result := summary.readings[key], Missing)
    )
    return f'<div class="cards">{"".join(cards)}</div>{reasons(missing, run)}'


def _card(key: str, reading: Reading) -> str:
    metric = catalogue()[key]
    between = interval(reading)
    edges = f'<div class="dim">{text(between)}</div>' if between else ""
    kind, why = "card", ""
    if reading.impossible:
        kind, why = "card impossible", f'<div class="why">{text(reading.impossible)}</div>'
    return (
        f'<article class="{kind}"><h3>{text(metric.title)}</h3>'
        f'<div class="value">{text(value(reading))}</div>{why}{edges}'
        f'<span class="badge {reading.basis}">{reading.basis}</span>'
        f"<details><summary>how: {text(metric.title)}</summary><dl>"
        f"<dt>formula</dt><dd>{text(metric.formula)}</dd>"
        f"<dt>needs</dt><dd>{text(', '.join(metric.needs))}</dd>"
        f"<dt>of this run</dt><dd>{text(reading.note)}</dd>"
        f"<dt>key</dt><dd><code>{text(key)}</code></dd></dl></details></article>"
    )


def _notes(summary: Summary) -> str:
    """Return the notes that the card prints."""
    notes = bullet_list(reader_notes(summary))
    return f'<div id="to-know"><h3>To know</h3>{notes}</div>' if notes else ""


def _progress(evidence: Evidence, summary: Summary) -> str:
    """Return the progress of a running run."""
    if summary.status != RUNNING:
        return ""
    try:
        progress = remaining(evidence)
    except NotMeasurable as error:
        return section("progress", "Progress", f'<p class="absent">Unknown: {text(error)}</p>')
    left = "not known yet" if progress.left_s is None else duration(progress.left_s)
    sentence = f"{progress.done:,.0f} of {progress.total:,.0f} {progress.unit}"
    done_frac = progress.done_frac
    bar = f'<progress max="1" value="{min(done_frac, 1.0):.4f}" aria-label="done"></progress>'
    words = f"<p>{text(sentence)} ({done_frac:.1%}); left, at the counted rate: {text(left)}</p>"
    return section("progress", "Progress", bar, words)


def _charts_html(run: Run, charts: Sequence[Chart]) -> str:
    """Return the charts, those that are not drawn with their reasons below."""
    figures = [figure(chart) for chart in charts if chart.spec is not None]
    return "\n".join(filter(None, [*figures, absent(charts, run)]))


def _pair(run: Run, charts: Sequence[Chart]) -> str:
    figures = "".join(figure(chart) for chart in charts if chart.spec is not None)
    return f'<div class="pair">{figures}</div>{absent(charts, run)}'


def _zoom_bar(charts: list[Chart]) -> str:
    if not any(chart.spec for chart in charts):
        return ""
    buttons = "".join(
        f'<button type="button" data-zoom="{name}">{text(word)}</button>'
        for name, word in _ZOOMS.items()
    )
    return (
        f'<div class="zoom" role="group" aria-label="zoom of all charts over time">{buttons}</div>'
        '<p class="dim">All charts share one time axis: shift and the wheel zooms, dragging moves.'
        " Grey is not counted; dashed lines are marks.</p>"
    )


def _findings(evidence: Evidence) -> str:
    verdict = fitness(evidence)
    items = "".join(
        f'<li><span class="{finding.weight}"></span>{text(finding.seen)}'
        f'<div class="dim">{text(finding.effect)}</div></li>'
        for finding in verdict.findings
    )
    fine = [name.replace("_", " ") for name in verdict.passed]
    unchecked = ((name.replace("_", " "), why) for name, why in verdict.unchecked.items())
    rest = reasons(unchecked, evidence.run, word="Not checked")
    listed = f'<ul class="findings">{items}</ul>' if items else ""
    passed = f'<p class="dim">Nothing found: {text(", ".join(fine))}.</p>' if fine else ""
    return f"<p><strong>{text(verdict.text.capitalize())}.</strong></p>{listed}{passed}{rest}"


def _every_metric(summary: Summary) -> str:
    results = summary.readings.items()
    rows = tuple(
        (
            *(key, value(reading), interval(reading), reading.basis),
            "; ".join(part for part in (reading.impossible, reading.note) if part),
            catalogue()[key].formula,
        )
        for key, reading in results
        if isinstance(reading, Reading)
    )
    metrics_table = Table(("metric", "value", "interval", "how", "of this run", "formula"), rows)
    by_reason = grouped(
        (result.reason, key) for key, result in results if isinstance(result, Missing)
    )
    missing_rows = tuple((reason, ", ".join(keys)) for reason, keys in by_reason.items())
    missing = table(Table(("why", "metrics"), missing_rows), caption="absent metrics")
    many = f"{len(summary.readings) - len(rows)} that this run can't tell, and why"
    return (
        f"<details><summary>{len(rows)} metrics</summary>"
        f"{table(metrics_table, caption='every metric')}</details>"
        f"<details><summary>{many}</summary>{missing}</details>"
    )


def _accelerators(evidence: Evidence) -> str:
    return tallied(device.name for device in evidence.devices("gpu")) or "no accelerator"


def _citation(evidence: Evidence, summary: Summary) -> str:
    figures = [
        f"{catalogue()[key].title} {value(reading)}"
        f"{f' [{interval(reading)}]' if interval(reading) else ''} ({reading.basis})"
        for key in in_view("citation")
        if isinstance(reading := summary.readings[key], Reading)
    ]
    window = summary.readings["time.window_s"]
    over = window.note if isinstance(window, Reading) else "the whole run"
    header = evidence.run.header
    words = (
        f"ergmeter {__version__} ({_accelerators(evidence)}; run {header.get('id') or summary.run},"
        f" {str(header.get('created') or '')[:10]}), {over}: {'; '.join(figures) or 'no figures'}."
    )
    return f"<p>A sentence that says what is known and how:</p><pre>{text(words)}</pre>"
