"""MkDocs hook: pages link to files of the repository outside docs/, which the site shows too.

Such a file becomes a page under `repository/`: Markdown as it is, code in a block, a folder as a
list of its files. So every link works without a network and names no host.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files, InclusionLevel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)((?:#[^)\s]*)?)(?=\))")
_CELL = re.compile(r"<td[ >].*?</td>", re.DOTALL)
_LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
_origins: dict[str, Path] = {}  # generated pages, by their place below docs/


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs/ that a page links to, and what those link to."""
    _origins.clear()
    pending = [target for path in DOCS.rglob("*.md") for target in _outside(path, path.read_text())]
    while pending:
        target = pending.pop()
        place = _place(target)
        if place in _origins:
            continue
        _origins[place] = target
        text = _text(target)
        level = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, place, content=text, inclusion=level))
        pending += _outside(target, text)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links to files outside docs/ into links to their pages."""
    place = page.file.src_uri
    origin = _origins.get(place, DOCS / place)

    def link(match: re.Match[str]) -> str:
        target = _resolved(origin, match[1])
        if target is None:
            return match[0]
        inside = target.is_relative_to(DOCS)
        new = target.relative_to(DOCS).as_posix() if inside else _place(target)
        return os.path.relpath(new, PurePosixPath(place).parent) + match[2]

    return _LINK.sub(link, markdown)


def on_page_content(html: str, **_: object) -> str:
    r"""Show `\|` in a table's code as |, as other renderers of Markdown do."""
    return _CELL.sub(lambda match: match[0].replace("\\|", "|"), html)


def _resolved(origin: Path, link: str) -> Path | None:
    """The file of the repository that a link leads to, if there is one."""
    folder = origin if origin.is_dir() else origin.parent
    target = (folder / link).resolve()
    return target if target.exists() and target.is_relative_to(ROOT) else None


def _outside(origin: Path, text: str) -> Iterator[Path]:
    for match in _LINK.finditer(text):
        target = _resolved(origin, match[1])
        if target is not None and not target.is_relative_to(DOCS):
            yield target


def _place(target: Path) -> str:
    """Where the page of a file is, below docs/."""
    path = target.relative_to(ROOT).as_posix()
    return f"repository/{path.removesuffix('.md')}.md"


def _text(target: Path) -> str:
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        inner = sorted(path.relative_to(target).as_posix() for path in target.rglob("*.*"))
        listed = [path for path in inner if "__pycache__" not in path and "." in path]
        return f"# {name}\n\n" + "".join(f"- [{path}]({path})\n" for path in listed)
    text = target.read_text()
    if target.suffix == ".md":
        return text
    return f"# {name}\n\n````{_LANGUAGES.get(target.suffix, 'text')}\n{text}````\n"
