"""The API in the words of OpenAPI 3.1, so that programs can be written, and tried, against it."""

from __future__ import annotations

from typing import Any

from ergmeter.records import COLUMN_KINDS
from ergmeter.version import __version__

_ID = {
    "name": "id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[0-9a-f]{12}$"},
}


def _ids(most: int) -> dict[str, Any]:
    pattern = f"^[0-9a-f]{{12}}(,[0-9a-f]{{12}}){{0,{most - 1}}}$"
    return {
        "name": "ids",
        "in": "query",
        "required": True,
        "description": f"ids of runs, {most} at the most, joined by commas",
        "schema": {"type": "string", "pattern": pattern},
    }


_IDS, _WATCHED = _ids(50), _ids(200)
_ONLY = {
    "name": "only",
    "in": "query",
    "description": "just these charts, joined by commas: power, steps, loss, ...",
    "schema": {"type": "string"},
}
_COLUMN = "|".join(
    [
        *(n for n, kind in COLUMN_KINDS["samples"].items() if kind in ("float", "count")),
        *("step_s", "loss"),
    ]
)
_SERIES = (
    {
        "name": "columns",
        "in": "query",
        "description": "columns of the samples, step_s or loss, joined by commas; default power_w",
        "schema": {"type": "string", "pattern": f"^({_COLUMN})(,({_COLUMN})){{0,11}}$"},
    },
    {
        "name": "from",
        "in": "query",
        "description": "seconds since the run began",
        "schema": {"type": "number"},
    },
    {"name": "to", "in": "query", "schema": {"type": "number"}},
    {
        "name": "points",
        "in": "query",
        "description": "no more than so many points, all lines together",
        "schema": {"type": "integer", "minimum": 10, "maximum": 10_000, "default": 2000},
    },
)
_COMPARE = (
    {"name": "group_by", "in": "query", "schema": {"type": "string"}},
    {"name": "anyway", "in": "query", "schema": {"type": "boolean", "default": False}},
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


def document() -> dict[str, Any]:
    """The whole description."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "erg serve",
            "version": __version__,
            "description": "Runs of ergmeter, read only. A figure has value, unit, basis, low,"
            " high, note and `impossible` (null, or why the value cannot be right), or"
            " `missing` with the reason.",
        },
        "paths": {
            "/api/runs": _get("every run, with what has been read of it", key="runs"),
            "/api/run/{id}": _get("what a run came to", _ID, key="readings"),
            "/api/run/{id}/row": _get("a run as the list has it", _ID, key="is_pending"),
            "/api/run/{id}/charts": _get("charts of a run, as Vega-Lite", _ID, _ONLY, key="charts"),
            "/api/run/{id}/series": _get("readings over time", _ID, *_SERIES, key="lines"),
            "/api/run/{id}/events": _get("a run as it goes on", _ID, is_stream=True),
            "/api/events": _get("runs as they go on", _WATCHED, is_stream=True),
            "/api/compare": _get("runs held against the first", _IDS, *_COMPARE, key="groups"),
            "/api/benches": _get("the benches there are", key="benches"),
            "/api/bench/{id}": _get("the configurations of a bench", _ID, key="groups"),
            "/api/ledgers": _get("the energy ledgers there are", key="ledgers"),
            "/api/ledger/{id}": _get("the rows of a ledger", _ID, key="rows"),
        },
        "components": {"schemas": {"Error": _object("error")}},
    }


def _object(key: str) -> dict[str, Any]:
    return {"type": "object", "required": [key]}


def _get(
    summary: str, *parameters: dict[str, Any], key: str = "", is_stream: bool = False
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _object(key)}}
    if is_stream:
        content = {"text/event-stream": {"schema": {"type": "string"}}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    failures = {
        str(code): {"description": words, "content": error} for code, words in _ERRORS.items()
    }
    said = {"200": {"description": summary, "content": content}, **failures}
    return {"get": {"summary": summary, "parameters": list(parameters), "responses": said}}
