"""The HTML pages that the script fills from the API, and their static files.

No text of a run is in a page's source: the script sets it as text. Static files have a content
digest in their address, so that browsers can cache them for good. The charting library is the one
that vl-convert ships, about a megabyte.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata, resources

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from ergmeter.errors import ErgmeterError, FormatError
from ergmeter.metrics.catalog import titles_in
from ergmeter.views.charts import chart
from ergmeter.views.serve.folder import Kind
from ergmeter.views.serve.guard import refused, wants_page
from ergmeter.views.serve.pool import LIBRARY

# Static files.


_TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_NAMES = ("app.css", "nav.css", "app.js", "theme.js", "watch.js", "icon.svg")
_LIBRARY = "charts.js"


@dataclass(frozen=True, slots=True)
class Asset:
    """A static file as it is sent."""

    body: bytes
    small: bytes
    digest: str
    media_type: str


@cache
def asset(name: str) -> Asset:
    """Return a static file by name."""
    text = _read(__package__, f"static/{name}")
    if name == "app.css":
        text = chart.theme_css() + _read("ergmeter.views.html", "page.css") + text
    if name == "app.js":
        text = _read("ergmeter.views.html", "drawing.js") + text
    return _packed(text.encode(), name)


@lru_cache(20)
def _packed(body: bytes, name: str) -> Asset:
    digest = hashlib.sha256(body).hexdigest()[:16]
    return Asset(body, gzip.compress(body, 6, mtime=0), digest, _TYPES[name.rpartition(".")[2]])


def address(name: str) -> str:
    """Return the address of a static file; does not build the charting library."""
    stem, _, ending = name.rpartition(".")
    digest = _bundle_version() if name == _LIBRARY else asset(name).digest
    return f"/static/{stem}-{digest}.{ending}"


async def served(request: Request) -> Response:
    """Serve a static file, cacheable for a year."""
    file_name = request.path_params["name"]
    stem, _, rest = file_name.rpartition("-")
    name = f"{stem}.{rest.rpartition('.')[2]}"
    if name not in (*_NAMES, _LIBRARY) or address(name) != f"/static/{file_name}":
        return refused(404, "no such file")
    if name == _LIBRARY:
        body = await request.app.state.shared.library()
        packed = await run_in_threadpool(_packed, body, name)
    else:
        packed = asset(name)
    headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
    body = packed.body
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"], body = "gzip", packed.small
    return Response(body, headers=headers, media_type=packed.media_type)


async def icon(_request: Request) -> Response:
    """Serve /favicon.ico."""
    return RedirectResponse(address("icon.svg"))


@cache
def _bundle_version() -> str:
    try:
        version = metadata.version("vl-convert-python")
    except metadata.PackageNotFoundError:
        version = "none"  # asked for it, the worker says what to install
    return hashlib.sha256(version.encode()).hexdigest()[:16]


def _read(package: str, path: str) -> str:
    return resources.files(package).joinpath(path).read_text(encoding="utf-8")


_NAV = {"/": "Runs", "/benches": "Benches", "/ledgers": "Ledgers"}
_COMPARE = '<p class="state" id="state-line" role="status">comparing</p><div id="compared"></div>'
_NONE = '<p class="state" data-kind="bad">{why}. <a href="/">All runs</a></p>'
_TITLES = {404: "Nothing here", 422: "Can't be read"}
_AT_ONCE_S = 1.0
_OURS = ("script-src", "script-src-elem", "style-src", "style-src-elem", "img-src")
_POLICY = re.compile('<meta http-equiv="Content-Security-Policy" content="([^"]*)">')
_TABLE = '<p class="state" id="state-line" role="status">reading</p><div id="table"></div>'


def routes() -> list[Route]:
    """Return the routes of pages and static files."""
    return [
        Route("/", _page(frame("runs", "Runs", _template("runs")))),
        Route("/compare", _page(frame("compare", "Comparison", _COMPARE))),
        Route("/benches", _page(frame("benches", "Benches", _TABLE))),
        Route("/ledgers", _page(frame("ledgers", "Ledgers", _TABLE))),
        Route("/bench/{id}", _page(frame("bench", "Bench", _template("bench")), "bench")),
        Route("/ledger/{id}", _page(frame("ledger", "Ledger", _TABLE), "ledger")),
        Route("/run/{id}", _run),
        Route("/run/{id}/report", _report),
        Route("/static/{name}", served),
        Route("/favicon.ico", icon),
    ]


async def _run(request: Request) -> Response:
    """Serve a run's report if ready at once, else a page that waits for it."""
    shared = request.app.state.shared
    item = await shared.item(request.path_params["id"], "run")
    body = None
    with suppress(ErgmeterError):  # the page says why
        body = await shared.report_soon(item, within_s=_AT_ONCE_S)
    return HTMLResponse(frame("run", "Run", _template("run"))) if body is None else _as_page(body)


