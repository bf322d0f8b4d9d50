"""A self-contained HTML page: style, scripts, charts and text in one file, nothing loaded.

Names come from runs and may contain markup. All text from a run goes through `text`, the JSON
of the charts contains no `<`, and the content security policy allows only the style and the two
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
from ergmeter.units import grouped
from ergmeter.views.charts.chart import Chart, Table, config, style_variables
from ergmeter.views.charts.plots import converter, vega_lite_version
from ergmeter.views.run.card import short_reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.runlog.reader import Run

_HERE = Path(__file__).parent
# Characters: of a cell kept on one line, of a phrase, and of a word that may be broken.
_SHORT, _PHRASE, _WORD = 28, 48, 40
_JOINT = re.compile(r"(?<=\w[./])(?=[A-Za-z]\w{4})")


def text(value: object) -> str:
    """Escape anything as HTML text or attribute; unprintable characters are dropped."""
    cleaned = "".join(c for c in str(value) if c in "\n\t" or c.isprintable())
    return html.escape(cleaned, quote=True)


def header(name: str, about: str, links: dict[str, str], *, more: str = "") -> str:
    """Return the page header: title, `more` HTML, and navigation."""
    items = "".join(f'<li><a href="#{id_}">{text(word)}</a></li>' for id_, word in links.items())
    return (
        f'<header><div class="bar"><h1>{text(name)}</h1>'
        f'<button type="button" id="theme">dark colours</button></div>'
        f'<p class="dim">{text(about)}</p>{more}'
        f'<nav aria-label="parts of the page"><ul>{items}</ul></nav></header>'
    )


def section(id_: str, title: str, *parts: str) -> str:
    """Return a section with a linkable heading."""
    inner = "\n".join(part for part in parts if part)
    return (
        f'<section id="{text(id_)}" aria-labelledby="{text(id_)}-title">'
        f'<h2 id="{text(id_)}-title">{text(title)}</h2>\n{inner}\n</section>'
    )


def table(table: Table, *, caption: str) -> str:
    """Return a table that scrolls within a narrow page."""
    head = "".join(f'<th scope="col">{text(title)}</th>' for title in table.head)
    rows = "".join(f"<tr>{''.join(map(td, row))}</tr>" for row in table.rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def td(words: str) -> str:
    """Return a table cell with a class for its width.

    Short texts stay on one line and sentences wrap. Paths and keys may break after a separator;
    only words too long for any column break elsewhere.
    """
    kind = "short" if len(words) <= _SHORT else "prose" if len(words) > _PHRASE else "phrase"
    if max(map(len, words.split()), default=0) > _WORD:
        kind = "unbroken"
    return f'<td class="{kind}">{_JOINT.sub("<wbr>", text(words))}</td>'


def bullet_list(sentences: Iterable[str]) -> str:
    """Return sentences as a list, or nothing if there are none."""
    items = "".join(f"<li>{text(line)}</li>" for line in sentences)
    return f"<ul>{items}</ul>" if items else ""


def figure(chart: Chart) -> str:
    """Return a chart with title, note and data table."""
    unit = f" ({text('%' if chart.unit == 'frac' else chart.unit)})" if chart.unit else ""
    title = f"<h3>{text(chart.title)}{unit}</h3>"
    if chart.spec is None:
        why = f'<p class="absent">- {text(chart.reason)}</p>'
        return f'<figure id="{text(chart.id)}">{title}{why}</figure>'
    note = f"<figcaption>{text(chart.note)}</figcaption>" if chart.note else ""
    words = ""
    if chart.table is not None:
        inner = table(chart.table, caption=f"{chart.title}, in words")
        words = f"<details><summary>in words</summary>{inner}</details>"
    holder = f'<div class="chart" id="chart-{text(chart.id)}"></div>'
    if len(chart.legend) > 1 or chart.axes:  # the title already names a single line
        labels = "".join(
            f'<li class="{colour}">{text(label)}</li>' for label, colour in chart.legend
        )
        holder = f'<ul class="legend">{labels}</ul>{holder}'
    return f'<figure id="{text(chart.id)}">{title}{holder}{note}{words}</figure>'


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
    library, script, style = vega(), _own("drawing.js") + _own("page.js"), _style()
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)};"
        f" style-src {_hash(style)}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    return _own("page.html").format(
        policy=policy,
        title=text(title),
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
    light, dark = style_variables("light") + "--link:#0a5a8c;", style_variables("dark")
    dark += "--link:#7cc4f0;"
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
