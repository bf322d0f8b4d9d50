"""The HTML pages of a bench: report (`erg bench report --html`) and comparison.

A cell links to the page of its run by a relative path, so that both can be moved together. Without
such a page the directory is named as text. The heat map is an HTML table: it can be copied, printed
and read aloud. The comparison shows the gate's verdict for each cell, then ratios with intervals.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ergmeter.bench.overview import CELL_METRICS, LOWER, MEMORY, matrix, report_of
from ergmeter.compare.pairing import setting_title
from ergmeter.version import __version__
from ergmeter.views.bench.report import HEADS, figure_in_words, lines, more_in_words, notes, totals
from ergmeter.views.html.page import bullet_list, header, page, section, td, text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.bench.overview import Configuration, Matrix, Overview

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