async def _report(request: Request) -> Response:
    """Serve a run's report, however long it takes."""
    shared = request.app.state.shared
    item = await shared.item(request.path_params["id"], "run")
    return _as_page(await shared.report(item))


def _page(page: str, kind: Kind | None = None) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of a page; of a page about an item, it answers 404 without the item."""

    async def answer(request: Request) -> Response:
        if kind is not None:
            await request.app.state.shared.item(request.path_params["id"], kind)
        return HTMLResponse(page)

    return answer


def error_page(request: Request, code: int, why: str) -> Response:
    """Return an error: a page for a browser, JSON for programs and the API."""
    if not wants_page(request.url.path, request.headers):
        return refused(code, why)
    title = _TITLES.get(code, "That failed")
    return HTMLResponse(frame("none", title, _NONE.format(why=html.escape(why))), code)


def _as_page(body: bytes) -> Response:
    """Return the report with navigation and the library from its own file."""
    page = body.decode().replace(LIBRARY, f'<script src="{address(_LIBRARY)}"></script>', 1)
    policy = _POLICY.search(page)
    if policy is None:
        raise FormatError("the report has no content security policy")
    page = page.replace(policy[0], _head(), 1)
    nav = f'<nav class="app" aria-label="erg serve"><a href="/">erg</a>{_links()}</nav>'
    page = page.replace("<body>", f"<body>\n{nav}", 1)
    return HTMLResponse(page, headers={"content-security-policy": _widened(policy[1])})


def _widened(policy: str) -> str:
    """Return the report's content security policy extended by our own files."""
    directives = [part.strip() for part in html.unescape(policy).split(";") if part.strip()]
    widened = [f"{part} 'self'" if part.partition(" ")[0] in _OURS else part for part in directives]
    return "; ".join([*widened, "frame-ancestors 'none'"])


def _head() -> str:
    return (
        f'<link rel="icon" href="{address("icon.svg")}">'
        f'<link rel="stylesheet" href="{address("nav.css")}">'
        f'<script src="{address("theme.js")}"></script>'
    )


def _links() -> str:
    return "".join(f'<a href="{address}">{word}</a>' for address, word in _NAV.items())


def frame(page: str, title: str, body: str) -> str:
    """Return a page around a body whose run text is already escaped."""
    files = {
        "css": "app.css",
        "theme": "theme.js",
        "script": "app.js",
        "worker": "watch.js",
        "charts": _LIBRARY,
        "icon": "icon.svg",
    }
    fields = {name: address(file) for name, file in files.items()}
    titles = {view: titles_in(f"serve {view}") for view in ("list", "live", "run")}
    fields["metrics"] = html.escape(json.dumps(titles))
    template = _template("frame")
    return template.format(page=page, title=title, body=body.rstrip(), nav=_links(), **fields)


def _template(name: str) -> str:
    return _read(__package__, f"templates/{name}.html")
