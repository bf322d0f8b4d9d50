"""The HTML page of a comparison (`erg compare --html`).

Verdicts come first, in words. Charts, tables and the single runs follow as evidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.version import __version__
from ergmeter.views.analyze.console import counted
from ergmeter.views.charts.compare_charts import DIFFERENCES, MEAN, RATIOS, compare_charts
from ergmeter.views.charts.compare_curves import ABOUT, CourseCharts, course_charts
from ergmeter.views.compare import (
    SIGNS,
    before_verdicts,
    beside_verdicts,
    difference_table,
    footnotes,
    group_table,
    run_table,
    title,
)
from ergmeter.views.html.page import bullet_list, figure, header, page, section, table, text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.compare.comparison import Comparison, GroupPair
    from ergmeter.compare.run_curves import Axis, ComparedCurves
    from ergmeter.views.charts.chart import Table

_LINKS = {
    "verdicts": "verdicts",
    "ratios-section": "ratios",
    "pareto-section": "Pareto front",
    "courses": "over the runs",
    "groups": "groups",
    "differences-section": "what differs",
    "runs": "every run",
    "notes": "notes",
}
# Shown open on the page; the rest is counted or folded.
_MOST_NAMES = 8
_MOST_PAIRS = 20


def compare_page(comparison: Comparison, traced: ComparedCurves, *, x: Axis | None = None) -> str:
    """Return the HTML page. `x`: the first axis of the curves."""
    charts = compare_charts(comparison)
    over = course_charts(traced, comparison.groups, x=x)
    by_id = {chart.id: chart for chart in charts}
    means = [figure(chart) for chart in charts if chart.id.startswith(MEAN)]
    sections = [
        section("verdicts", "Verdicts", *_verdicts(comparison)),
        section("ratios-section", "Ratios", figure(by_id[RATIOS]), figure(by_id[DIFFERENCES])),
        section("pareto-section", "Pareto front", figure(by_id["pareto"])),
        section("courses", "Over the course of the runs", *_courses(over)),
        section(
            "groups",
            "What it cost, and what was learned",
            _roomy(group_table(comparison), "figures by group"),
            f'<div class="pair">{"".join(means)}</div>',
        ),
        section("differences-section", "What differs in configuration", _differences(comparison)),
        section("runs", "Every run", _roomy(run_table(comparison), "every run")),
        section("notes", "Notes", _notes(comparison)),
    ]
    name = f"Comparison: {_names(comparison)}"
    return page(
        title=name,
        header=header(name, _about(comparison), _LINKS),
        sections=sections,
        charts=[*charts, *over.charts],
    )


def _names(comparison: Comparison) -> str:
    """Return the names of the groups, or their number if many."""
    if len(comparison.groups) > _MOST_NAMES:
        return f"{len(comparison.groups)} groups"
    return ", ".join(group.name for group in comparison.groups)


def _about(comparison: Comparison) -> str:
    runs = sum(len(group.entries) for group in comparison.groups)
    sure = f"{comparison.options.confidence * 100:g} %"
    against = f", each held against {comparison.groups[0].name}" if comparison.pairs else ""
    many = f"{counted(runs, 'runs in')} {counted(len(comparison.groups), 'groups by')}"
    by = ", ".join(comparison.group_by)
    return f"{many} {by}{against}; intervals of {sure}; ergmeter {__version__}"


def _verdicts(comparison: Comparison) -> Iterable[str]:
    if not comparison.pairs:
        yield '<p class="absent">One group: nothing to compare it with.</p>'
    elif not comparison.is_comparable:
        yield "<p><strong>Not all groups are comparable: the reasons stand below.</strong></p>"
    yield bullet_list(before_verdicts(comparison))
    pair_sections = [
        f"<h3>{text(title(pair))}</h3><ul class='findings'>{_lines(pair)}</ul>"
        for pair in comparison.pairs
    ]
    yield from pair_sections[:_MOST_PAIRS]
    more = pair_sections[_MOST_PAIRS:]
    if more:
        yield f"<details><summary>{len(more)} more groups</summary>{''.join(more)}</details>"


def _lines(pair: GroupPair) -> str:
    items = [
        f'<li><span class="badge">{text(SIGNS[verdict.state])}</span> {text(verdict.words)}</li>'
        for verdict in pair.verdicts
    ]
    # The command-line option is no part of the verdict.
    items += [
        f"<li>{text(line)}</li>"
        for _, line in beside_verdicts(pair)
        if not line.startswith("--anyway")
    ]
    return "".join(items)


def _courses(over: CourseCharts) -> Iterable[str]:
    """Yield the axis selector, the charts and the notes on what is not drawn."""
    if over.axes:
        boxes = "".join(
            f'<label><input type="radio" name="x" value="{name}" autocomplete="off"'
            f"{' checked' if name == over.first else ''}>{text(words)}</label>"
            for name, words in over.axes
        )
        yield f'<fieldset id="x-axis"><legend>x axis</legend>{boxes}</fieldset>'
        yield f'<p class="dim">{text(ABOUT)}</p>'
    yield from map(figure, over.charts)
    yield from (f'<p class="absent">{text(line)}</p>' for line in over.notes)


def _differences(comparison: Comparison) -> str:
    differences = difference_table(comparison, "what")
    if differences.rows:
        return _roomy(differences, "what differs in configuration")
    unknown = dict.fromkeys(fact for pair in comparison.pairs for fact in pair.fairness.unknown)
    untold = f" Not told by both sides: {text(', '.join(unknown))}." if unknown else ""
    return f'<p class="dim">Nothing that the runs tell of themselves.{untold}</p>'


def _roomy(content: Table, caption: str) -> str:
    return f'<div class="roomy">{table(content, caption=caption)}</div>'


def _notes(comparison: Comparison) -> str:
    return bullet_list(footnotes(comparison)) or '<p class="dim">None.</p>'
