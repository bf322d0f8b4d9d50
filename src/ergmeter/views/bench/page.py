"""The HTML pages of a bench: report (`erg bench report --html`) and comparison.

A cell links to the page of its run by a relative path, so that both can be moved together. Without
such a page the directory is named as text. The heat map is an HTML table: it can be copied, printed
and read aloud. The comparison shows the gate's verdict for each cell, then ratios with intervals.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ergmeter.bench.overview import CELL_METRICS, LOWER, MEMORY, matrix, report_of
from ergmeter.compare.configuration_names import setting_title
from ergmeter.compare.gate import (
    GATE_STATES,
    POOLED,
    RESULT_WORDS,
    ConfigurationResult,
    Gate,
    ResultWord,
    configuration_results,
)
from ergmeter.compare.padding import has_both_rates
from ergmeter.version import __version__
from ergmeter.views.bench.compare import (
    axis_unit,
    change_in_words,
    change_rows,
    gate_method,
    gate_title,
    metric_names,
    remarks,
)
from ergmeter.views.bench.report import HEADS, figure_in_words, lines, more_in_words, notes, totals
from ergmeter.views.charts.chart import Chart, Scale, Table, scale_for
from ergmeter.views.charts.interval_chart import Axis, Dot, Kind, interval_chart
from ergmeter.views.html.page import bullet_list, figure, header, page, section, table, td, text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.bench.overview import Configuration, Matrix, Overview
    from ergmeter.compare.comparison import Comparison
    from ergmeter.compare.rules import GateRule
    from ergmeter.compare.verdicts import State, Verdict

# The heat map of a bench.


_LEVELS = 5
_REASON_CHARACTERS = 160


def matrix_chart(matrix: Matrix, figure: str, *, links: Mapping[str, str]) -> str:
    """Render one metric of all configurations. `links`: page of a run by its cell's directory."""
    values = [
        configuration.figures[figure]
        for configuration in matrix.configurations
        if figure in configuration.figures and figure not in configuration.impossible
    ]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    ends = min(finite), max(finite)
    corner = ", ".join(setting_title(name) for name in matrix.down)
    heads = [_head(matrix, value, figure) for value in matrix.columns]
    head = "".join(f'<th scope="col">{text(head)}</th>' for head in heads)
    if matrix.across is not None:
        corner += f" \\ {setting_title(matrix.across)}"
    places = matrix.places
    body = []
    for row in matrix.rows:
        cells = [
            "".join(
                _cell(configuration, figure, ends=ends, links=links)
                for configuration in places.get((row, value), [])
            )
            for value in matrix.columns
        ]
        name = ", ".join("-" if setting is None else str(setting) for setting in row)
        inner = "".join(f"<td>{cell}</td>" for cell in cells)
        body.append(f'<tr><th scope="row">{text(name)}</th>{inner}</tr>')
    title = CELL_METRICS[figure]
    better = "lower is better" if figure in LOWER else "higher is better"
    return (
        f'<figure id="matrix-{figure}"><h3>{text(title)}</h3>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(title)} by setting">'
        f'<table class="matrix"><thead><tr><td>{text(corner)}</td>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
        f"<figcaption>Darker is more; {better}. Hatched cells with ✕ have no figure.</figcaption>"
        "</figure>"
    )


def _head(matrix: Matrix, value: Any, figure: str) -> str:  # noqa: ANN401  whatever a setting is
    if matrix.across is None:
        return CELL_METRICS[figure]
    return "-" if value is None else str(value)


def _cell(
    configuration: Configuration,
    figure: str,
    *,
    ends: tuple[float, float],
    links: Mapping[str, str],
) -> str:
    runs = _runs(configuration, links)
    if figure in configuration.figures:
        many = f" ({configuration.runs[figure]} runs)" if configuration.runs[figure] > 1 else ""
        part = (
            "" if configuration.status == "ok" else f"<small>✕ {text(configuration.status)}</small>"
        )
        figure_html = f"<span>{text(figure_in_words(configuration, figure) + many)}</span>{part}"
        if figure in configuration.impossible:
            why = f"<small>{text(shortened(configuration.impossible[figure]))}</small>"
            return f'<div class="cell none impossible">{figure_html}{why}{runs}</div>'
        level = _level(configuration.figures[figure], ends)
        return f'<div class="cell {level}">{figure_html}{runs}</div>'
    kind, word = _without(configuration)
    why = f"<small>{text(shortened(configuration.reason))}</small>" if configuration.reason else ""
    return f'<div class="cell {kind}"><span>{text(word)}</span>{why}{runs}</div>'


