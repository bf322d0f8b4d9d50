"""Parts of `erg analyze` as Markdown, for a pull request or an issue.

The trap: a kernel that is called `<img ...>` or `a|b`. Whatever is not ours is escaped, so that it
is shown as it is and can't end a cell, begin a tag, make a link or call somebody by name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ergmeter.units import printable
from ergmeter.views.analyze.blocks import Items, TableBlock, words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ergmeter.views.analyze.blocks import Block, PagePart

_SPECIAL = re.compile(r"[\\`*\[\]|~]")
# Between letters or digits an underscore is one; elsewhere it may begin emphasis.
_EMPHASIS = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# What becomes a link or a mention without any markup. A backslash does not help, since that is
# gone before they are looked for; a comment parts the text.
_LINKED = re.compile(r"(?<=:)(?=//)|(?<=\bwww)(?=\.)|(?<=@)(?=\w)", re.IGNORECASE)
_COMMENT = "<!-- -->"
# A heading, or an item of a list.
_START = re.compile(r"(#{1,6}(?=\s|$)|[-+](?=\s)|\d+(?=[.)](\s|$)))")


def markdown(title: str, parts: Sequence[PagePart]) -> str:
    """The whole text."""
    lines = [f"## {escaped(title)}"]
    for part in parts:
        lines += ["", f"### {escaped(part.title)}"]
        for block in part.blocks:
            lines += ["", *_block(block)]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """A text on one line, in which nothing is markup."""
    flat = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    flat = _EMPHASIS.sub(r"\\_", _SPECIAL.sub(r"\\\g<0>", flat)).replace("!\\[", "\\!\\[")
    flat = _LINKED.sub(_COMMENT, flat)
    start = _START.match(flat)
    if start is None:
        return flat
    at = start.end() if start[0].isdigit() else 0  # 1\. and not \1.
    return f"{flat[:at]}\\{flat[at:]}"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, TableBlock):
        yield _row(block.head)
        yield _row(["---"] * len(block.head))
        for row in block.rows:
            yield _row(map(words, row))
    elif isinstance(block, Items):
        for text in block.texts:
            yield f"- {escaped(text)}"
    elif block.is_to_copy:
        yield from ("```text", printable(block.text).replace("`", "'"), "```")
    else:
        yield escaped(block.text)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"
