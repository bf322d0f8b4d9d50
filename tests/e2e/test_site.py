"""The site in a real browser: it asks no other host for anything, and it finds what is searched."""

from __future__ import annotations

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from tests.documented import build_site
from tests.e2e.pages import each_way, needs_chromium

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [needs_chromium, pytest.mark.browser]

PAGES = ("index", "quickstart", "tutorial-training", "report", "compare", "metrics", "python-api")


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each request."""

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    build_site(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@each_way
def test_pages_ask_no_other_host_and_fit_the_window(
    tabs: Any, address: str, width: int, scheme: str
) -> None:
    tab = tabs.new_page()
    answers: list[Any] = []
    complaints: list[str] = []
    tab.on("response", lambda answer: answers.append(answer))
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.set_viewport_size({"width": width, "height": 900})
    tab.emulate_media(color_scheme=scheme)
    for name in PAGES:
        tab.goto(f"{address}/{name}.html")
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        pictures = "[...document.querySelectorAll('article img')]"
        assert tab.evaluate(f"{pictures}.every((one) => one.naturalWidth > 0)"), name
        shown = tab.evaluate("document.body.dataset.mdColorScheme")
        assert shown == ("slate" if scheme == "dark" else "default")
    assert [one.url for one in answers if not one.url.startswith(address)] == []
    assert [one.url for one in answers if one.status not in (200, 304)] == []
    assert complaints == []
    tab.close()


def test_the_search_finds_a_page(tabs: Any, address: str) -> None:
    tab = tabs.new_page()
    tab.goto(f"{address}/index.html")
    tab.fill(".md-search__input", "waterfall")
    tab.wait_for_selector(".md-search-result__link", timeout=60_000)
    links = [one.get_attribute("href") for one in tab.query_selector_all(".md-search-result__link")]
    assert any("diagnose.html" in link for link in links)
    tab.close()
