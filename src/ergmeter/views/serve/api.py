"""The read-only JSON API, and its OpenAPI 3.1 document.

All answers are bounded: points in a chart, runs in a comparison. Invalid requests get status 400
and a message with the valid values.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ergmeter.errors import UsageError
from ergmeter.version import __version__
from ergmeter.views.serve.app_state import AppState
from ergmeter.views.serve.folder import Kind, ServedItem
from ergmeter.views.serve.pool import SERIES

DEFAULT_POINTS, MOST_POINTS = 2000, 10_000
MOST_COMPARED = 50
MOST_WATCHED = 200  # by one stream, which all tabs of a browser share (watch.js knows it too)
MOST_COLUMNS = 12
_DEFAULT_COLUMNS = "power_w"
_KEEP_ALIVE_S = 10.0
_ID = re.compile(r"[0-9a-f]{12}")
_NO_IDS = "ids= must be ids of runs, joined by commas"
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
_ONLY = _query("only", "string", "only these charts, joined by commas: power, steps, loss, ...")
_COLUMN = "|".join(SERIES)
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
        "most points, over all lines",
        minimum=10,
        maximum=MOST_POINTS,
        default=DEFAULT_POINTS,
    ),
)
_IDS = _ids(MOST_COMPARED)
_ERRORS = {
    400: "the request is invalid; `error` names the valid values",
    401: "a token is needed",
    403: "requested by a page of another site",
    404: "there is nothing with this id",
    405: "read only",
    413: "a request must have no body",
    414: "the address is too long",
    421: "the Host header is not a name of this server",
    422: "the files can't be read; `error` says why",
    503: "too many viewers; `error` has the limit",
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
        "paths": _PATHS,
        "components": {"schemas": {"Error": _object("error")}},
    }


def _object(key: str) -> dict[str, Any]:
    return {"type": "object", "required": [key]}


_Answer: TypeAlias = "Callable[[AppState, Request], Awaitable[Response]]"
_ROUTES: list[Route] = []
_PATHS: dict[str, Any] = {}  # their descriptions


def _endpoint(
    path: str, summary: str, *parameters: dict[str, Any], key: str = ""
) -> Callable[[_Answer], _Answer]:
    """Add the decorated function to the API and to its description.

    `key`: a field of every answer; without it, answers are streams of events.
    """
    content: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
    if key:
        content = {"application/json": {"schema": _object(key)}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses = {"200": {"description": summary, "content": content}}
    for code, words in _ERRORS.items():
        responses[str(code)] = {"description": words, "content": error}
    _PATHS[path] = {
        "get": {"summary": summary, "parameters": list(parameters), "responses": responses}
    }

    def added(answer: _Answer) -> _Answer:
        async def endpoint(request: Request) -> Response:
            return await answer(request.app.state.shared, request)

        _ROUTES.append(Route(path, endpoint))
        return answer

    return added


def routes() -> list[Route]:
    """Return all routes under /api. The application answers their errors."""
    return [Route("/api/openapi.json", _description), *_ROUTES]


async def _description(_request: Request) -> Response:
    return JSONResponse(openapi_document())


@_endpoint("/api/runs", "all runs, with the metrics read so far", key="runs")
async def _runs(shared: AppState, request: Request) -> Response:
    body = json.dumps(await shared.listing.rows(), default=str).encode()
    tag = f'"{hash(body) & (2**64 - 1):x}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    headers = {"etag": tag, "cache-control": "no-cache"}
    return Response(body, headers=headers, media_type="application/json")


@_endpoint("/api/run/{id}", "summary and check of a run", _ID_PARAMETER, key="readings")
async def _run(shared: AppState, request: Request) -> Response:
    return _json(await shared.read("document", await _item_of(shared, request, "run")))


@_endpoint("/api/run/{id}/row", "a run's row in the list of runs", _ID_PARAMETER, key="is_pending")
async def _row(shared: AppState, request: Request) -> Response:
    return JSONResponse(await shared.listing.row_read(await _item_of(shared, request, "run")))


@_endpoint(
    "/api/run/{id}/charts", "charts of a run, as Vega-Lite", _ID_PARAMETER, _ONLY, key="charts"
)
async def _charts(shared: AppState, request: Request) -> Response:
    item = await _item_of(shared, request, "run")
    only = sorted(set(_words(request, "only", MOST_COLUMNS)))
    return _json(await shared.charts(item, only))


@_endpoint("/api/run/{id}/series", "readings over time", _ID_PARAMETER, *_SERIES, key="lines")
async def _series(shared: AppState, request: Request) -> Response:
    item = await _item_of(shared, request, "run")
    columns = _words(request, "columns", MOST_COLUMNS) or [_DEFAULT_COLUMNS]
    span = (_number(request, "from", -math.inf), _number(request, "to", math.inf))
    if span[0] >= span[1]:
        raise UsageError(f"from={span[0]:g} is not before to={span[1]:g}")
    most = _number(request, "points", DEFAULT_POINTS)
    if not 10 <= most <= MOST_POINTS:
        raise UsageError(f"points={most:g} is not between 10 and {MOST_POINTS}")
    return _json(await shared.read("series", item, columns, span, int(most)))


@_endpoint("/api/run/{id}/events", "live updates of a run", _ID_PARAMETER)
async def _run_events(shared: AppState, request: Request) -> Response:
    return await _stream(shared, [await _item_of(shared, request, "run")])


@_endpoint("/api/events", "live updates of several runs", _ids(MOST_WATCHED))
async def _events(shared: AppState, request: Request) -> Response:
    ids = _run_ids(request, MOST_WATCHED)
    if not all(_ID.fullmatch(id) for id in ids):
        raise UsageError(_NO_IDS)
    items = {id: await asyncio.to_thread(shared.folder.item, id, "run") for id in ids}
    # A vanished run must not end the stream of the others.
    gone = [id for id, item in items.items() if item is None]
    return await _stream(shared, [item for item in items.values() if item is not None], gone)


@_endpoint(
    "/api/compare",
    "runs compared with the first",
    _IDS,
    _query("group_by", "string"),
    _query("anyway", "boolean", default=False),
    key="groups",
)
async def _compare(shared: AppState, request: Request) -> Response:
    ids = dict.fromkeys(_run_ids(request, MOST_COMPARED))
    items = [await shared.item(id, "run") for id in ids]
    by = _words(request, "group_by", MOST_COLUMNS)
    anyway = request.query_params.get("anyway", "").lower()
    if anyway not in _YES:
        raise UsageError(f"anyway={anyway[:20]!r} is neither true nor false")
    return _json(await shared.read("compared", items, by, _YES[anyway]))


@_endpoint("/api/benches", "all benches in the directory", key="benches")
async def _benches(shared: AppState, _request: Request) -> Response:
    return await _names(shared, "bench", "benches")


@_endpoint("/api/bench/{id}", "the configurations of a bench", _ID_PARAMETER, key="groups")
async def _bench(shared: AppState, request: Request) -> Response:
    item = await _item_of(shared, request, "bench")
    body = json.loads(await shared.read("bench", item))
    runs = await asyncio.to_thread(shared.folder.items, "run")
    # By cell directory, only runs that a scan found.
    ids = {run.name.removesuffix("/run"): run.id for run in runs if run.bench == item.id}
    return JSONResponse({**body, "runs": ids})


@_endpoint("/api/ledgers", "all energy ledgers in the directory", key="ledgers")
async def _ledgers(shared: AppState, _request: Request) -> Response:
    return await _names(shared, "ledger", "ledgers")


@_endpoint("/api/ledger/{id}", "the rows of a ledger", _ID_PARAMETER, key="rows")
async def _ledger(shared: AppState, request: Request) -> Response:
    return _json(await shared.read("ledger", await _item_of(shared, request, "ledger")))


async def _names(shared: AppState, kind: Kind, word: str) -> Response:
    items = await asyncio.to_thread(shared.folder.items, kind)
    return JSONResponse({word: [{"id": item.id, "name": item.name} for item in items]})


async def _item_of(shared: AppState, request: Request, kind: Kind) -> ServedItem:
    return await shared.item(request.path_params["id"], kind)


async def _stream(shared: AppState, items: list[ServedItem], gone: Sequence[str] = ()) -> Response:
    watching = shared.tails.watch(items)
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


def _event(data: bytes) -> bytes:
    return b"data: %s\n\n" % data


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _words(request: Request, name: str, most: int) -> list[str]:
    words = [word for word in request.query_params.get(name, "").split(",") if word]
    if len(words) > most:
        raise UsageError(f"{name}= has {len(words)} values; at most {most}")
    return words


def _run_ids(request: Request, most: int) -> list[str]:
    ids = _words(request, "ids", most)
    if not ids:
        raise UsageError(_NO_IDS)
    return ids


def _number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 1e12:
        raise UsageError(f"{name}={text[:40]!r} is not a number")
    return value
