"""What a sink wrote, read back with the library's own reader.

Each function writes the updates through the sink of its name, and returns the points found: by
scope ("window" or "run") and step, the wall time and the values by key and device.
"""

from __future__ import annotations

import csv
import json
import struct
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ergmeter import registry
from ergmeter.ports import Update
from tests.unit.sinks.updates import GPU, RUN, request, written

Place = tuple[str, str | None]  # a key, and the device if it is of one


class Point(NamedTuple):
    wall_s: float
    values: dict[Place, float]


Points = dict[tuple[str, int], Point]


def sink_of(name: str, run: Path, **options: Any) -> Any:
    return registry.load("sinks", name)(request(run, **options))


def place_of(tag: str) -> tuple[str, Place]:
    """A tracker's tag taken apart: the scope, the key, the device as a tag can say it."""
    folder, key, *device = tag.split("/")
    scope = {"ergmeter": "window", "ergmeter-run": "run"}[folder]
    names = {"GPU-5b1c-0-a": GPU, "cpu-0": "cpu-0"}
    return scope, (key, names[device[0]] if device else None)


def csv_points(run: Path, updates: Sequence[Update]) -> Points:
    written(sink_of("csv", run), *updates)
    with (run / "figures.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row.pop("run") for row in rows} == {RUN}
    points = {}
    for row in rows:
        at = (row.pop("scope"), int(row.pop("step")))
        wall_s = float(row.pop("wall_s"))
        assert row.pop("window") == "training"
        points[at] = Point(wall_s, {(k, None): float(v) for k, v in row.items() if v != ""})
    return points


def jsonl_points(run: Path, updates: Sequence[Update]) -> Points:
    written(sink_of("jsonl", run), *updates)
    points = {}
    for line in (run / "figures.jsonl").read_text().splitlines():
        said = json.loads(line)
        values: dict[Place, float] = {
            (key, None): one["value"] for key, one in said["figures"].items()
        }
        for device, figures in said["devices"].items():
            values |= {(key, device): one["value"] for key, one in figures.items()}
        points[said["scope"], said["step"]] = Point(said["wall_s"], values)
    return points


def tensorboard_points(run: Path, updates: Sequence[Update]) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written(sink_of("tensorboard", run), *updates)
    accumulator = EventAccumulator(str(run / "tensorboard"))
    accumulator.Reload()
    if updates[-1].is_final:
        (text,) = accumulator.Tensors("ergmeter-run/window")
        assert list(text.tensor_proto.string_val) == [b"training"]
    points: Points = {}
    for tag in accumulator.Tags()["scalars"]:
        scope, place = place_of(tag)
        for event in accumulator.Scalars(tag):
            point = points.setdefault((scope, event.step), Point(event.wall_time, {}))
            assert point.wall_s == event.wall_time
            point.values[place] = event.value
    return points


def wandb_points(run: Path, updates: Sequence[Update]) -> Points:
    written(sink_of("wandb", run), *updates)
    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    rows, summary = wandb_file(path)
    final = updates[-1]
    points = {("run", final.step): Point(final.wall_s, {})}  # a summary has no time
    for row in rows:
        at = ("window", int(row.pop("ergmeter/step")))
        wall_s = row.pop("_timestamp")
        assert row.pop("ergmeter/wall_s") == wall_s
        tags = {tag: value for tag, value in row.items() if not tag.startswith("_")}
        points[at] = Point(wall_s, {place_of(tag)[1]: value for tag, value in tags.items()})
    assert summary.pop("ergmeter-run/window") == "training"
    for tag, value in summary.items():
        if tag.startswith("ergmeter-run/"):
            points["run", final.step].values[place_of(tag)[1]] = value
    return points


def wandb_file(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows and the summary of an offline run, parsed by W&B's own messages.

    The file around them is LevelDB's log: a head of 7 bytes, then blocks of 32 KiB of pieces, each
    with a checksum, its length, and whether it is the whole, the first, a middle or the last of a
    record.
    """
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # as at the end of a program; before, the file may not be there in full

    messages: Any = wandb_internal_pb2

    def records() -> Iterator[Any]:
        data, at, pieces = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            pieces += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                yield messages.Record.FromString(pieces)
                pieces = b""

    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for record in records():
        kind = record.WhichOneof("record_type")
        items = getattr(record, kind)
        if kind == "history":
            rows.append({one.key or one.nested_key[0]: _json(one) for one in items.item})
        elif kind == "summary":
            summary |= {"/".join(one.nested_key) or one.key: _json(one) for one in items.update}
    return rows, summary


def _json(item: Any) -> Any:
    return json.loads(item.value_json)


def mlflow_points(run: Path, updates: Sequence[Update]) -> Points:
    import mlflow

    written(sink_of("mlflow", run, experiment=str(run)), *updates)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(str(run))
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == RUN
    assert found.info.status == "FINISHED"
    assert found.data.tags["ergmeter-run/window"] == "training"
    return mlflow_run_points(found.info.run_id)


def mlflow_run_points(run_id: str) -> Points:
    import mlflow

    client = mlflow.MlflowClient()
    points: Points = {}
    for tag in client.get_run(run_id).data.metrics:
        if tag.startswith("ergmeter"):
            scope, place = place_of(tag)
            for one in client.get_metric_history(run_id, tag):
                point = points.setdefault((scope, one.step), Point(one.timestamp / 1000, {}))
                assert point.wall_s == one.timestamp / 1000
                assert place not in point.values
                point.values[place] = one.value
    return points


def trackio_points(run: Path, updates: Sequence[Update]) -> Points:
    from trackio import sqlite_storage, utils

    with pytest.MonkeyPatch.context() as patch:  # read from the environment once, at import
        patch.setattr(sqlite_storage, "TRACKIO_DIR", run)
        patch.setattr(utils, "TRACKIO_DIR", run)
        written(sink_of("trackio", run), *updates)
        rows = sqlite_storage.SQLiteStorage.get_logs("ergmeter", RUN)
    points: Points = {}
    for row in rows:
        wall_s = datetime.fromisoformat(row.pop("timestamp")).timestamp()
        step = row.pop("step")
        assert row.pop("ergmeter-run/window", "training") == "training"
        ((scope, values),) = _by_scope(row).items()
        assert (scope, step) not in points
        points[scope, step] = Point(wall_s, values)
    return points


def _by_scope(row: dict[str, float]) -> dict[str, dict[Place, float]]:
    found: dict[str, dict[Place, float]] = {}
    for tag, value in row.items():
        scope, place = place_of(tag)
        found.setdefault(scope, {})[place] = value
    return found


def prometheus_points(run: Path, updates: Sequence[Update]) -> Points:
    sink = sink_of("prometheus", run, port=0)
    points: Points = {}
    for update in updates:
        sink.write(update)
        with urllib.request.urlopen(sink.url, timeout=10) as answer:
            points |= prometheus_text_points(answer.read().decode())
    sink.close()
    return points


def prometheus_text_points(text: str) -> Points:
    from prometheus_client.parser import text_string_to_metric_families

    from ergmeter.metrics.catalog import catalogue

    series = {f"ergmeter_{key.replace('.', '_')}": ("window", key) for key in catalogue()}
    series |= {f"ergmeter_run_{key.replace('.', '_')}": ("run", key) for key in catalogue()}
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    step, wall_s = 0, 0.0
    found: dict[str, dict[Place, float]] = {}
    for sample in samples:
        assert sample.labels["run"] == RUN
        if sample.name == "ergmeter_step":
            step = int(sample.value)
        elif sample.name == "ergmeter_updated_seconds":
            wall_s = sample.value
        else:
            scope, key = series[sample.name]
            assert sample.labels["basis"] in ("measured", "derived", "assumed")
            assert sample.labels.get("window") == ("training" if scope == "run" else None)
            found.setdefault(scope, {})[key, sample.labels.get("device")] = sample.value
    return {(scope, step): Point(wall_s, values) for scope, values in found.items()}


def otel_points(run: Path, updates: Sequence[Update]) -> Points:
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    sink = sink_of("otel", run, reader=reader)
    points: Points = {}
    for update in updates:
        sink.write(update)
        data = reader.get_metrics_data()
        assert data is not None
        (resource,) = data.resource_metrics
        assert resource.resource.attributes["ergmeter.run"] == RUN
        metrics = {
            metric.name: [(dict(p.attributes or {}), p.value) for p in metric.data.data_points]  # type: ignore[union-attr]
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }
        points |= otel_metric_points(metrics)
    sink.close()
    return points


def otel_metric_points(metrics: dict[str, list[tuple[dict[str, Any], Any]]]) -> Points:
    """Points of metrics by name: pairs of attributes and value."""
    ((_, step),) = metrics.pop("ergmeter.step")
    ((_, wall_s),) = metrics.pop("ergmeter.updated")
    found: dict[str, dict[Place, float]] = {}
    for name, pairs in metrics.items():
        if name.startswith("hw."):
            continue
        key = name.removeprefix("ergmeter.run.").removeprefix("ergmeter.")
        scope = "run" if name.startswith("ergmeter.run.") else "window"
        for attributes, value in pairs:
            assert attributes.get("window") == ("training" if scope == "run" else None)
            found.setdefault(scope, {})[key, attributes.get("device")] = value
    return {(scope, int(step)): Point(wall_s, values) for scope, values in found.items()}


READ_BACK = {
    "csv": csv_points,
    "jsonl": jsonl_points,
    "tensorboard": tensorboard_points,
    "wandb": wandb_points,
    "mlflow": mlflow_points,
    "trackio": trackio_points,
    "prometheus": prometheus_points,
    "otel": otel_points,
}
