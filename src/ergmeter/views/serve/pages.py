"""The pages: frames that the script fills from the API.

The trap: a run's name in a page's source. Nothing of a run stands in these frames: what the script
gets from the API it sets as text, which a browser shows and never reads.
"""

from __future__ import annotations

import asyncio
import html
import re
from typing import TYPE_CHECKING

from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from ergmeter.errors import ErgmeterError, FormatError
from ergmeter.views.serve import assets
from ergmeter.views.serve.guard import refused, wants_page
from ergmeter.views.serve.pool import LIBRARY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from ergmeter.views.serve.folder import Kind

_NAV = {"/": "Runs", "/benches": "Benches", "/ledgers": "Ledgers"}
_FRAME = """<!doctype html>
<html lang="en" data-page="{page}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · erg serve</title>
<link rel="icon" href="{icon}">
<link rel="stylesheet" href="{css}">
<script src="{theme}"></script>
<script src="{script}" type="module" data-worker="{worker}" data-charts="{charts}"></script>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header class="bar">
<a class="brand" href="/">erg</a>
<nav aria-label="Pages">{nav}</nav>
<button type="button" id="theme" aria-label="Dark or light">◐</button>
</header>
<main id="content" tabindex="-1">
<h1 id="title">{title}</h1>
<noscript><p>These pages are made by a script. <code>erg report</code> and <code>erg list</code> say
the same on a terminal.</p></noscript>
{body}
</main>
</body>
</html>
"""
_RUNS = """<form class="controls" id="filters" role="search">
<label class="wide">Search <input type="search" id="q" autocomplete="off"
 placeholder="name, model, tag, note"></label>
<label>State <select id="state"></select></label>
<label>Model <select id="model"></select></label>
<label>Device <select id="device"></select></label>
<label>Tag <select id="tag"></select></label>
<label class="check" id="cells-label" hidden><input type="checkbox" id="cells"> bench cells</label>
</form>
<p class="under"><span id="count" role="status">reading the directory</span>
<a id="compare" class="button" aria-disabled="true">compare: choose two runs</a></p>
<div class="scroll" role="region" aria-label="List of runs" tabindex="0">
<table id="runs"><thead></thead><tbody></tbody></table></div>
<p id="none" class="state" role="status" hidden></p>
<ul id="left-out" class="dim"></ul>"""
_RUN = """<p id="state-line" class="state" role="status">reading the run</p>
<div id="live" hidden><h2>Just now</h2><p id="window" class="dim"></p>
<dl class="tiles" id="tiles"></dl><div id="no-tiles"></div><p id="marks" class="dim"></p></div>
<div id="report"><p class="dim" id="report-note">reading it: a long run takes some seconds</p>
</div>"""
_COMPARE = '<p class="state" id="state-line" role="status">comparing</p><div id="compared"></div>'
_BENCH = """<form class="controls" id="axes">
<label>Down <select id="down"></select></label><label>Across <select id="across"></select></label>
<label>Figure <select id="figure"></select></label></form>
<p class="state" id="state-line" role="status">reading the cells</p><div id="matrix"></div>"""
_NONE = '<p class="state" data-kind="bad">{why}. <a href="/">All runs</a></p>'
_TITLES = {404: "Nothing here", 422: "Can't be read", 500: "That failed"}
_AT_ONCE_S = 1.0
_OURS = ("script-src", "script-src-elem", "style-src", "style-src-elem", "img-src")
_POLICY = re.compile('<meta http-equiv="Content-Security-Policy" content="([^"]*)">')
_TABLE = '<p class="state" id="state-line" role="status">reading</p><div id="table"></div>'


def routes() -> list[Route]:
    """Every page, and the files they are made with."""
    table = {
        "/": ("runs", "Runs", _RUNS),
        "/compare": ("compare", "Comparison", _COMPARE),
        "/benches": ("benches", "Benches", _TABLE),
        "/ledgers": ("ledgers", "Ledgers", _TABLE),
    }
    found = [Route(path, _page(*what)) for path, what in table.items()]
    return [
        *found,
        Route("/bench/{id}", _page_of("bench", frame("bench", "Bench", _BENCH))),
        Route("/ledger/{id}", _page_of("ledger", frame("ledger", "Ledger", _TABLE))),
        Route("/run/{id}", _run),
        Route("/run/{id}/report", _report),
        Route("/static/{name}", assets.served),
        Route("/favicon.ico", assets.icon),
    ]


