"""Renders a document as a self-contained HTML page: style, scripts and charts in one file.

Names come from runs and may contain markup. The templates in `views/html` escape all text; what
they mark as safe is HTML that they made themselves. The JSON of the charts contains no `<`, and the
content security policy allows only the style and the two scripts whose hashes it lists.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.atomic_write import cached_text
from ergmeter.registry import library
from ergmeter.version import __version__
from ergmeter.views.charts.chart import config, theme_css
from ergmeter.views.charts.plots import converter, vega_lite_version
from ergmeter.views.document import (
    VERDICTS,
    AxisChoice,
    ChartGrid,
    ChartPart,
    HeadlinePart,
    HeatMap,
    Items,
    MetricCards,
    Note,
    Paragraph,
    Section,
    SortableCell,
    Table,
    TimeZoom,
    every_part,
    parts_for,
    title_case,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Environment

    from ergmeter.views.document import Document, Part

_FILES = Path(__file__).parents[1] / "html"
_LEVEL = 2  # of the headings of sections; a title inside one may begin with a name
# Characters: of a cell kept on one line, of a phrase, and of a word that may be broken.
_SHORT, _PHRASE, _WORD = 28, 48, 40
_JOINT = re.compile(r"(?<=\w[./])(?=[A-Za-z]\w{4})")
# The macro of parts.html that renders each kind of part.
_MACROS: dict[type, str] = {
    AxisChoice: "axis_choice",
    ChartGrid: "chart_grid",
    ChartPart: "chart",
    HeadlinePart: "headline",
    HeatMap: "heat_map",
    Items: "items",
    MetricCards: "metric_cards",
    Paragraph: "paragraph",
    Table: "table_part",
    TimeZoom: "time_zoom",
}


def html(document: Document) -> str:
    """Return the page; the chart library is included only if there are charts."""
    zooms = (part for part in every_part(document.parts) if isinstance(part, TimeZoom))
    zoom = next(zooms, TimeZoom())
    chart_data = {
        "config": {**config(), "aria": False},  # the script describes each chart as a whole
        "whole": list(zoom.run_s),
        "counted": list(zoom.counted_s),
        "charts": [
            {
                "id": chart.id,
                "onTime": chart.on_time,
                "spec": without_legends(chart.spec),
                **({"axes": chart.axes, "axis": chart.axis} if chart.axes else {}),
            }
            for chart in document.charts
            if chart.spec is not None
        ],
    }
    library = vega() if chart_data["charts"] else ""
    script = _file("drawing.js") + _file("page.js")
    style = theme_css() + _file("page.css")
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)};"
        f" style-src {_hash(style)}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    parts = parts_for(document.body, "html")
    frame = _templates().get_template("page.html")
    return frame.render(
        policy=policy,
        title=document.title,
        about=" · ".join(filter(None, (document.about, f"ergmeter {__version__}"))),
        links={part.id: part.title for part in parts if isinstance(part, Section)},
        style=style,
        parts=_parts(parts),
        data=_script_json(chart_data),
        library=library,
        script=script,
    )


def _parts(parts: Sequence[Part], level: int = _LEVEL) -> str:
    """Return the HTML of parts; notes that follow one another are one list.

    `level`: the heading level of sections.
    """
    lines: list[str] = []
    for is_note, group in groupby(parts_for(parts, "html"), lambda part: isinstance(part, Note)):
        members = list(group)
        if is_note:
            lines.append(rendered("notes", members, VERDICTS))
        else:
            lines += [_part(part, level) for part in members]
    return "\n".join(filter(None, lines))


def _part(part: Part, level: int) -> str:
    if isinstance(part, Section):
        title = part.title if level > _LEVEL else title_case(part.title)
        inner = _parts(part.parts, level + 1)
        return rendered("section", part.id, title, inner, part.is_folded, level)
    if isinstance(part, Table):
        part = part.without("bar")
    return rendered(_MACROS[type(part)], part)


def rendered(macro: str, *arguments: object) -> str:
    """Return what a macro of parts.html makes of its arguments, as HTML without outer blanks."""
    return str(getattr(_templates().get_template("parts.html").module, macro)(*arguments)).strip()


@cache
def _templates() -> Environment:
    """Return the templates, which escape every text. Raises PluginError."""
    jinja2 = library("jinja2", "a page", "'ergmeter[html]'")
    templates: Environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FILES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    templates.globals.update(td_class=_td_class, pieces=_JOINT.split, zip=zip)
    return templates


def _td_class(words: str, kind: str) -> str:
    """Return the class of a cell: numbers align, short texts stay on one line, sentences wrap.

    Paths and keys may break after a separator; only words too long for any column break elsewhere.
    """
    if kind == "number" or isinstance(words, SortableCell):
        return "number"
    if max(map(len, words.split()), default=0) > _WORD:
        return "unbroken"
    return "short" if len(words) <= _SHORT else "prose" if len(words) > _PHRASE else "phrase"


def _printable(value: object) -> object:
    """Drop unprintable characters of a text that a template is about to escape."""
    if type(value) is str or isinstance(value, SortableCell):
        return "".join(c for c in value if c in "\n\t" or c.isprintable())
    return value


def without_legends(spec: Any) -> Any:  # noqa: ANN401  whatever JSON can hold
    """Return a specification without Vega's legends, which do not wrap."""
    if isinstance(spec, dict):
        plain = {key: without_legends(inner) for key, inner in spec.items() if key != "legend"}
        return {**plain, "legend": None} if "field" in plain and "scale" in plain else plain
    if isinstance(spec, list):
        return [without_legends(inner) for inner in spec]
    return spec


def _script_json(value: Any) -> str:  # noqa: ANN401  whatever JSON can hold
    """Return JSON that is safe inside a script element."""
    dumped = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed from vl-convert: 0.9 MB, takes 2 s the first time."""
    vega_lite, maker = vega_lite_version(), version("vl-convert-python")
    bundle = cached_text(
        f"vega-{maker}-{vega_lite}.js",
        lambda: str(converter().javascript_bundle(vl_version=vega_lite)),
    )
    # Inside a string or a pattern `<\\/script` is the same, and does not end the element.
    return re.sub(r"</(?=script)", r"<\\/", bundle, flags=re.IGNORECASE)


def _file(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
