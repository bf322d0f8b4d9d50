"""A matrix of a bench as a heat map: a table whose cells are the darker the more they have.

The trap: a picture of colours. A failed cell is hatched, framed and says what became of it, each
cell has its figure written in it, and the whole is a table, so that it can be read aloud, copied
and printed. A picture drawn by a script would have none of this.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ergmeter.bench.overview import CELL_METRICS, LOWER
from ergmeter.bench.plan.cells import setting_title
from ergmeter.views.bench.report import figure_in_words
from ergmeter.views.html.page import text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.bench.overview import Configuration, Matrix

_LEVELS = 5
_REASON_CHARACTERS = 160


def matrix_chart(found: Matrix, figure: str, *, links: Mapping[str, str]) -> str:
    """One figure of all configurations. `links`: by a cell's directory, the page of its run."""
    values = [
        one.figures[figure]
        for one in found.configurations
        if figure in one.figures and figure not in one.impossible
    ]
    known = [one for one in values if math.isfinite(one)] or [0.0]
    ends = min(known), max(known)
    corner = ", ".join(setting_title(name) for name in found.down)
    heads = [_head(found, value, figure) for value in found.columns]
    head = "".join(f'<th scope="col">{text(one)}</th>' for one in heads)
    if found.across is not None:
        corner += f" \\ {setting_title(found.across)}"
    places = found.places
    body = []
    for row in found.rows:
        cells = [
            "".join(
                _cell(one, figure, ends=ends, links=links) for one in places.get((row, value), [])
            )
            for value in found.columns
        ]
        name = ", ".join("-" if one is None else str(one) for one in row)
        inner = "".join(f"<td>{one}</td>" for one in cells)
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


def _head(found: Matrix, value: Any, figure: str) -> str:  # noqa: ANN401  whatever a setting is
    if found.across is None:
        return CELL_METRICS[figure]
    return "-" if value is None else str(value)


def _cell(
    one: Configuration, figure: str, *, ends: tuple[float, float], links: Mapping[str, str]
) -> str:
    runs = _runs(one, links)
    if figure in one.figures:
        many = f" ({one.runs[figure]} runs)" if one.runs[figure] > 1 else ""
        part = "" if one.status == "ok" else f"<small>✕ {text(one.status)}</small>"
        said = f"<span>{text(figure_in_words(one, figure) + many)}</span>{part}"
        if figure in one.impossible:
            why = f"<small>{text(shortened(one.impossible[figure]))}</small>"
            return f'<div class="cell none impossible">{said}{why}{runs}</div>'
        return f'<div class="cell {_level(one.figures[figure], ends)}">{said}{runs}</div>'
    kind, word = _without(one)
    why = f"<small>{text(shortened(one.reason))}</small>" if one.reason else ""
    return f'<div class="cell {kind}"><span>{text(word)}</span>{why}{runs}</div>'


def _without(one: Configuration) -> tuple[str, str]:
    """How a cell without this figure looks, and what it says."""
    if one.is_ok:
        return "none", "- no figure"
    return ("waiting", f"… {one.status}") if one.is_waiting else ("failed", f"✕ {one.status}")


def shortened(reason: str) -> str:
    """A reason as far as a cell has room for it."""
    is_long = len(reason) > _REASON_CHARACTERS
    return f"{reason[:_REASON_CHARACTERS].rstrip()}..." if is_long else reason


def _level(value: float, ends: tuple[float, float]) -> str:
    """How dark a cell is; what is no finite number has no place among the others."""
    low, high = ends
    if not math.isfinite(value):
        return "none"
    if high <= low:
        return "level0"
    return f"level{min(_LEVELS - 1, int(_LEVELS * (value - low) / (high - low)))}"


def _runs(one: Configuration, links: Mapping[str, str]) -> str:
    """The way to each run of a configuration: a link, or the name of its directory."""
    said = []
    for path in one.paths:
        name = path.rstrip("/").rpartition("/")[2]
        link = links.get(path)
        said.append(f'<a href="{text(link)}">{text(name)}</a>' if link else text(name))
    return f"<small>{', '.join(said)}</small>" if said else ""
