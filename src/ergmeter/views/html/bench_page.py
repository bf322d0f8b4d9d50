"""A bench to be looked at: what `erg bench report --html` writes.

The trap: a link that leads nowhere. A cell links to the page of its run where one lies in the
cell's directory, by a path from this page, so that both can be moved together; where there is none
the directory is named, as text.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ergmeter.bench.overview import CELL_METRICS, MEMORY, matrix, report_of
from ergmeter.version import __version__
from ergmeter.views.bench.report import HEADS, lines, more_in_words, notes, totals
from ergmeter.views.charts.matrix_chart import matrix_chart
from ergmeter.views.html.page import header, listed, page, section, td, text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.bench.overview import Matrix, Overview

# What is looked at first; the others are folded.
_OPEN = ("tokens_per_s", "joules_per_token")
_SIGNS = {"ok": "✓", "pending": "…", "running": "…", "skipped": "…"}
_LINKS = {
    "overview": "overview",
    "matrices": "matrices",
    "rows": "configurations",
    "failures": "failures",
    "notes": "notes",
}


def bench_page(found: Overview, *, name: str, out: Path) -> str:
    """The whole page, as it is to lie at `out`."""
    shown = matrix(found)
    links = _links(shown, out)
    sections = [
        section("overview", "Overview", _statuses(found)),
        section("matrices", "Matrices", _matrices(found, shown, links)),
        section("rows", "Configurations", _rows(found, shown, links)),
        section("failures", "Failures", _failures(found)),
        section("notes", "Notes", listed(notes(found)) or '<p class="dim">None.</p>'),
    ]
    return page(
        title=f"Bench: {name}",
        header=header(f"Bench: {name}", f"{totals(found)}; ergmeter {__version__}", _LINKS),
        sections=sections,
        charts=(),
        whole_s=(0.0, 1.0),
        counted_s=(0.0, 1.0),
    )


def _links(shown: Matrix, out: Path) -> dict[str, str]:
    """By a cell's directory: where its run's page is, seen from ours."""
    found = {}
    for path in (path for one in shown.configurations for path in one.paths):
        report = report_of(path)
        if report is not None:
            found[path] = quote(os.path.relpath(report.resolve(), out.resolve().parent))
    return found


def _statuses(found: Overview) -> str:
    items = "".join(
        f'<li><span class="badge">{_SIGNS.get(status, "✕")} {text(status)}</span> {number} of'
        f" {found.cells} cells</li>"
        for status, number in found.statuses.most_common()
    )
    return f'<ul class="findings">{items}</ul>'


def _matrices(found: Overview, shown: Matrix, links: Mapping[str, str]) -> str:
    """The maps; where configurations were cut off, all that is said is of those that are shown."""
    number = len(shown.configurations)
    these = f"The first {number} of {number + found.more} configurations"
    cut = f"<p>{these}: --all shows the others.</p>" if found.more else ""
    which = "cell that is shown" if cut else "cell"
    if not shown.figures:
        none = f"Not shown: no {which} has a figure yet. Failures stand below."
        return f'{cut}<p class="absent">{none}</p>'
    maps = {name: matrix_chart(shown, name, links=links) for name in shown.figures}
    memory = [name for name in shown.figures if name in MEMORY]
    open_ = (*_OPEN, *memory[:1])
    first = [name for name in shown.figures if name in open_] or [shown.figures[0]]
    folded = "".join(
        f"<details><summary>{text(CELL_METRICS[name])}</summary>{one}</details>"
        for name, one in maps.items()
        if name not in first
    )
    absent = [
        title
        for name, title in CELL_METRICS.items()
        if name not in shown.figures and name not in MEMORY
    ]
    absent += [] if memory else ["memory"]
    none = f'<p class="absent">No {which} tells: {text(", ".join(absent))}.</p>' if absent else ""
    return cut + "".join(maps[name] for name in first) + folded + none


def _rows(found: Overview, shown: Matrix, links: Mapping[str, str]) -> str:
    head = "".join(f'<th scope="col">{text(one)}</th>' for one in (*HEADS, "runs"))
    body = "".join(
        "<tr>"
        + "".join(map(td, line))
        + f"<td>{', '.join(_run(path, links) for path in one.paths) or '-'}</td></tr>"
        for line, one in zip(lines(found), shown.configurations, strict=True)
    )
    return (
        '<div class="scroll roomy" tabindex="0" role="region" aria-label="configurations"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        + listed(more_in_words(found.more, "configurations"))
    )


def _run(path: str, links: Mapping[str, str]) -> str:
    return f'<a href="{text(links[path])}">{text(path)}</a>' if path in links else text(path)


def _failures(found: Overview) -> str:
    told = [*found.troubles, *more_in_words(found.more_troubles, "troubles")]
    return listed(told) or '<p class="dim">No cell failed.</p>'
