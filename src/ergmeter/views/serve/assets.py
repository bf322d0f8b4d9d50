"""Scripts and styles, each under the digest of what is in it, so that a browser keeps it for good.

The charting library is what vl-convert brings along, the same that the report has in it: a
megabyte, made once and sent once.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata, resources
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from ergmeter.views.charts import palette
from ergmeter.views.serve.guard import refused

if TYPE_CHECKING:
    from starlette.requests import Request

_TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_NAMES = ("app.css", "nav.css", "app.js", "theme.js", "watch.js", "icon.svg")
_LIBRARY = "charts.js"
_MORE = {
    "light": "--link:#0a5a8c;--good:#00694c;--bad:#a33600;",
    "dark": "--link:#7cc4f0;--good:#3ecfa5;--bad:#ff9b5e;",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file as it is sent."""

    body: bytes
    small: bytes
    digest: str
    media_type: str


@cache
def asset(name: str) -> Asset:
    """One of our files by its name."""
    text = _read(__package__, f"static/{name}")
    if name == "app.css":
        text = _colours() + _read("ergmeter.views.html", "page.css") + text
    if name == "app.js":
        text = _read("ergmeter.views.html", "drawing.js") + text
    return _packed(text.encode(), name)


@lru_cache(20)
def _packed(body: bytes, name: str) -> Asset:
    digest = hashlib.sha256(body).hexdigest()[:16]
    return Asset(body, gzip.compress(body, 6, mtime=0), digest, _TYPES[name.rpartition(".")[2]])


def address(name: str) -> str:
    """Where a file is found; of the charting library without making it."""
    stem, _, ending = name.rpartition(".")
    digest = _bundle_version() if name == _LIBRARY else asset(name).digest
    return f"/static/{stem}-{digest}.{ending}"


async def served(request: Request) -> Response:
    """A file, for a year."""
    said = request.path_params["name"]
    stem, _, rest = said.rpartition("-")
    name = f"{stem}.{rest.rpartition('.')[2]}"
    if name not in (*_NAMES, _LIBRARY) or address(name) != f"/static/{said}":
        return refused(404, "no such file")
    if name == _LIBRARY:
        body = await request.app.state.desk.library()
        found = await run_in_threadpool(_packed, body, name)
    else:
        found = asset(name)
    headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
    body = found.body
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"], body = "gzip", found.small
    return Response(body, headers=headers, media_type=found.media_type)


async def icon(_request: Request) -> Response:
    """What browsers ask for unasked."""
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


def _colours() -> str:
    light, dark = (
        f"color-scheme:{theme};{palette.style_variables(theme)}{more}"
        for theme, more in _MORE.items()
    )
    return (
        f":root{{{light}}}:root[data-theme=dark]{{{dark}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
    )
