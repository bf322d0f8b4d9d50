"""Turns what a command printed or wrote into text that is the same on every machine.

HTML keeps its text and a hash per chart, SVG its labels, Parquet its schema and rows, an archive
its names.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
import zipfile
from collections import Counter
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pathlib import Path

_BLOCKS = {
    "address", "article", "aside", "button", "caption", "dd", "details", "div", "dl", "dt",
    "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "header", "hr",
    "label", "legend", "li", "main", "nav", "ol", "option", "p", "pre", "section", "select",
    "summary", "table", "tbody", "template", "thead", "title", "tr", "ul",
}  # fmt: skip
_CELLS = ("td", "th")
_SILENT = ("script", "style")


class _Words(HTMLParser):
    """The text of a page, one line per block and one per row of a table."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = [""]
        self.charts = ""
        self._silent = ""
        self._is_charts = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SILENT:
            self._silent = tag
            self._is_charts = dict(attrs).get("id") == "charts"
        elif tag in _BLOCKS:
            self.lines.append("")
        elif tag in _CELLS:
            self.lines[-1] += " | "

    def handle_endtag(self, tag: str) -> None:
        if tag == self._silent:
            self._silent = ""
        elif tag in _BLOCKS:
            self.lines.append("")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.lines[-1] += data
        elif self._is_charts:
            self.charts += data


def html_text(page: str) -> str:
    """The text of a page, and a hash of each chart's specification."""
    parser = _Words()
    parser.feed(page)
    parser.close()
    lines = [" ".join(line.split()).removeprefix("| ") for line in parser.lines]
    lines += charts_text(json.loads(parser.charts)["charts"]) if parser.charts else []
    return "\n".join(line for line in lines if line) + "\n"


def charts_text(charts: list[dict[str, Any]]) -> list[str]:
    """One line per chart: its id and a hash of everything else in it."""
    return [f"[chart {one.get('id')}: {_hash(one)}]" for one in charts]


def _hash(value: object) -> str:
    dumped = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(dumped.encode()).hexdigest()[:16]


class _Labels(HTMLParser):
    """The labels of a drawing, and how many shapes of each kind it has."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.labels: list[str] = []
        self.shapes: Counter[str] = Counter()
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.shapes[tag] += 1
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self._inside != "style":
            self.labels.append(" ".join(data.split()))


def svg_text(drawing: str) -> str:
    """The labels of an SVG in their order, and the number of its shapes."""
    parser = _Labels()
    parser.feed(drawing)
    shapes = ", ".join(f"{count} {tag}" for tag, count in sorted(parser.shapes.items()))
    return "\n".join([*parser.labels, f"[{shapes}]"]) + "\n"


def _parquet_text(path: Path) -> str:
    table = pq.read_table(path)
    names = [f"{field.name}: {field.type}" for field in table.schema]
    rows = [json.dumps(row, default=str) for row in table.to_pylist()]
    return "\n".join([*names, *rows]) + "\n"


def _archive_text(path: Path) -> str:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as packed:
            names = packed.namelist()
    else:
        with tarfile.open(path) as archive:
            names = archive.getnames()
    return "\n".join(sorted(names)) + "\n"


def file_text(path: Path) -> str:
    """What a file holds, as text."""
    if path.suffix == ".parquet":
        return _parquet_text(path)
    if path.suffix in (".gz", ".zip"):
        return _archive_text(path)
    if path.suffix == ".png":
        return f"{path.read_bytes()[:8]!r}\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        return html_text(text)
    return svg_text(text) if path.suffix == ".svg" else text


def replaced(text: str, names: dict[str, str], patterns: list[tuple[str, str]]) -> str:
    """The text with these paths by their names, the longest first, then these patterns."""
    for path in sorted(names, key=len, reverse=True):
        text = text.replace(path, names[path])
    for pattern, name in patterns:
        text = re.sub(pattern, name, text)
    return text