def _without(configuration: Configuration) -> tuple[str, str]:
    """Return the class and text of a cell that lacks the metric."""
    if configuration.is_ok:
        return "none", "- no figure"
    return (
        ("waiting", f"… {configuration.status}")
        if configuration.is_waiting
        else ("failed", f"✕ {configuration.status}")
    )


def shortened(reason: str) -> str:
    """Cut a reason to the width of a cell."""
    is_long = len(reason) > _REASON_CHARACTERS
    return f"{reason[:_REASON_CHARACTERS].rstrip()}..." if is_long else reason


def _level(value: float, ends: tuple[float, float]) -> str:
    """Return the shade of a cell; values that are not finite have none."""
    low, high = ends
    if not math.isfinite(value):
        return "none"
    if high <= low:
        return "level0"
    return f"level{min(_LEVELS - 1, int(_LEVELS * (value - low) / (high - low)))}"


def _runs(configuration: Configuration, links: Mapping[str, str]) -> str:
    """Return links to the runs of a configuration, or their directory names."""
    words = []
    for path in configuration.paths:
        name = path.rstrip("/").rpartition("/")[2]
        link = links.get(path)
        words.append(f'<a href="{text(link)}">{text(name)}</a>' if link else text(name))
    return f"<small>{', '.join(words)}</small>" if words else ""


# The comparison of two benches.


_MOST = 60  # rows of a chart; the table below it has all
_KINDS: dict[State, Kind] = {
    "worse": "worse",
    "inconclusive": "open",
    "pass": "pass",
    "absent": "absent",
}
_STATE_WORDS: dict[State, str] = {"worse": "red"}
_WORDS: dict[Kind, str] = {
    "worse": "worse than is allowed",
    "open": "inconclusive",
    "pass": "within the rule",
    "bare": "single runs: no interval",
}
_VERDICT_SIGNS: dict[ResultWord, str] = {
    "worse": "▼ worse",
    "missing": "- missing",
    "new": "+ new",
    "inconclusive": "? inconclusive",
    "not judged": "- not judged",
    "pass": "✓ pass",
}
_COMPARE_LINKS = {
    "verdicts": "verdicts",
    "ratios": "ratios",
    "paradox": "faster and slower at once",
    "changes": "all changes",
    "method": "how it was judged",
}


def bench_compare_page(comparison: Comparison, judged: Gate, *, new: str, ref: str) -> str:
    """Return the HTML page of a bench comparison with its verdicts."""
    verdicts = configuration_results(judged)
    charts = [_chart(number, rule, judged) for number, rule in enumerate(judged.rules)]
    sections = [
        section("verdicts", "Verdicts", _summary(judged, verdicts), _verdicts(verdicts)),
        section("ratios", "NEW over REF", *(figure(chart) for chart in charts)),
        section("paradox", "Faster and slower at once", _paradoxes(comparison)),
        section("changes", "All changes", _changes(comparison), bullet_list(remarks(comparison))),
        section("method", "How it was judged", bullet_list(gate_method(judged))),
    ]
    about = (
        f"NEW {new} held against REF {ref}; cells matched by {', '.join(comparison.group_by)};"
        f" intervals of {comparison.options.confidence * 100:g} %; ergmeter {__version__}"
    )
    return page(
        title=f"{new} against {ref}",
        header=header(f"{new} against {ref}", about, _COMPARE_LINKS),
        sections=sections,
        charts=charts,
        whole_s=(0.0, 1.0),
        counted_s=(0.0, 1.0),
    )


def _summary(judged: Gate, verdicts: tuple[ConfigurationResult, ...]) -> str:
    counts = Counter(verdict.word for verdict in verdicts if verdict.name != POOLED)
    tally = ", ".join(f"{counts[word]} {word}" for word in RESULT_WORDS if counts[word])
    title = gate_title(judged)
    title = text(title[:1].upper() + title[1:])
    return f"<p><strong>{title}.</strong></p><p>Cells: {text(tally)}.</p>"


