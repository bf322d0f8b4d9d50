"""A comparison to be looked at: what `erg compare --html` writes.

The trap: a page of charts from which the reader picks the winner. The verdicts come first and in
words; charts, figures and every single run stand below, for who wants to see what they rest on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.compare.grouping import differing_facts
from ergmeter.version import __version__
from ergmeter.views.analyze.text import counted
from ergmeter.views.charts.chart import Table
from ergmeter.views.charts.compare_charts import DIFFERENCES, MEAN, RATIOS, compare_charts
from ergmeter.views.charts.compare_curves import ABOUT, course_charts
from ergmeter.views.compare import (
    SIGNS,
    around,
    before_verdicts,
    cell,
    figure_in_words,
    footnotes,
    head,
    title,
)
from ergmeter.views.html.page import figure, header, listed, page, section, table, text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.compare.comparison import Comparison, GroupPair
    from ergmeter.compare.run_curves import Axis, ComparedCurves
    from ergmeter.views.charts.compare_curves import CourseCharts

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
# What stands open on the page; the rest is counted, or folded.
_MOST_NAMES = 8
_MOST_PAIRS = 20


def compare_page(found: Comparison, traced: ComparedCurves, *, x: Axis | None = None) -> str:
    """The whole page. `x`: what the curves of the runs are drawn over at first."""
    charts = compare_charts(found)
    over = course_charts(traced, found.groups, x=x)
    by_id = {one.id: one for one in charts}
    means = [figure(one) for one in charts if one.id.startswith(MEAN)]
    sections = [
        section("verdicts", "Verdicts", *_verdicts(found)),
        section("ratios-section", "Ratios", figure(by_id[RATIOS]), figure(by_id[DIFFERENCES])),
        section("pareto-section", "Pareto front", figure(by_id["pareto"])),
        section("courses", "Over the course of the runs", *_courses(over)),
        section(
            "groups",
            "What it cost, and what was learned",
            f'<div class="roomy">{table(_groups(found), caption="figures by group")}</div>',
            f'<div class="pair">{"".join(means)}</div>',
        ),
        section("differences-section", "What differs in configuration", _differences(found)),
        section("runs", "Every run", _runs(found)),
        section("notes", "Notes", _notes(found)),
    ]
    name = f"Comparison: {_names(found)}"
    return page(
        title=name,
        header=header(name, _about(found), _LINKS),
        sections=sections,
        charts=[*charts, *over.charts],
        whole_s=(0.0, 1.0),
        counted_s=(0.0, 1.0),
    )


def _names(found: Comparison) -> str:
    """The groups by name, or where they are many how many."""
    if len(found.groups) > _MOST_NAMES:
        return f"{len(found.groups)} groups"
    return ", ".join(group.name for group in found.groups)


def _about(found: Comparison) -> str:
    runs = sum(len(group.entries) for group in found.groups)
    sure = f"{found.options.confidence * 100:g} %"
    held = f", each held against {found.groups[0].name}" if found.pairs else ""
    many = f"{counted(runs, 'runs in')} {counted(len(found.groups), 'groups by')}"
    return f"{many} {', '.join(found.group_by)}{held}; intervals of {sure}; ergmeter {__version__}"


def _verdicts(found: Comparison) -> Iterable[str]:
    if not found.pairs:
        yield '<p class="absent">One group: nothing to compare it with.</p>'
    elif not found.is_comparable:
        yield "<p><strong>Not all groups are comparable: the reasons stand below.</strong></p>"
    yield listed(before_verdicts(found))
    told = [
        f"<h3>{text(title(pair))}</h3><ul class='findings'>{_lines(pair)}</ul>"
        for pair in found.pairs
    ]
    yield from told[:_MOST_PAIRS]
    more = told[_MOST_PAIRS:]
    if more:
        yield f"<details><summary>{len(more)} more groups</summary>{''.join(more)}</details>"


def _lines(pair: GroupPair) -> str:
    said = [
        f'<li><span class="badge">{text(SIGNS[one.state])}</span> {text(one.words)}</li>'
        for one in pair.verdicts
    ]
    # The option of a command line is no part of what was found.
    said += [
        f"<li>{text(line)}</li>" for _, line in around(pair) if not line.startswith("--anyway")
    ]
    return "".join(said)


def _groups(found: Comparison) -> Table:
    rows = []
    for group in found.groups:
        cells = [" ".join(cell(found, group, one)).strip() for one in found.measures]
        rows.append((group.name, str(len(group.entries)), *cells))
    return Table(
        (", ".join(found.group_by), "runs", *map(head, found.measures)),
        tuple(rows),
    )


def _courses(over: CourseCharts) -> Iterable[str]:
    """The choice of an axis, the charts, and beneath them what is not drawn."""
    if over.axes:
        boxes = "".join(
            f'<label><input type="radio" name="x" value="{name}" autocomplete="off"'
            f"{' checked' if name == over.first else ''}>{text(words)}</label>"
            for name, words in over.axes
        )
        yield f'<fieldset id="x-axis"><legend>x axis</legend>{boxes}</fieldset>'
        yield f'<p class="dim">{text(ABOUT)}</p>'
    yield from map(figure, over.charts)
    yield from (f'<p class="absent">{text(line)}</p>' for line in over.said)


def _differences(found: Comparison) -> str:
    rows = differing_facts(found.groups)
    if not rows:
        unknown = dict.fromkeys(one for pair in found.pairs for one in pair.fairness.unknown)
        untold = f" Not told by both sides: {text(', '.join(unknown))}." if unknown else ""
        return f'<p class="dim">Nothing that the runs tell of themselves.{untold}</p>'
    heads = ("what", *(group.name for group in found.groups))
    told = Table(heads, tuple((what, *said) for what, said in rows))
    return f'<div class="roomy">{table(told, caption="what differs in configuration")}</div>'


def _runs(found: Comparison) -> str:
    rows = [
        (group.name, entry.source, *(figure_in_words(entry, one) for one in found.measures))
        for group in found.groups
        for entry in group.entries
    ]
    told = Table(("group", "run", *(head(one) for one in found.measures)), tuple(rows))
    return f'<div class="roomy">{table(told, caption="every run")}</div>'


def _notes(found: Comparison) -> str:
    return listed(footnotes(found)) or '<p class="dim">None.</p>'
