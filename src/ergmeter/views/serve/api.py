"""The API: what the pages show, as JSON, for anybody's programs too. Read only.

Every answer is bounded: a chart has so many points whatever the run's length, a comparison so many
runs. What makes no sense is answered with 400 and a line that says what would.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ergmeter.errors import ErgmeterError, FormatError, UsageError
from ergmeter.views.serve import openapi
from ergmeter.views.serve.tail import TooManyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from starlette.requests import Request

    from ergmeter.views.serve.app_state import Desk
    from ergmeter.views.serve.folder import Kind, ServedItem

DEFAULT_POINTS, MOST_POINTS = 2000, 10_000
MOST_COMPARED = 50
MOST_WATCHED = 200  # by one stream, which all tabs of a browser share (watch.js knows it too)
MOST_COLUMNS = 12
_DEFAULT_COLUMNS = "power_w"
_KEEP_ALIVE_S = 10.0
_ID = re.compile(r"[0-9a-f]{12}")
_YES = {"": False, "0": False, "1": True, "false": False, "true": True}


def routes(desk: Desk) -> list[Route]:
    """Every address under /api."""
    api = _Api(desk)
    table: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/api/openapi.json": api.described,
        "/api/runs": api.runs,
        "/api/run/{id}": api.run,
        "/api/run/{id}/row": api.row,
        "/api/run/{id}/charts": api.charts,
        "/api/run/{id}/series": api.series,
        "/api/run/{id}/events": api.run_events,
        "/api/events": api.events,
        "/api/compare": api.compare,
        "/api/benches": api.benches,
        "/api/bench/{id}": api.bench,
        "/api/ledgers": api.ledgers,
        "/api/ledger/{id}": api.ledger,
    }
    return [Route(path, _careful(answer)) for path, answer in table.items()]


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
        except UsageError as error:
            return JSONResponse({"error": request.app.state.desk.folder.shown(str(error))}, 400)
        except ErgmeterError as error:
            return JSONResponse({"error": request.app.state.desk.folder.shown(str(error))}, 422)

    return careful


class _NotThereError(FormatError):
    """No such id."""


class _Api:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def described(self, _request: Request) -> Response:
        return JSONResponse(openapi.document())

    async def runs(self, request: Request) -> Response:
        whole = json.dumps(await self._desk.listing.rows(), default=str).encode()
        tag = f'"{hash(whole) & (2**64 - 1):x}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        headers = {"etag": tag, "cache-control": "no-cache"}
        return Response(whole, headers=headers, media_type="application/json")

    async def run(self, request: Request) -> Response:
        return _json(await self._desk.read("document", await self._place(request, "run")))

    async def row(self, request: Request) -> Response:
        place = await self._place(request, "run")
        return JSONResponse(await self._desk.listing.row_read(place))

    async def charts(self, request: Request) -> Response:
        place = await self._place(request, "run")
        only = sorted(set(_words(request, "only", MOST_COLUMNS)))
        return _json(await self._desk.charts(place, only))

    async def series(self, request: Request) -> Response:
        place = await self._place(request, "run")
        columns = _words(request, "columns", MOST_COLUMNS) or [_DEFAULT_COLUMNS]
        span = (_number(request, "from", -math.inf), _number(request, "to", math.inf))
        if span[0] >= span[1]:
            raise UsageError(f"from={span[0]:g} is not before to={span[1]:g}")
        most = _number(request, "points", DEFAULT_POINTS)
        if not 10 <= most <= MOST_POINTS:
            raise UsageError(f"points={most:g} is not between 10 and {MOST_POINTS}")
        return _json(await self._desk.read("series", place, columns, span, int(most)))

    async def run_events(self, request: Request) -> Response:
        return await self._stream([await self._place(request, "run")])

    async def events(self, request: Request) -> Response:
        ids = _words(request, "ids", MOST_WATCHED)
        if not ids or not all(_ID.fullmatch(id) for id in ids):
            raise UsageError("ids=: name runs by their ids, joined by commas")
        found = {id: await asyncio.to_thread(self._desk.folder.place, id, "run") for id in ids}
        # One that went must not end the stream of the others.
        gone = [id for id, place in found.items() if place is None]
        return await self._stream([one for one in found.values() if one is not None], gone)

    async def compare(self, request: Request) -> Response:
        places = await self._chosen(request, MOST_COMPARED)
        by = _words(request, "group_by", MOST_COLUMNS)
        anyway = request.query_params.get("anyway", "").lower()
        if anyway not in _YES:
            raise UsageError(f"anyway={anyway[:20]!r} is neither true nor false")
        return _json(await self._desk.compared(places, by, anyway=_YES[anyway]))

    async def benches(self, _request: Request) -> Response:
        return await self._names("bench", "benches")

    async def ledgers(self, _request: Request) -> Response:
        return await self._names("ledger", "ledgers")

    async def bench(self, request: Request) -> Response:
        place = await self._place(request, "bench")
        whole = json.loads(await self._desk.read("bench", place))
        runs = await asyncio.to_thread(self._desk.folder.places, "run")
        # By the cell's directory: the run that a scan has found in it, and no other.
        ids = {one.name.removesuffix("/run"): one.id for one in runs if one.bench == place.id}
        return JSONResponse({**whole, "runs": ids})

    async def ledger(self, request: Request) -> Response:
        return _json(await self._desk.read("ledger", await self._place(request, "ledger")))

    async def _names(self, kind: Kind, word: str) -> Response:
        places = await asyncio.to_thread(self._desk.folder.places, kind)
        return JSONResponse({word: [{"id": one.id, "name": one.name} for one in places]})

    async def _place(self, request: Request, kind: Kind) -> ServedItem:
        return await self._known(request.path_params["id"], kind)

    async def _known(self, id: str, kind: Kind) -> ServedItem:
        found = None
        if _ID.fullmatch(id):
            found = await asyncio.to_thread(self._desk.folder.place, id, kind)
        if found is None:
            raise _NotThereError(f"no {kind} {id[:20]!r} here")
        return found

    async def _chosen(self, request: Request, most: int) -> list[ServedItem]:
        ids = list(dict.fromkeys(_words(request, "ids", most)))
        if not ids:
            raise UsageError("ids=: name runs by their ids, joined by commas")
        return [await self._known(id, "run") for id in ids]

    async def _stream(self, places: list[ServedItem], gone: Sequence[str] = ()) -> Response:
        watching = self._desk.tails.watch(places)
        listener = await watching.__aenter__()

        async def told() -> AsyncIterator[bytes]:
            try:
                yield b"retry: 1000\n\n"
                for id in gone:
                    yield _event(json.dumps({"id": id, "state": "gone"}).encode())
                while True:
                    seen = await listener.next(_KEEP_ALIVE_S)
                    # A line of comment finds out whether anybody is still there.
                    yield b"".join(map(_event, seen)) or b": still here\n\n"
            finally:
                await watching.__aexit__(None, None, None)

        return StreamingResponse(told(), media_type="text/event-stream")


def _event(data: bytes) -> bytes:
    return b"data: %s\n\n" % data


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _words(request: Request, name: str, most: int) -> list[str]:
    said = request.query_params.get(name, "")
    words = [word for word in said.split(",") if word]
    if len(words) > most:
        raise UsageError(f"{name}=: {len(words)} are more than {most}")
    return words


def _number(request: Request, name: str, default: float) -> float:
    said = request.query_params.get(name)
    if said is None:
        return default
    try:
        value = float(said)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 1e12:
        raise UsageError(f"{name}={said[:40]!r} is no number")
    return value
