"""A page of ours in a real browser, and what every one of them has to be.

The browser is the system's chromium; `./dev test` installs it. Each page is looked at twice and not
once for every question: wide and light, narrow and dark. A window takes the browser
longer to make than a page, so a module has one; what only looks at a page looks at the same one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TIMEOUT_S, eventually

playwright_api = pytest.importorskip("playwright.sync_api")
axe_api = pytest.importorskip("axe_playwright_python.sync_playwright")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: apt-get install chromium"
)
EVIL = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
each_way = pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])

_CUT_OFF = """[...document.querySelectorAll('.chart svg')].flatMap((svg) => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter((text) => {
    const box = text.getBoundingClientRect();
    const shown = getComputedStyle(text).opacity !== '0' && text.textContent.trim();
    return shown && (box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
  }).map((text) => text.textContent);
})"""

# Words of a chart that stand on each other; two lines of one text may touch.
_ON_EACH_OTHER = """[...document.querySelectorAll('.chart svg')].flatMap((svg) => {
  const texts = [...svg.querySelectorAll('text')].filter((text) =>
    getComputedStyle(text).opacity !== '0' && text.textContent.trim());
  const boxes = texts.map((text) => text.getBoundingClientRect());
  return boxes.flatMap((a, first) => boxes.flatMap((b, second) => {
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    return first < second && wide > 1 && high > 2
      ? [`${texts[first].textContent} | ${texts[second].textContent}`] : [];
  }));
})"""

# Words and numbers of tables that go on in the next line, without a place between to break at. A
# cell with a path or a hash that no line has room for is another matter.
_BROKEN = """[...document.querySelectorAll('td,th')].flatMap((cell) => {
  if (cell.textContent.split(/\\s+/).some((word) => word.length > 40)) return [];
  const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  const found = [], part = document.createRange();
  while (walk.nextNode()) {
    for (const word of walk.currentNode.data.matchAll(/[\\p{L}\\d.,_%]+/gu)) {
      part.setStart(walk.currentNode, word.index);
      part.setEnd(walk.currentNode, word.index + word[0].length);
      const tops = [...part.getClientRects()].map((box) => Math.round(box.top));
      if (new Set(tops).size > 1) found.push(word[0]);
    }
  }
  return found;
})"""


class Opened:
    """A page in a tab, and whatever it complained of: errors, refused scripts, wanted addresses."""

    def __init__(self, tab: Any, path: Path, *, width: int = 1280, scheme: str = "light") -> None:
        self.page = tab
        self.complaints: list[str] = []
        self.asked_for: list[str] = []
        self._heard = {
            "console": lambda said: self.complaints.append(f"{said.type}: {said.text}"),
            "pageerror": lambda error: self.complaints.append(str(error)),
            "request": lambda request: self.asked_for.append(request.url),
        }
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(media="screen", color_scheme=scheme)
        for event, act in self._heard.items():
            tab.on(event, act)
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-drawn=true]")

    def close(self) -> None:
        """The tab may show another page."""
        for event, act in self._heard.items():
            self.page.remove_listener(event, act)

    def ask(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def wait(self, condition: str) -> None:
        """Until it holds. Playwright's own way is `eval` in the page, which the policy refuses."""
        eventually(lambda: self.ask(condition), condition)

    def points(self) -> dict[str, int]:
        found: dict[str, int] = self.ask(
            "Object.fromEntries(Object.entries(ergmeterViews)"
            ".map(([id, view]) => [id, view.data('points').length]))"
        )
        return found

    def domains(self) -> dict[str, list[float]]:
        """The time axis of each chart that is drawn over time."""
        found: dict[str, list[float]] = self.ask(
            "Object.fromEntries(Object.entries(ergmeterViews)"
            ".filter(([id, view]) => 'zoom_t' in view.getState().signals)"
            ".map(([id, view]) => [id, view.scale('x').domain()]))"
        )
        return found


@contextmanager
def chromium() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


class Window:
    """The one window of a module, with a tab for pages that are changed and one for each that is
    only looked at."""

    def __init__(self, browser: Any, pages: dict[str, Path]) -> None:
        self._context = browser.new_context()
        self._context.set_default_timeout(TIMEOUT_S * 1000)
        self._pages = pages
        self._tab = self._context.new_page()
        self._last: Opened | None = None
        self._shown: dict[str, Opened] = {}

    def open(self, name: str, **options: Any) -> Opened:
        """Anew, in place of the one before."""
        if self._last is not None:
            self._last.close()
        self._last = Opened(self._tab, self._pages[name], **options)
        return self._last

    def show(self, name: str, *, width: int = 1280, scheme: str = "light") -> Opened:
        """Wide and light, the one that was opened first; any other way, one that is opened anew."""
        if (width, scheme) != (1280, "light"):
            return self.open(name, width=width, scheme=scheme)
        if name not in self._shown:
            self._shown[name] = Opened(self._context.new_page(), self._pages[name])
        return self._shown[name]

    def close(self) -> None:
        self._context.close()


def check_it_is_sound(one: Opened) -> None:
    """No complaint, no request, all of it in the window, and nothing grave by axe."""
    assert one.complaints == []
    assert len(one.asked_for) == 1
    assert one.ask("window.hacked") is None
    assert one.page.query_selector("img") is None
    assert one.page.locator(".chart:has-text('not drawn')").count() == 0
    # Before anything is opened: a page that grows draws its charts anew, in its own time.
    assert one.ask(_CUT_OFF) == []
    assert one.ask(_ON_EACH_OTHER) == []
    one.ask("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    width = one.ask("innerWidth")
    assert one.ask("document.documentElement.scrollWidth") <= width
    assert one.ask(_BROKEN) == []
    for svg in one.page.query_selector_all(".chart svg"):
        assert 200 < svg.bounding_box()["width"] <= width
    found = axe_api.Axe().run(one.page)
    grave = [
        (each["id"], [node["html"][:120] for node in each["nodes"][:3]])
        for each in found.response["violations"]
        if each["impact"] in ("serious", "critical")
    ]
    assert grave == []