def _verdicts(verdicts: tuple[ConfigurationResult, ...]) -> str:
    rows = tuple(
        (verdict.name, _VERDICT_SIGNS[verdict.word], "; ".join(verdict.reasons))
        for verdict in verdicts
    )
    by_cell = table(Table(("cell", "verdict", "why"), rows), caption="verdicts by cell")
    return f'<div class="roomy">{by_cell}</div>'


def _chart(number: int, rule: GateRule, judged: Gate) -> Chart:
    own = sorted((verdict for verdict in judged.verdicts if verdict.rule == rule), key=_badness)
    id_, title = f"rule-{number}", str(rule)
    if not any(verdict.contrast for verdict in own):
        why = (
            "; ".join(dict.fromkeys(verdict.words for verdict in own))
            or "no cell works on both sides"
        )
        return Chart(id_, title, "", None, reason=why)
    is_ratio = rule.scale == "ratio"
    scale = Scale(1.0, "") if is_ratio else _scale(own)
    less = f"NEW less REF, {scale.unit}" if scale.unit else "NEW less REF"
    axis = Axis(
        "NEW over REF (logarithmic)" if is_ratio else less,
        is_log=is_ratio,
        neutral=1.0 if is_ratio else 0.0,
    )
    note = "thick upright lines are what the rule allows, on the thin one nothing changed"
    if len(own) > _MOST:
        note += f"; the first {_MOST} of {len(own)}, the worst first: the table has all"
    rows = tuple(
        (
            verdict.name,
            _verdict_text(verdict),
            _STATE_WORDS.get(verdict.state, verdict.state),
            verdict.words,
        )
        for verdict in own
    )
    return interval_chart(
        id_,
        title,
        "",
        [_dot(verdict, scale) for verdict in own[:_MOST]],
        axis,
        words=_WORDS,
        table=Table(("cell", "change", "verdict", "why"), rows),
        note=note,
    )


def _badness(verdict: Verdict) -> tuple[int, float]:
    """Return the sort key: verdict first, then the change in the unwanted direction."""
    rank = GATE_STATES.index(verdict.state)
    if verdict.contrast is None:
        return rank, 0.0
    change = verdict.contrast.value - verdict.contrast.neutral
    way = verdict.rule.way if verdict.rule else "change"
    return rank, -abs(change) if way == "change" else change if way == "fall" else -change


def _dot(verdict: Verdict, scale: Scale) -> Dot:
    change = verdict.contrast
    if change is None:
        return Dot(verdict.name, None, None, None, "absent", "absent")
    kind: Kind = "bare" if change.low is None else _KINDS[verdict.state]
    value, low, high = (
        None if end is None else end / scale.factor
        for end in (change.value, change.low, change.high)
    )
    ends = (verdict.rule.low, verdict.rule.high) if verdict.rule else ()
    limits = tuple(end / scale.factor for end in ends if end is not None)
    return Dot(verdict.name, value, low, high, _verdict_text(verdict), kind, limits)


def _scale(own: list[Verdict]) -> Scale:
    """Return the scale of differences: bytes and joules with an SI prefix."""
    figures = [verdict.contrast for verdict in own if verdict.contrast is not None]
    unit = axis_unit(own[0].measure.unit)
    ends = [
        end
        for figure in figures
        for end in (figure.value, figure.low, figure.high)
        if end is not None
    ]
    return scale_for(unit, max(map(abs, ends)))


def _verdict_text(verdict: Verdict) -> str:
    return "absent" if verdict.contrast is None else change_in_words(verdict)


def _paradoxes(comparison: Comparison) -> str:
    lines = [f"{pair.name}: {pair.padding}" for pair in comparison.pairs if pair.padding]
    both = sum(has_both_rates(pair.groups) for pair in comparison.pairs)
    none = (
        f"No cell: samples/s and tokens/s go the same way in all {both} that tell both."
        if both
        else "Not known: no cell tells both samples/s and tokens/s with padding on both sides."
    )
    return bullet_list(lines) or f'<p class="dim">{none}</p>'


def _changes(comparison: Comparison) -> str:
    rows = tuple(change_rows(comparison))
    changes_table = table(Table(("cell", *metric_names(comparison)), rows), caption="all changes")
    return f'<div class="roomy">{changes_table}</div>'


