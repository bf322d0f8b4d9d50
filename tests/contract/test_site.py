"""The site builds without a warning, and nothing on its pages comes from another host."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown.extensions.toc import slugify
from markdown_it import MarkdownIt
from scripts import python_reference

from tests.documented import DOCS, ROOT, build_site

GENERATED = {
    *("commands.md", "metrics.md", "python-api.md", "conventions.md", "hardware.md"),
    *("published.md", "gallery.md"),
}
WRITTEN = [
    path
    for path in sorted(DOCS.rglob("*.md"))
    if path.relative_to(DOCS).as_posix() not in GENERATED
]
# What a page loads by itself. `a` is followed by the reader alone.
LOADED = {
    "script": ("src",), "img": ("src", "srcset"), "iframe": ("src",), "source": ("src", "srcset"),
    "video": ("src", "poster"), "audio": ("src",), "embed": ("src",), "object": ("data",),
    "link": ("href",), "use": ("href", "xlink:href"), "form": ("action",),
}  # fmt: skip
ABSOLUTE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
IN_STYLE = re.compile(r"(?:@import\s+|url\()\s*[\"']?\s*((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_site(folder)
    return folder


def test_it_has_every_page(site: Path) -> None:
    for path in DOCS.rglob("*.md"):
        assert (site / path.relative_to(DOCS).with_suffix(".html")).is_file()
    assert (site / "gallery" / "train-1b.html").is_file()
    assert (site / "repository" / "examples" / "hf_trainer.py.html").is_file()
    assert (site / "search" / "search_index.json").is_file()


def test_a_broken_link_or_anchor_or_a_page_without_a_place_is_an_error(tmp_path: Path) -> None:
    inherited = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": "docs", "hooks": []}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump({**inherited, "nav": ["index.md"]}))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# a\n\n[b](nothing.md), [c](#nowhere)\n")
    (tmp_path / "docs" / "other.md").write_text("# other\n")
    with pytest.raises(AssertionError) as error:
        build_site(tmp_path / "site", tmp_path / "mkdocs.yml")
    for text in ("'nothing.md', but the target is not found", "#nowhere", "other.md"):
        assert text in str(error.value)
    assert str(error.value).count("WARNING") >= 3


class Requests(HTMLParser):
    """Collects what a page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = LOADED.get(tag, ())
        values = [value or "" for name, value in attrs if name in names]
        self.elsewhere += [f"<{tag}> {value}" for value in values if ABSOLUTE.match(value)]
        styles = [value or "" for name, value in attrs if name == "style"]
        self.elsewhere += [match for style in styles for match in IN_STYLE.findall(style)]


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    for path in pages:
        text = path.read_text("utf-8")
        parser = Requests()
        parser.feed(text)
        styles = re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)
        parser.elsewhere += [match for style in styles for match in IN_STYLE.findall(style)]
        assert parser.elsewhere == [], path.relative_to(site)
    for path in (*site.rglob("*.css"), *site.rglob("*.svg")):
        assert IN_STYLE.findall(path.read_text("utf-8")) == [], path.relative_to(site)


def test_what_loads_from_another_host_is_seen() -> None:
    parser = Requests()
    parser.feed('<script src="https://cdn.example/a.js"></script><img src="//example/a.png">')
    parser.feed('<a href="https://example.org">read</a><link href="assets/a.css">')
    assert len(parser.elsewhere) == 2
    assert IN_STYLE.findall("@import 'https://example/a.css'; src: url(https://example/b.woff2)")


def test_the_menu_has_the_five_sections_and_names_no_host() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    settings = yaml.safe_load(text)
    sections = ["Quickstart", "Tutorials", "How-to", "Reference", "Concepts"]
    assert [name for section in settings["nav"] for name in section] == sections
    assert [line for line in text.splitlines() if "http" in line] == []
    assert settings["theme"]["font"] is False
    assert settings["strict"] is True


def test_there_are_at_most_40_pages_beside_generated_ones() -> None:
    assert len(WRITTEN) <= 40
    for name in GENERATED:
        text = (DOCS / name).read_text()
        assert re.search(r"(?i)made (from|by)", text), name


def test_the_api_page_is_what_the_source_says() -> None:
    assert (DOCS / "python-api.md").read_text() == python_reference.page(), "run ./dev docs"


class Shape(HTMLParser):
    """The text of a page with its lists, tables and headings."""

    KEPT = ("li", "ul", "ol", "table", "th", "td", "pre", "h1", "h2", "h3", "h4", "blockquote")

    def __init__(self, *, inside: str = "") -> None:
        super().__init__()
        self._inside = inside
        self._is_inside = not inside
        self._left_out = ""
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_inside |= tag == self._inside
        if ("class", "headerlink") in attrs or tag in ("script", "style", "button"):
            self._left_out = tag
        elif self._is_inside and tag in self.KEPT:
            self.parts.append(f"<{tag}>")

    def handle_endtag(self, tag: str) -> None:
        self._is_inside &= tag != self._inside or not self._inside
        if tag == self._left_out:
            self._left_out = ""

    def handle_data(self, data: str) -> None:
        if self._is_inside and not self._left_out:
            self.parts.append(data)


def shape(html: str, **options: Any) -> str:
    parser = Shape(**options)
    parser.feed(html)
    text = re.sub(r"\s+", "", "".join(parser.parts))
    return text.replace("<table><table>", "<table>")  # of code with line numbers


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_the_site_shows_what_other_renderers_of_markdown_show(site: Path, page: Path) -> None:
    """MkDocs' Markdown wants blank lines and indents that others do not."""
    plain = MarkdownIt("commonmark").enable("table").render(page.read_text("utf-8"))
    built = (site / page.relative_to(DOCS).with_suffix(".html")).read_text("utf-8")
    assert shape(built, inside="article") == shape(plain)


OUTSIDE = [*sorted(ROOT.glob("*.md")), ROOT / "bench" / "README.md"]


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: page.name)
def test_links_of_pages_outside_the_site_lead_to_headings(page: Path) -> None:
    """Those of the site's own pages are checked by the build."""
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        path = page.parent / target if target else page
        if page.name != "CHANGELOG.md":  # history names pages as they were
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {slugify(re.sub(r"[`*]|\]\([^)]*\)|\[", "", one), "-") for one in headings}
            assert anchor in slugs, f"{page.name}: {target}#{anchor}"
