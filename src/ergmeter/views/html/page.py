"""One page that needs nothing else: style, script, charts and text in a single file.

The trap: a run that is called `<script>`. Everything that comes from a run goes through `text`; the
charts' data stands in a block of JSON in which no `<` is left; and the page allows itself, by a
content security policy, just the two scripts and the one style whose hashes it names. Nothing is
loaded, so the page is the same on a laptop in a train, and in ten years.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.views.charts.palette import config, style_variables
from ergmeter.views.plots import converter, lite
from ergmeter.views.run.card import in_short

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.runlog.reader import Run
    from ergmeter.views.charts.chart import Chart, Table

_HERE = Path(__file__).parent
# Characters: of a cell on one line and of one that is no sentence; beyond which a word is broken.
_SHORT, _PHRASE, _WORD = 28, 48, 40
_JOINT = re.compile(r"(?<=\w[./])(?=[A-Za-z]\w{4})")


def text(value: object) -> str:
    """Anything as text, in an element or in an attribute. What can't be shown is left out."""
    cleaned = "".join(c for c in str(value) if c in "\n\t" or c.isprintable())
    return html.escape(cleaned, quote=True)


def header(name: str, about: str, links: dict[str, str]) -> str:
    """The head of a page: what it is of, and the way to its parts."""
    items = "".join(f'<li><a href="#{id_}">{text(word)}</a></li>' for id_, word in links.items())
    return (
        f'<header><div class="bar"><h1>{text(name)}</h1>'
        f'<button type="button" id="theme">dark colours</button></div>'
        f'<p class="dim">{text(about)}</p>'
        f'<nav aria-label="parts of the page"><ul>{items}</ul></nav></header>'
    )


def section(id_: str, title: str, *parts: str) -> str:
    """A part of the page, with a heading that can be linked to."""
    inner = "\n".join(part for part in parts if part)
    return (
        f'<section id="{text(id_)}" aria-labelledby="{text(id_)}-title">'
        f'<h2 id="{text(id_)}-title">{text(title)}</h2>\n{inner}\n</section>'
    )


def table(found: Table, *, caption: str) -> str:
    """Rows and columns, that scroll by themselves where the page is narrow."""
    head = "".join(f'<th scope="col">{text(one)}</th>' for one in found.head)
    rows = "".join(f"<tr>{''.join(map(td, row))}</tr>" for row in found.rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def td(words: str) -> str:
    """A cell of a table, as wide as its words ask for: a short one stays on one line, a sentence
    has room, a path or a key may go on below after a joint, and just a word that is too long for
    any column may be broken."""
    kind = "short" if len(words) <= _SHORT else "prose" if len(words) > _PHRASE else "phrase"
    if max(map(len, words.split()), default=0) > _WORD:
        kind = "unbroken"
    return f'<td class="{kind}">{_JOINT.sub("<wbr>", text(words))}</td>'


def listed(told: Iterable[str]) -> str:
    """Sentences, one below the other; nothing where there are none."""
    items = "".join(f"<li>{text(line)}</li>" for line in told)
    return f"<ul>{items}</ul>" if items else ""


def figure(chart: Chart) -> str:
    """A chart with its title, its note, and its content in words."""
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
    place = f'<div class="chart" id="chart-{text(chart.id)}"></div>'
    if len(chart.legend) > 1 or chart.axes:  # a single line of one run is what the title says
        labels = "".join(
            f'<li class="{colour}">{text(label)}</li>' for label, colour in chart.legend
        )
        place = f'<ul class="legend">{labels}</ul>{place}'
    return f'<figure id="{text(chart.id)}">{title}{place}{note}{words}</figure>'


def absent(charts: Iterable[Chart], run: Run) -> str:
    """Charts that could not be drawn: those that share a reason in one line with it."""
    return reasons(((one.title, one.reason) for one in charts if one.spec is None), run)


def reasons(told: Iterable[tuple[str, str]], run: Run, *, word: str = "Not shown") -> str:
    """What is absent and why, once for each reason. What each probe said stands at one place."""
    by_reason: dict[str, list[str]] = {}
    for what, why in told:
        by_reason.setdefault(why, []).append(what)
    lines = []
    for why, titles in by_reason.items():
        short = in_short(why, run)
        more = ' (<a href="#probes">what each probe said</a>)' if short != why else ""
        lines.append(
            f'<p class="absent">{word}: {text(", ".join(titles))}. Why: {text(short)}{more}</p>'
        )
    return "".join(lines)


def page(
    *, title: str, header: str, sections: Iterable[str], charts: Iterable[Chart],
    whole_s: tuple[float, float], counted_s: tuple[float, float],
) -> str:  # fmt: skip
    """The whole document."""
    held = {
        "config": {**config(), "aria": False},  # the script describes each as a whole
        "whole": list(whole_s),
        "counted": list(counted_s),
        "charts": [
            {
                "id": one.id,
                "onTime": one.on_time,
                "spec": without_legends(one.spec),
                **({"axes": one.axes, "axis": one.axis} if one.axes else {}),
            }
            for one in charts
            if one.spec is not None
        ],
    }
    library, script, style = vega(), _own("drawing.js") + _own("page.js"), _style()
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)};"
        f" style-src {_hash(style)}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    parts = "\n".join(sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{text(title)}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">to the figures</a>
{header}
<main id="main">
{parts}
</main>
<script type="application/json" id="charts">{data(held)}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


def without_legends(spec: Any) -> Any:  # noqa: ANN401  whatever JSON can hold
    """The same, for a page that has legends of its own: Vega's do not wrap."""
    if isinstance(spec, dict):
        kept = {key: without_legends(inner) for key, inner in spec.items() if key != "legend"}
        return {**kept, "legend": None} if "field" in kept and "scale" in kept else kept
    if isinstance(spec, list):
        return [without_legends(inner) for inner in spec]
    return spec


def data(value: Any) -> str:  # noqa: ANN401  whatever JSON can hold
    """JSON in which nothing ends a script or begins one."""
    dumped = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def vega() -> str:
    """Vega, Vega-Lite and Vega-Embed, as their Python package has them: 0.9 MB, in 2 s."""
    bundle = str(converter().javascript_bundle(vl_version=lite()))
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
