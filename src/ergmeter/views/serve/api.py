"""The read-only JSON API, and its OpenAPI 3.1 document.

All answers are bounded: points in a chart, runs in a comparison. Invalid requests get status 400
and a message with the valid values.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ergmeter.errors import ErgmeterError, FormatError, UsageError
from ergmeter.records import COLUMN_KINDS
from ergmeter.version import __version__
from ergmeter.views.serve.tail import TooManyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from starlette.requests import Request

    from ergmeter.views.serve.app_state import AppState
    from ergmeter.views.serve.folder import Kind, ServedItem

DEFAULT_POINTS, MOST_POINTS = 2000, 10_000
MOST_COMPARED = 50
MOST_WATCHED = 200  # by one stream, which all tabs of a browser share (watch.js knows it too)
MOST_COLUMNS = 12
_DEFAULT_COLUMNS = "power_w"
_KEEP_ALIVE_S = 10.0
_ID = re.compile(r"[0-9a-f]{12}")
_YES = {"": False, "0": False, "1": True, "false": False, "true": True}


# Parameters of the OpenAPI document.


def _parameter(
    name: str, location: str, type_: str, description: str = "", **schema: object
) -> dict[str, Any]:
    """Return the description of a parameter; those in the path and `ids` are required."""
    required = {"required": True} if location == "path" or name == "ids" else {}
    words = {"description": description} if description else {}
    return {"name": name, "in": location, **required, **words, "schema": {"type": type_, **schema}}


def _query(name: str, type_: str, description: str = "", **schema: object) -> dict[str, Any]:
    return _parameter(name, "query", type_, description, **schema)


def _ids(most: int) -> dict[str, Any]:
    pattern = f"^[0-9a-f]{{12}}(,[0-9a-f]{{12}}){{0,{most - 1}}}$"
    words = f"ids of runs, {most} at the most, joined by commas"
    return _query("ids", "string", words, pattern=pattern)


_ID_PARAMETER = _parameter("id", "path", "string", pattern="^[0-9a-f]{12}$")
_ONLY = _query("only", "string", "just these charts, joined by commas: power, steps, loss, ...")
_COLUMN = "|".join(
    [
        *(n for n, kind in COLUMN_KINDS["samples"].items() if kind in ("float", "count")),
        *("step_s", "loss"),
    ]
)
_SERIES = (
    _query(
        "columns",
        "string",
        "columns of the samples, step_s or loss, joined by commas; default power_w",
        pattern=f"^({_COLUMN})(,({_COLUMN})){{0,{MOST_COLUMNS - 1}}}$",
    ),
    _query("from", "number", "seconds since the run began"),
    _query("to", "number"),
    _query(
        "points",
        "integer",
        "no more than so many points, all lines together",
        minimum=10,
        maximum=MOST_POINTS,
        default=DEFAULT_POINTS,
    ),
)
_IDS = _ids(MOST_COMPARED)
_COMPARE = (
    _IDS,
    _query("group_by", "string"),
    _query("anyway", "boolean", default=False),
)
_ERRORS = {
    400: "what was asked makes no sense; `error` says what would",
    401: "a token is needed",
    403: "asked by a page from elsewhere",
    404: "there is nothing of this id",
    405: "read only",
    413: "a question has no body",
    414: "the address is too long",
    421: "this is not the name it is served under",
    422: "its files can't be read; `error` says why",
    503: "too many are watching; `error` says how many may",
}


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI description of the API."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "erg serve",
            "version": __version__,
            "description": "Runs of ergmeter, read only. A figure has value, unit, basis, low,"
            " high, note and `impossible` (null, or why the value cannot be right), or"
            " `missing` with the reason.",
        },
        "paths": {endpoint.path: endpoint.described for endpoint in _ENDPOINTS},
        "components": {"schemas": {"Error": _object("error")}},
    }


def _object(key: str) -> dict[str, Any]:
    return {"type": "object", "required": [key]}


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """An address, its answer, and its description. `key` is a field of every answer."""

    path: str
    answer: Callable[[_Api, Request], Awaitable[Response]]
    summary: str
    parameters: tuple[dict[str, Any], ...] = ()
    key: str = ""  # "": a stream of events

    @property
    def described(self) -> dict[str, Any]:
        """Return the OpenAPI description."""
        content: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
        if self.key:
            content = {"application/json": {"schema": _object(self.key)}}
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        responses: dict[str, Any] = {"200": {"description": self.summary, "content": content}}
        for code, words in _ERRORS.items():
            responses[str(code)] = {"description": words, "content": error}
        parameters = list(self.parameters)
        return {"get": {"summary": self.summary, "parameters": parameters, "responses": responses}}


def routes(shared: AppState) -> list[Route]:
    """Return all routes under /api."""
    api = _Api(shared)
    described = _Endpoint("/api/openapi.json", _Api.described, "this description")
    endpoints = (described, *_ENDPOINTS)
    return [Route(e.path, _careful(partial(e.answer, api))) for e in endpoints]


def _careful(
    answer: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def careful(request: Request) -> Response:
        try:
            return await answer(request)
        except _NotThereError as error:
            return JSONResponse({"error": str(error)}, 404)
        except TooManyError as error:
            return JSONResponse({"error": str(error)}, 503)
        except ErgmeterError as error:
            why = request.app.state.shared.folder.relative(str(error))
            return JSONResponse({"error": why}, 400 if isinstance(error, UsageError) else 422)

    return careful


class _NotThereError(FormatError):
    """The id does not exist."""


class _Api:
    def __init__(self, shared: AppState) -> None:
        self._shared = shared

    async def described(self, _request: Request) -> Response:
        return JSONResponse(openapi_document())

    async def runs(self, request: Request) -> Response:
        body = json.dumps(await self._shared.listing.rows(), default=str).encode()
        tag = f'"{hash(body) & (2**64 - 1):x}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        headers = {"etag": tag, "cache-control": "no-cache"}
        return Response(body, headers=headers, media_type="application/json")

    async def run(self, request: Request) -> Response:
        return _json(await self._shared.read("document", await self._item_of(request, "run")))

    async def row(self, request: Request) -> Response:
        item = await self._item_of(request, "run")
        return JSONResponse(await self._shared.listing.row_read(item))

    async def charts(self, request: Request) -> Response:
        item = await self._item_of(request, "run")
        only = sorted(set(_words(request, "only", MOST_COLUMNS)))
        return _json(await self._shared.charts(item, only))

    async def series(self, request: Request) -> Response:
        item = await self._item_of(request, "run")
        columns = _words(request, "columns", MOST_COLUMNS) or [_DEFAULT_COLUMNS]
        span = (_number(request, "from", -math.inf), _number(request, "to", math.inf))
        if span[0] >= span[1]:
            raise UsageError(f"from={span[0]:g} is not before to={span[1]:g}")
        most = _number(request, "points", DEFAULT_POINTS)
        if not 10 <= most <= MOST_POINTS:
            raise UsageError(f"points={most:g} is not between 10 and {MOST_POINTS}")
        return _json(await self._shared.read("series", item, columns, span, int(most)))

    async def run_events(self, request: Request) -> Response:
        return await self._stream([await self._item_of(request, "run")])

    async def events(self, request: Request) -> Response:
        ids = _words(request, "ids", MOST_WATCHED)
        if not ids or not all(_ID.fullmatch(id) for id in ids):
            raise UsageError("ids=: name runs by their ids, joined by commas")
        items = {id: await asyncio.to_thread(self._shared.folder.item, id, "run") for id in ids}
        # A vanished run must not end the stream of the others.
        gone = [id for id, item in items.items() if item is None]
        return await self._stream([item for item in items.values() if item is not None], gone)

    async def compare(self, request: Request) -> Response:
        items = await self._chosen(request, MOST_COMPARED)
        by = _words(request, "group_by", MOST_COLUMNS)
        anyway = request.query_params.get("anyway", "").lower()
        if anyway not in _YES:
            raise UsageError(f"anyway={anyway[:20]!r} is neither true nor false")
        return _json(await self._shared.compared(items, by, anyway=_YES[anyway]))

    async def benches(self, _request: Request) -> Response:
        return await self._names("bench", "benches")

    async def ledgers(self, _request: Request) -> Response:
        return await self._names("ledger", "ledgers")

    async def bench(self, request: Request) -> Response:
        item = await self._item_of(request, "bench")
        body = json.loads(await self._shared.read("bench", item))
        runs = await asyncio.to_thread(self._shared.folder.items, "run")
        # By cell directory, only runs that a scan found.
        ids = {run.name.removesuffix("/run"): run.id for run in runs if run.bench == item.id}
        return JSONResponse({**body, "runs": ids})

    async def ledger(self, request: Request) -> Response:
        return _json(await self._shared.read("ledger", await self._item_of(request, "ledger")))

    async def _names(self, kind: Kind, word: str) -> Response:
        items = await asyncio.to_thread(self._shared.folder.items, kind)
        return JSONResponse({word: [{"id": item.id, "name": item.name} for item in items]})

    async def _item_of(self, request: Request, kind: Kind) -> ServedItem:
        return await self._item(request.path_params["id"], kind)

    async def _item(self, id: str, kind: Kind) -> ServedItem:
        item = None
        if _ID.fullmatch(id):
            item = await asyncio.to_thread(self._shared.folder.item, id, kind)
        if item is None:
            raise _NotThereError(f"no {kind} {id[:20]!r} here")
        return item

    async def _chosen(self, request: Request, most: int) -> list[ServedItem]:
        ids = list(dict.fromkeys(_words(request, "ids", most)))
        if not ids:
            raise UsageError("ids=: name runs by their ids, joined by commas")
        return [await self._item(id, "run") for id in ids]

    async def _stream(self, items: list[ServedItem], gone: Sequence[str] = ()) -> Response:
        watching = self._shared.tails.watch(items)
        listener = await watching.__aenter__()

        async def events() -> AsyncIterator[bytes]:
            try:
                yield b"retry: 1000\n\n"
                for id in gone:
                    yield _event(json.dumps({"id": id, "state": "gone"}).encode())
                while True:
                    event = await listener.next(_KEEP_ALIVE_S)
                    # A comment line detects a closed connection.
                    yield b"".join(map(_event, event)) or b": still here\n\n"
            finally:
                await watching.__aexit__(None, None, None)

        return StreamingResponse(events(), media_type="text/event-stream")


_ENDPOINTS = (
    _Endpoint("/api/runs", _Api.runs, "every run, with what has been read of it", key="runs"),
    _Endpoint("/api/run/{id}", _Api.run, "what a run came to", (_ID_PARAMETER,), "readings"),
    _Endpoint(
        "/api/run/{id}/row", _Api.row, "a run as the list has it", (_ID_PARAMETER,), "is_pending"
    ),
    _Endpoint(
        "/api/run/{id}/charts",
        _Api.charts,
        "charts of a run, as Vega-Lite",
        (_ID_PARAMETER, _ONLY),
        "charts",
    ),
    _Endpoint(
        "/api/run/{id}/series",
        _Api.series,
        "readings over time",
        (_ID_PARAMETER, *_SERIES),
        "lines",
    ),
    _Endpoint("/api/run/{id}/events", _Api.run_events, "a run as it goes on", (_ID_PARAMETER,)),
    _Endpoint("/api/events", _Api.events, "runs as they go on", (_ids(MOST_WATCHED),)),
    _Endpoint("/api/compare", _Api.compare, "runs held against the first", _COMPARE, "groups"),
    _Endpoint("/api/benches", _Api.benches, "the benches there are", key="benches"),
    _Endpoint(
        "/api/bench/{id}", _Api.bench, "the configurations of a bench", (_ID_PARAMETER,), "groups"
    ),
    _Endpoint("/api/ledgers", _Api.ledgers, "the energy ledgers there are", key="ledgers"),
    _Endpoint("/api/ledger/{id}", _Api.ledger, "the rows of a ledger", (_ID_PARAMETER,), "rows"),
)


def _event(data: bytes) -> bytes:
    return b"data: %s\n\n" % data


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _words(request: Request, name: str, most: int) -> list[str]:
    text = request.query_params.get(name, "")
    words = [word for word in text.split(",") if word]
    if len(words) > most:
        raise UsageError(f"{name}=: {len(words)} are more than {most}")
    return words


def _number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 1e12:
        raise UsageError(f"{name}={text[:40]!r} is no number")
    return value
