"""Renders a document as Markdown.

Text from runs and files is escaped: a kernel may be called `<img ...>` or `a|b`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ergmeter.units import printable
from ergmeter.views.document import (
    VERDICTS,
    Document,
    HeadlinePart,
    Items,
    Note,
    Paragraph,
    Part,
    Section,
    Table,
    Weight,
    parts_for,
    printable_lines,
    title_case,
)

_SPECIAL = re.compile(r"[\\`*\[\]|~]")
# Between letters or digits an underscore is literal; elsewhere it may start emphasis.
_EMPHASIS = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# Text that becomes a link or a mention without markup. Backslashes are removed before links are
# looked for, so an HTML comment splits the text instead.
_LINKED = re.compile(r"(?<=:)(?=//)|(?<=\bwww)(?=\.)|(?<=@)(?=\w)", re.IGNORECASE)
_COMMENT = "<!-- -->"
# A heading, or an item of a list.
_START = re.compile(r"(#{1,6}(?=\s|$)|[-+](?=\s)|\d+(?=[.)](\s|$)))")
_LEVEL = 3  # of the headings of sections; a title inside one may begin with a name
_SIGNS: dict[Weight, str] = {
    "serious": "**!!** ",
    "minor": "**!** ",
    "remark": "",
    "ok": "**ok** ",
    "absent": "**-** ",
    **{weight: f"**{words}**: " for weight, (_, words) in VERDICTS.items()},
}


def markdown(document: Document) -> str:
    """Return a document as one Markdown text."""
    title = ", ".join(filter(None, (document.title, document.about)))
    return "\n".join([f"## {escaped(title)}", *_parts(document.body)]) + "\n"


def _parts(parts: Sequence[Part], level: int = _LEVEL) -> Iterator[str]:
    """Yield the lines of parts; items and notes that follow one another are one list.

    `level`: the heading level of sections.
    """
    before: Part | None = None
    for part in parts_for(parts, "markdown"):
        lines = list(_part(part, level))
        is_next_item = isinstance(part, Note) and isinstance(before, Note)
        yield from lines if is_next_item or not lines else ["", *lines]
        before = part if lines else before


def _part(part: Part, level: int) -> Iterator[str]:
    if isinstance(part, Section):
        yield f"{'#' * level} {escaped(part.title if level > _LEVEL else title_case(part.title))}"
        yield from _parts(part.parts, level + 1)
    elif isinstance(part, HeadlinePart):
        answer = escaped(": ".join(filter(None, (part.name, part.text))))
        yield f"**{answer}**" + (f" {escaped(part.about)}" if part.about else "")
    elif isinstance(part, Table):
        yield from _table(part)
    elif isinstance(part, Note):
        yield f"- {_SIGNS[part.weight]}{escaped(part.text)}"
        yield from (f"  - {escaped(line)}" for line in part.effect.splitlines())
    elif isinstance(part, Items):
        yield from (f"- {escaped(text)}" for text in part.texts)
    elif isinstance(part, Paragraph) and part.is_to_copy:
        text = printable_lines(part.text)
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        yield from (f"{fence}text", text, fence)
    elif isinstance(part, Paragraph):
        yield escaped(part.text)


def _table(table: Table) -> Iterator[str]:
    if table.caption:
        yield from (escaped(table.caption), "")
    plain = table.without("bar")
    yield from markdown_table(plain.head, plain.rows)


def escaped(text: str) -> str:
    """Return text on one line with all markup escaped."""
    flat = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    flat = _EMPHASIS.sub(r"\\_", _SPECIAL.sub(r"\\\g<0>", flat)).replace("!\\[", "\\!\\[")
    flat = _LINKED.sub(_COMMENT, flat)
    start = _START.match(flat)
    if start is None:
        return flat
    at = start.end() if start[0].isdigit() else 0  # 1\. and not \1.
    return f"{flat[:at]}\\{flat[at:]}"


def markdown_row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"


def markdown_table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [markdown_row(head), markdown_row(["---"] * len(head)), *map(markdown_row, rows)]