async def _run(request: Request) -> Response:
    """A run: its report where that is there at once, else a page that follows it until it is."""
    desk = request.app.state.desk
    place = await asyncio.to_thread(desk.folder.place, request.path_params["id"], "run")
    if place is None:
        return without(request, 404, "There is no run of this address")
    try:
        found = await desk.report_soon(place, within_s=_AT_ONCE_S)
    except ErgmeterError:
        found = None  # the page says why
    return HTMLResponse(frame("run", "Run", _RUN)) if found is None else _as_page(found)


async def _report(request: Request) -> Response:
    """The report of a run, however long it takes to make."""
    desk = request.app.state.desk
    place = await asyncio.to_thread(desk.folder.place, request.path_params["id"], "run")
    if place is None:
        return without(request, 404, "There is no run of this address")
    try:
        return _as_page(await desk.report(place))
    except ErgmeterError as error:
        return without(request, 422, desk.folder.shown(str(error)))


def without(request: Request, code: int, why: str) -> Response:
    """Why there is no such page: as a page for a browser, as JSON for a program and the API."""
    if not wants_page(request.url.path, request.headers):
        return refused(code, why)
    return HTMLResponse(frame("none", _TITLES[code], _NONE.format(why=html.escape(why))), code)


def _as_page(found: bytes) -> Response:
    """The report as a page of the app: with the way back, and the library from its own file."""
    library = f'<script src="{assets.address("charts.js")}"></script>'
    page = found.decode().replace(LIBRARY, library, 1)
    policy = _POLICY.search(page)
    if policy is None:
        raise FormatError("the report names no policy of its own")
    page = page.replace(policy[0], _head(), 1)
    nav = f'<nav class="app" aria-label="erg serve">{_nav()}</nav>'
    page = page.replace("<body>", f"<body>\n{nav}", 1)
    return HTMLResponse(page, headers={"content-security-policy": _widened(policy[1])})


def _widened(policy: str) -> str:
    """What a report allows itself, and our own files beside it."""
    directives = [part.strip() for part in html.unescape(policy).split(";") if part.strip()]
    widened = [f"{part} 'self'" if part.partition(" ")[0] in _OURS else part for part in directives]
    return "; ".join([*widened, "frame-ancestors 'none'"])


def _head() -> str:
    return (
        f'<link rel="icon" href="{assets.address("icon.svg")}">'
        f'<link rel="stylesheet" href="{assets.address("nav.css")}">'
        f'<script src="{assets.address("theme.js")}"></script>'
    )


def _nav() -> str:
    links = "".join(f'<a href="{address}">{word}</a>' for address, word in _NAV.items())
    return f'<a href="/">erg</a>{links}'


def _page(page: str, title: str, body: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_request: Request) -> Response:
        return HTMLResponse(frame(page, title, body))

    return answer


def _page_of(kind: Kind, page: str) -> Callable[[Request], Awaitable[Response]]:
    """A page about something that a scan has found; where it has not, one that says so."""

    async def answer(request: Request) -> Response:
        folder = request.app.state.desk.folder
        if await asyncio.to_thread(folder.place, request.path_params["id"], kind) is None:
            return without(request, 404, f"There is no {kind} of this address")
        return HTMLResponse(page)

    return answer


def frame(page: str, title: str, body: str) -> str:
    """A whole page around a body. What of it is a run's has been escaped."""
    nav = "".join(f'<a href="{address}">{word}</a>' for address, word in _NAV.items())
    return _FRAME.format(
        page=page,
        title=title,
        body=body,
        nav=nav,
        css=assets.address("app.css"),
        theme=assets.address("theme.js"),
        script=assets.address("app.js"),
        worker=assets.address("watch.js"),
        charts=assets.address("charts.js"),
        icon=assets.address("icon.svg"),
    )
