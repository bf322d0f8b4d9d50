"""A self-contained HTML page: style, scripts, charts and text in one file, nothing loaded.

Names come from runs and may contain markup. Templates escape all text (the functions here that
take HTML say so), as `text` does for pages that are put together in Python. The JSON of the charts
contains no `<`, and the content security policy allows only the style and the two
scripts whose hashes it lists.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.atomic_write import cached_text
from ergmeter.errors import PluginError
from ergmeter.units import grouped
from ergmeter.views.charts.chart import Chart, config, style_variables
from ergmeter.views.charts.plots import converter, vega_lite_version
from ergmeter.views.document import SortableCell, Table
from ergmeter.views.run.card import short_reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jinja2 import Environment

    from ergmeter.runlog.reader import Run

_HERE = Path(__file__).parent
# Characters: of a cell kept on one line, of a phrase, and of a word that may be broken.
_SHORT, _PHRASE, _WORD = 28, 48, 40
_JOINT = re.compile(r"(?<=\w[./])(?=[A-Za-z]\w{4})")


def text(value: object) -> str:
    """Escape anything as HTML text or attribute; unprintable characters are dropped."""
    return html.escape(str(_printable(str(value))), quote=True)


def header(name: str, about: str, links: dict[str, str], *, more: str = "") -> str:
    """Return the page header: title, `more` HTML, and navigation."""
    return rendered("header", name, about, links, more)


def section(id_: str, title: str, *parts: str, is_folded: bool = False, level: int = 2) -> str:
    """Return a section of HTML with a linkable heading; a folded one starts closed."""
    return rendered("section", id_, title, "\n".join(filter(None, parts)), is_folded, level)


def table(table: Table, *, caption: str) -> str:
    """Return a table that scrolls within a narrow page."""
    return rendered("table", table, caption)


def td(words: str) -> str:
    """Return a table cell with a class for its width."""
    return rendered("td", words)


def _td_class(words: str, kind: str) -> str:
    """Return the class of a cell: numbers align, short texts stay on one line, sentences wrap.

    Paths and keys may break after a separator; only words too long for any column break elsewhere.
    """
    if kind == "number" or isinstance(words, SortableCell):
        return "number"
    if max(map(len, words.split()), default=0) > _WORD:
        return "unbroken"
    return "short" if len(words) <= _SHORT else "prose" if len(words) > _PHRASE else "phrase"


def bullet_list(sentences: Iterable[str]) -> str:
    """Return sentences as a list, or nothing if there are none."""
    return rendered("bullet_list", list(sentences))


def figure(chart: Chart) -> str:
    """Return a chart with title, note and data table."""
    return rendered("figure", chart)


def rendered(macro: str, *arguments: object) -> str:
    """Return what a macro of parts.html makes of its arguments, as HTML without outer blanks."""
    return str(getattr(_templates().get_template("parts.html").module, macro)(*arguments)).strip()


@cache
def _templates() -> Environment:
    """Return the templates of this folder, which escape every text. Raises PluginError."""
    try:
        import jinja2  # noqa: PLC0415  only pages need it
    except ImportError as error:
        raise PluginError(
            "pages need Jinja2, which is not installed: pip install 'ergmeter[html]'"
        ) from error
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    templates.globals.update(
        td_class=_td_class, pieces=_JOINT.split, is_sortable_cell=_is_sortable_cell, zip=zip
    )
    return templates


def _is_sortable_cell(cell: str) -> bool:
    return isinstance(cell, SortableCell)


def _printable(value: object) -> object:
    """Drop unprintable characters of a text that a template is about to escape."""
    if type(value) is str or isinstance(value, SortableCell):
        return "".join(c for c in value if c in "\n\t" or c.isprintable())
    return value


def absent(charts: Iterable[Chart], run: Run) -> str:
    """Return the charts that are not drawn, grouped by reason."""
    return reasons(((chart.title, chart.reason) for chart in charts if chart.spec is None), run)


def reasons(named_reasons: Iterable[tuple[str, str]], run: Run, *, word: str = "Not shown") -> str:
    """Return absent items grouped by reason; probe errors only once."""
    lines = []
    for why, titles in grouped((why, what) for what, why in named_reasons).items():
        short = short_reason(why, run)
        more = ' (<a href="#probes">what each probe said</a>)' if short != why else ""
        lines.append(
            f'<p class="absent">{word}: {text(", ".join(titles))}. Why: {text(short)}{more}</p>'
        )
    return "".join(lines)


def page(
    *, title: str, header: str, sections: Iterable[str], charts: Iterable[Chart],
    whole_s: tuple[float, float] = (0.0, 1.0), counted_s: tuple[float, float] = (0.0, 1.0),
) -> str:  # fmt: skip
    """Return the complete HTML document. Charts over time need the span of the run."""
    data_json = {
        "config": {**config(), "aria": False},  # the script describes each chart as a whole
        "whole": list(whole_s),
        "counted": list(counted_s),
        "charts": [
            {
                "id": chart.id,
                "onTime": chart.on_time,
                "spec": without_legends(chart.spec),
                **({"axes": chart.axes, "axis": chart.axis} if chart.axes else {}),
            }
            for chart in charts
            if chart.spec is not None
        ],
    }
    library = vega() if data_json["charts"] else ""
    script, style = _own("drawing.js") + _own("page.js"), _style()
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)};"
        f" style-src {_hash(style)}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    frame = _templates().get_template("page.html")
    return frame.render(
        policy=policy,
        title=title,
        style=style,
        header=header,
        parts="\n".join(sections),
        data=data(data_json),
        library=library,
        script=script,
    )


def without_legends(spec: Any) -> Any:  # noqa: ANN401  whatever JSON can hold
    """Return a specification without Vega's legends, which do not wrap."""
    if isinstance(spec, dict):
        plain = {key: without_legends(inner) for key, inner in spec.items() if key != "legend"}
        return {**plain, "legend": None} if "field" in plain and "scale" in plain else plain
    if isinstance(spec, list):
        return [without_legends(inner) for inner in spec]
    return spec


def data(value: Any) -> str:  # noqa: ANN401  whatever JSON can hold
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


def _own(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _style() -> str:
    light, dark = style_variables("light"), style_variables("dark")
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark}}}}}"
        f":root[data-theme=light]{{color-scheme:light;{light}}}"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}"
        f"@media print{{:root,:root[data-theme]{{color-scheme:light;{light}}}}}" + _own("page.css")
    )


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