# Metrics shown open; the others are folded.
_OPEN = ("tokens_per_s", "joules_per_token")
_SIGNS = {"ok": "✓", "pending": "…", "running": "…", "skipped": "…"}
_LINKS = {
    "overview": "overview",
    "matrices": "matrices",
    "rows": "configurations",
    "failures": "failures",
    "notes": "notes",
}


def bench_page(overview: Overview, *, name: str, out: Path) -> str:
    """Return the HTML page of a bench, to be written to `out`."""
    heat_map = matrix(overview)
    links = _links(heat_map, out)
    sections = [
        section("overview", "Overview", _statuses(overview)),
        section("matrices", "Matrices", _matrices(overview, heat_map, links)),
        section("rows", "Configurations", _rows(overview, heat_map, links)),
        section("failures", "Failures", _failures(overview)),
        section("notes", "Notes", bullet_list(notes(overview)) or '<p class="dim">None.</p>'),
    ]
    return page(
        title=f"Bench: {name}",
        header=header(f"Bench: {name}", f"{totals(overview)}; ergmeter {__version__}", _LINKS),
        sections=sections,
        charts=(),
        whole_s=(0.0, 1.0),
        counted_s=(0.0, 1.0),
    )


def _links(matrix: Matrix, out: Path) -> dict[str, str]:
    """Return relative links to run pages by cell directory."""
    links = {}
    for path in (path for configuration in matrix.configurations for path in configuration.paths):
        report = report_of(path)
        if report is not None:
            links[path] = quote(os.path.relpath(report.resolve(), out.resolve().parent))
    return links


def _statuses(overview: Overview) -> str:
    items = "".join(
        f'<li><span class="badge">{_SIGNS.get(status, "✕")} {text(status)}</span> {number} of'
        f" {overview.cells} cells</li>"
        for status, number in overview.statuses.most_common()
    )
    return f'<ul class="findings">{items}</ul>'


def _matrices(overview: Overview, matrix: Matrix, links: Mapping[str, str]) -> str:
    """Return the heat maps; if configurations were cut off, a note says so."""
    number = len(matrix.configurations)
    these = f"The first {number} of {number + overview.more} configurations"
    cut = f"<p>{these}: --all shows the others.</p>" if overview.more else ""
    which = "cell that is shown" if cut else "cell"
    if not matrix.figures:
        none = f"Not shown: no {which} has a figure yet. Failures stand below."
        return f'{cut}<p class="absent">{none}</p>'
    maps = {name: matrix_chart(matrix, name, links=links) for name in matrix.figures}
    memory = [name for name in matrix.figures if name in MEMORY]
    open_ = (*_OPEN, *memory[:1])
    first = [name for name in matrix.figures if name in open_] or [matrix.figures[0]]
    folded = "".join(
        f"<details><summary>{text(CELL_METRICS[name])}</summary>{map}</details>"
        for name, map in maps.items()
        if name not in first
    )
    absent = [
        title
        for name, title in CELL_METRICS.items()
        if name not in matrix.figures and name not in MEMORY
    ]
    absent += [] if memory else ["memory"]
    none = f'<p class="absent">No {which} tells: {text(", ".join(absent))}.</p>' if absent else ""
    return cut + "".join(maps[name] for name in first) + folded + none


def _rows(overview: Overview, matrix: Matrix, links: Mapping[str, str]) -> str:
    head = "".join(f'<th scope="col">{text(title)}</th>' for title in (*HEADS, "runs"))
    body = "".join(
        "<tr>"
        + "".join(map(td, line))
        + f"<td>{', '.join(_run(path, links) for path in configuration.paths) or '-'}</td></tr>"
        for line, configuration in zip(lines(overview), matrix.configurations, strict=True)
    )
    return (
        '<div class="scroll roomy" tabindex="0" role="region" aria-label="configurations"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        + bullet_list(more_in_words(overview.more, "configurations"))
    )


def _run(path: str, links: Mapping[str, str]) -> str:
    return f'<a href="{text(links[path])}">{text(path)}</a>' if path in links else text(path)


def _failures(overview: Overview) -> str:
    troubles = [*overview.troubles, *more_in_words(overview.more_troubles, "troubles")]
    return bullet_list(troubles) or '<p class="dim">No cell failed.</p>'
