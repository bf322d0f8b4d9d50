"""The report of a run, to be looked at: what `erg report --html` writes.

The trap: a number without its origin. Each figure has its interval, how it was obtained and over
what, and opens to its formula and inputs; what could not be measured keeps its place and says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics import timeline
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.checks import fitness
from ergmeter.metrics.explain.waterfall import explain
from ergmeter.metrics.live.recent_window import remaining
from ergmeter.records import Missing, Reading
from ergmeter.runlog.reader import IMPORTED, RUNNING
from ergmeter.units import duration, tallied
from ergmeter.version import __version__
from ergmeter.views.charts.chart import Table
from ergmeter.views.charts.run_charts import figure_charts
from ergmeter.views.charts.time_charts import time_charts
from ergmeter.views.html.environment import environment
from ergmeter.views.html.explain_page import SECTION, waterfall_section
from ergmeter.views.html.page import absent, figure, listed, page, reasons, section, table, text
from ergmeter.views.labels import label_lines
from ergmeter.views.run.card import interval, to_know, value

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Result, Summary
    from ergmeter.runlog.reader import Run
    from ergmeter.views.charts.chart import Chart

# What stands at the top. Those with True stay also where they are missing.
_HEADLINES = (
    ("throughput.tokens_per_s", True),
    ("throughput.whole_run_tokens_per_s", False),
    ("throughput.output_tokens_per_s", False),
    ("time.step_s", True),
    ("latency.ttft_median_s", False),
    ("latency.tpot_median_s", False),
    ("utilization.mfu_frac", True),
    ("utilization.whole_run_mfu_frac", False),
    ("energy.run_j", True),
    ("energy.joules_per_token", False),
    ("energy.whole_run_joules_per_token", False),
    ("energy.mean_w", False),
    ("memory.device_peak_bytes", False),
    ("memory.process_peak_bytes", False),
    ("carbon.co2e_g", False),
    ("cost.gpu_whole_run", False),
)
_ZOOMS = {
    "all": "whole run",
    "counted": "counted window",
    "nearer": "zoom in",
    "farther": "zoom out",
    "earlier": "earlier",
    "later": "later",
}


def report(evidence: Evidence, summary: Summary) -> str:
    """The whole page."""
    on_time, explained = time_charts(evidence), explain(evidence)
    figures = figure_charts(evidence, summary, explained)
    by_id = {one.id: one for one in figures}
    run = evidence.run
    sections = [
        section("figures", "Figures", _window(summary), _cards(run, summary), _to_know(summary)),
        _progress(evidence, summary),
        section("ladder-section", "The ladder", *_pieces(run, [by_id["ladder"]])),
        waterfall_section(run, explained, by_id["waterfall"]),
        section("spent", "Where it went", _pair(run, by_id["time_spent"], by_id["energy_spent"])),
        section("time", "Over time", _zoom_bar(on_time), *_pieces(run, on_time)),
        section("steps-section", "Step times", *_pieces(run, [by_id["step_times"]])),
        section("roofline-section", "Roofline", *_pieces(run, [by_id["roofline"]])),
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
        return 0.0, timeline.watched(evidence).duration_s
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
    if summary.status == IMPORTED and not run.devices:
        where = "from a log, which holds no readings of energy, devices or host memory"
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
    items = "".join(f'<li><a href="#{id_}">{text(word)}</a></li>' for id_, word in links.items())
    directory = run.path.resolve().name
    found_in = f" · directory {text(directory)}" if directory != summary.run else ""
    return (
        f'<header><div class="bar"><h1>{text(summary.run)}</h1>'
        f'<button type="button" id="theme">dark colours</button></div>'
        f'<p class="dim">{text(summary.status)} · {text(where)}'
        f" · began {text(_when(run.header.get('created')))}{found_in}</p>{_labels(run)}"
        f'<nav aria-label="parts of the page"><ul>{items}</ul></nav></header>'
    )


def _labels(run: Run) -> str:
    """What people said of the run."""
    said = [f"<dt>{text(what)}</dt><dd>{text(words)}</dd>" for what, words in label_lines(run)]
    return f'<dl id="labels">{"".join(said)}</dl>' if said else ""


def _when(created: object) -> str:
    """When a run began, to the minute; as its header has it, if that is no time in UTC."""
    said = str(created or "at a time not recorded")
    is_utc = said.endswith("+00:00") and said[10:11] == "T"
    return f"{said[:10]} {said[11:16]} UTC" if is_utc else said


def _window(summary: Summary) -> str:
    found = summary.readings["time.window_s"]
    if isinstance(found, Missing):
        return f'<p class="dim">There is no window to give figures of: {text(found.reason)}.</p>'
    said = f"The window: {found.note}. Figures are over it, unless they say otherwise."
    return f'<p class="dim">{text(said)}</p>'


def _cards(run: Run, summary: Summary) -> str:
    shown = [
        (key, summary.readings[key])
        for key, keep in _HEADLINES
        if keep or isinstance(summary.readings[key], Reading)
    ]
    cards = [_card(key, found) for key, found in shown if isinstance(found, Reading)]
    missing = (
        (catalogue()[key].title, found.reason) for key, found in shown if isinstance(found, Missing)
    )
    return f'<div class="cards">{"".join(cards)}</div>{reasons(missing, run)}'


def _card(key: str, found: Reading) -> str:
    metric = catalogue()[key]
    between = interval(found)
    edges = f'<div class="dim">{text(between)}</div>' if between else ""
    kind, why = "card", ""
    if found.impossible:
        kind, why = "card impossible", f'<div class="why">{text(found.impossible)}</div>'
    return (
        f'<article class="{kind}"><h3>{text(metric.title)}</h3>'
        f'<div class="value">{text(value(found))}</div>{why}{edges}'
        f'<span class="badge {found.basis}">{found.basis}</span>'
        f"<details><summary>how: {text(metric.title)}</summary><dl>"
        f"<dt>formula</dt><dd>{text(metric.formula)}</dd>"
        f"<dt>needs</dt><dd>{text(', '.join(metric.needs))}</dd>"
        f"<dt>of this run</dt><dd>{text(found.note)}</dd>"
        f"<dt>key</dt><dd><code>{text(key)}</code></dd></dl></details></article>"
    )


def _to_know(summary: Summary) -> str:
    """What the card on the terminal says below its figures."""
    said = listed(to_know(summary))
    return f'<div id="to-know"><h3>To know</h3>{said}</div>' if said else ""


def _progress(evidence: Evidence, summary: Summary) -> str:
    """How far it is, of a run that is still being written."""
    if summary.status != RUNNING:
        return ""
    try:
        found = remaining(evidence)
    except NotMeasurable as error:
        return section("progress", "Progress", f'<p class="absent">Unknown: {text(error)}</p>')
    left = "not known yet" if found.left_s is None else duration(found.left_s)
    said = f"{found.done:,.0f} of {found.total:,.0f} {found.unit}"
    bar = f'<progress max="1" value="{min(found.done_frac, 1.0):.4f}" aria-label="done"></progress>'
    words = f"<p>{text(said)} ({found.done_frac:.1%}); left, at the counted rate: {text(left)}</p>"
    return section("progress", "Progress", bar, words)


def _pieces(run: Run, charts: list[Chart]) -> list[str]:
    return [*(figure(one) for one in charts if one.spec is not None), absent(charts, run)]


def _pair(run: Run, *charts: Chart) -> str:
    drawn = "".join(figure(one) for one in charts if one.spec is not None)
    return f'<div class="pair">{drawn}</div>{absent(charts, run)}'


def _zoom_bar(charts: list[Chart]) -> str:
    if not any(one.spec for one in charts):
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
    found = fitness(evidence)
    items = "".join(
        f'<li><span class="{one.weight}"></span>{text(one.seen)}'
        f'<div class="dim">{text(one.effect)}</div></li>'
        for one in found.findings
    )
    fine = [name.replace("_", " ") for name in found.passed]
    unchecked = ((name.replace("_", " "), why) for name, why in found.unchecked.items())
    rest = reasons(unchecked, evidence.run, word="Not checked")
    listed = f'<ul class="findings">{items}</ul>' if items else ""
    passed = f'<p class="dim">Nothing found: {text(", ".join(fine))}.</p>' if fine else ""
    return f"<p><strong>{text(found.said.capitalize())}.</strong></p>{listed}{passed}{rest}"


def _every_metric(summary: Summary) -> str:
    rows: list[tuple[str, ...]] = []
    by_reason: dict[str, list[str]] = {}
    for key, found in summary.readings.items():
        if isinstance(found, Reading):
            note = "; ".join(part for part in (found.impossible, found.note) if part)
            rows.append((key, *_reading_text(found), note, catalogue()[key].formula))
        else:
            by_reason.setdefault(found.reason, []).append(key)
    known = Table(("metric", "value", "interval", "how", "of this run", "formula"), tuple(rows))
    missing = Table(
        ("why", "metrics"),
        tuple((reason, ", ".join(keys)) for reason, keys in by_reason.items()),
    )
    many = f"{sum(map(len, by_reason.values()))} that this run can't tell, and why"
    return (
        f"<details><summary>{len(rows)} metrics</summary>"
        f"{table(known, caption='every metric')}</details>"
        f"<details><summary>{many}</summary>{table(missing, caption='absent metrics')}</details>"
    )


def _reading_text(found: Reading) -> tuple[str, str, str]:
    return value(found), interval(found), found.basis


def _accelerators(evidence: Evidence) -> str:
    return tallied(device.name for device in evidence.devices("gpu")) or "no accelerator"


def _citation(evidence: Evidence, summary: Summary) -> str:
    figures = [
        f"{catalogue()[key].title} {_cited(summary.readings[key])}"
        for key in (
            "throughput.tokens_per_s",
            "utilization.mfu_frac",
            "energy.run_j",
            "energy.joules_per_token",
        )
        if isinstance(summary.readings[key], Reading)
    ]
    window = summary.readings["time.window_s"]
    over = window.note if isinstance(window, Reading) else "the whole run"
    header = evidence.run.header
    words = (
        f"ergmeter {__version__} ({_accelerators(evidence)}; run {header.get('id') or summary.run},"
        f" {str(header.get('created') or '')[:10]}), {over}: {'; '.join(figures) or 'no figures'}."
    )
    return f"<p>A sentence that says what is known and how:</p><pre>{text(words)}</pre>"


def _cited(found: Result) -> str:
    assert isinstance(found, Reading)
    between = f" [{interval(found)}]" if interval(found) else ""
    return f"{value(found)}{between} ({found.basis})"
