"""The Grafana dashboard: against Grafana's schema, and against what the sink really exports.

Grafana publishes the classic dashboard model as a CUE kind (grafana/grafana, kinds/dashboard) and
as JSON schema in its foundation SDK. `SCHEMA` is written from them by hand, for the parts that our
file uses, and is closed: a property that Grafana does not know is an error.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ergmeter.metrics.catalog import catalogue
from ergmeter.ports import Update
from ergmeter.records import Reading, Result, Summary, Window
from ergmeter.sinks.prometheus import PrometheusSink
from tests.unit.sinks.updates import request

DASHBOARD: dict[str, Any] = json.loads((files("ergmeter.sinks") / "grafana.json").read_text())


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": properties,
    }


TEXT, WHOLE, TRUTH = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
SOURCE = closed([], type=TEXT, uid=TEXT)
GRID = closed(
    ["h", "w", "x", "y"],
    h={"type": "integer", "exclusiveMinimum": 0},
    w={"type": "integer", "exclusiveMinimum": 0, "maximum": 24},
    x={"type": "integer", "minimum": 0, "exclusiveMaximum": 24},
    y=WHOLE,
)
TARGET = closed(  # Prometheus's own query model
    ["refId", "expr"],
    refId=TEXT,
    expr={"type": "string", "minLength": 1},
    datasource=SOURCE,
    legendFormat=TEXT,
    editorMode={"enum": ["code", "builder"]},
    range=TRUTH,
    instant=TRUTH,
)
CUSTOM = closed(
    [],
    drawStyle={"enum": ["line", "bars", "points"]},
    lineWidth={"type": "number"},
    spanNulls={"type": ["boolean", "number"]},
)
FIELD_CONFIG = closed(
    ["defaults", "overrides"],
    defaults=closed([], unit=TEXT, decimals={"type": "number"}, custom=CUSTOM),
    overrides={"type": "array"},
)
PANEL = closed(
    ["type", "id", "title", "gridPos", "targets", "fieldConfig", "options"],
    type={"enum": ["timeseries", "stat"]},
    id=WHOLE,
    title=TEXT,
    description=TEXT,
    datasource=SOURCE,
    gridPos=GRID,
    fieldConfig=FIELD_CONFIG,
    options={"type": "object"},
    targets={"type": "array", "minItems": 1, "items": TARGET},
)
ROW = closed(
    ["type", "id", "collapsed", "panels"],
    type={"const": "row"},
    id=WHOLE,
    title=TEXT,
    collapsed=TRUTH,
    gridPos=GRID,
    panels={"type": "array"},
)
VARIABLE = closed(
    ["type", "name"],
    type={"enum": ["query", "adhoc", "constant", "datasource", "interval", "textbox", "custom"]},
    name=TEXT,
    label=TEXT,
    hide={"enum": [0, 1, 2]},
    query={"type": ["string", "object"]},
    datasource=SOURCE,
    refresh={"enum": [0, 1, 2]},
    sort={"type": "integer", "minimum": 0, "maximum": 8},
    regex=TEXT,
    multi=TRUTH,
    includeAll=TRUTH,
)
SCHEMA = closed(
    ["schemaVersion", "title", "panels", "templating", "annotations"],
    uid={"type": "string", "minLength": 8, "maxLength": 40},
    title=TEXT,
    description=TEXT,
    tags={"type": "array", "items": TEXT},
    timezone=TEXT,
    editable=TRUTH,
    graphTooltip={"enum": [0, 1, 2]},
    time=closed(["from", "to"], **{"from": TEXT, "to": TEXT}),
    refresh=TEXT,
    schemaVersion={"type": "integer", "minimum": 36},
    version=WHOLE,
    links={"type": "array"},
    annotations=closed([], list={"type": "array"}),
    templating=closed([], list={"type": "array", "items": VARIABLE}),
    panels={
        "type": "array",
        "items": {
            "if": {"properties": {"type": {"const": "row"}}},
            "then": ROW,
            "else": PANEL,
        },
    },
)

# Grafana's ids of units (grafana-data's value formats) for the catalogue's.
UNITS = {
    "percentunit": "frac",
    "s": "s",
    "joule": "J",
    "watt": "W",
    "decbytes": "B",
    "Bps": "B/s",
    "celsius": "C",
    "massg": "g",
    "short": "",
}


def drawn() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    queries = [one["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    return queries + [target["expr"] for panel in drawn() for target in panel["targets"]]


@pytest.fixture
def exported(tmp_path: Path) -> dict[str, set[str]]:
    """Every name that the sink exports of a run that has all figures, with its labels."""
    results: dict[str, Result] = {
        key: Reading(1.5, metric.unit, "measured") for key, metric in catalogue().items()
    }
    summary = Summary("r", "running", results, {"GPU-0": dict(results)})
    sink = PrometheusSink(request(tmp_path, port=0))
    found: dict[str, set[str]] = {}
    for is_final in (False, True):
        sink.write(Update(1, 1.8e9, Window(0, 1), summary, is_final))
        text = generate_latest(sink.registry).decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    sink.close()
    return found


def test_the_dashboard_is_one_by_grafanas_schema() -> None:
    problems = [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message}"
        for error in Draft202012Validator(SCHEMA).iter_errors(DASHBOARD)
    ]
    assert problems == []


def test_every_name_and_label_in_a_query_is_one_that_the_sink_exports(
    exported: dict[str, set[str]],
) -> None:
    for expression in expressions():
        names = re.findall(r"\bergmeter\w*", expression)
        assert names, expression
        for name in names:
            assert name in exported, expression
            for label in re.findall(r'(\w+)(?:=~|!=|=)"', expression):
                assert label in exported[name], expression
    for panel in drawn():
        for target in panel["targets"]:
            used = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            (name,) = re.findall(r"\bergmeter\w*", target["expr"])
            assert used <= exported[name]


def test_a_panels_unit_is_that_of_its_metrics() -> None:
    keys = {key.replace(".", "_"): key for key in catalogue()}
    for panel in drawn():
        unit = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
        for target in panel["targets"]:
            found = re.search(r"ergmeter_(?:run_)?(\w+)", target["expr"])
            assert found
            if found[1] in keys:
                said = catalogue()[keys[found[1]]].unit
                assert unit in ("", said.partition("/token")[0]), panel["title"]


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


def test_the_data_source_is_chosen_on_the_page_and_not_in_the_file() -> None:
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for panel in drawn():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
