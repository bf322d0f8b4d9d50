"""Run summaries, labels and tables for programs: JSON, lines of metrics, CSV, Parquet."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ergmeter.errors import FormatError, UsageError
from ergmeter.metrics.catalog import Alias, Metric, every_metric, find
from ergmeter.metrics.definitions.energy_breakdown import export_tables
from ergmeter.metrics.evidence.gpu_use import gpu_use
from ergmeter.metrics.summarize import evidence_of, settings_of
from ergmeter.records import Missing, Reading, Result, Summary
from ergmeter.runlog.format import training_of
from ergmeter.runlog.manage.labels import labels_of
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.units import NO_UNIT, significant
from ergmeter.views.document import Document, Paragraph


def label_document(run: Run) -> dict[str, Any]:
    """Return labels as JSON, or the reason why they cannot be read."""
    try:
        return labels_of(run.path).as_json()
    except FormatError as error:
        return {"missing": str(error)}


def result(result: Result) -> dict[str, Any]:
    """Return a reading as JSON, or the reason for its absence."""
    if isinstance(result, Missing):
        return {"missing": result.reason}
    if not math.isfinite(result.value):
        return {"missing": f"the value is not finite ({result.value})"}
    return {
        "value": result.value,
        "unit": result.unit,
        "basis": result.basis,
        "low": finite(result.low),
        "high": finite(result.high),
        "note": result.note,
        "impossible": result.impossible or None,
    }


def finite(value: Any) -> Any:  # noqa: ANN401  whatever JSON can hold
    """Return the value with null for each NaN and infinity, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def metrics_document(summary: Summary, names: Sequence[str]) -> Document:
    """Return metrics, by key or alias: a line each as text; JSON in the catalogue's units."""
    lines = Paragraph("\n".join(metric_lines(summary, names)), is_to_copy=True)
    keys = [_metric(summary, name)[0].key for name in names]
    data = {"readings": {key: result(summary.readings[key]) for key in keys}}
    return Document(f"{summary.run}: {', '.join(names)}", (lines,), data)


def _training(run: Run, number: int) -> dict[str, Any]:
    """Return one of several trainings in a run, by the number for `erg report --training`."""
    writers = [w for w in run.writers if training_of(w) == run.trainings[number - 1]]
    facts = writers[0].header["training"]
    return {"number": number, "ranks": len(writers), "model": facts.get("model")}


def report(run: Run, summary: Summary, overrides: Settings | None = None) -> dict[str, Any]:
    """Return a summary as JSON, with the settings it was made under.

    The keys of `readings` are those of the catalogue.
    """
    settings = settings_of(run, overrides)
    use = gpu_use(run, settings.devices)
    return {
        "run": run.name,
        "path": str(run.path),
        "status": summary.status,
        "created": run.header.get("created"),
        "command": run.header.get("command"),
        "labels": label_document(run),
        "settings": settings.as_json(),
        "trainings": [_training(run, number + 1) for number in range(len(run.trainings))],
        "window": finite(summary.window),
        "readings": {key: result(reading) for key, reading in summary.readings.items()},
        "devices": {
            device.id: {
                "kind": device.kind,
                "name": device.name,
                "probe": device.probe,
                **({"use": use[device.id].state or None} if device.id in use else {}),
                "facts": finite(device.facts),
                "readings": {k: result(f) for k, f in summary.devices.get(device.id, {}).items()},
            }
            for device in run.devices.values()
        },
        "unavailable": run.unavailable,
        "notes": list(summary.notes),
        "torn_files": run.torn,
        "damaged_files": run.damage,
    }


def metric_lines(summary: Summary, names: Iterable[str]) -> Iterator[str]:
    """Yield a line for each metric, by key or alias, in its unit; shared reasons once.

    `AEC 341.2 W (measured; ...)`.
    """
    named_reasons: dict[str, str] = {}
    for name in names:
        metric, alias = _metric(summary, name)
        label = alias.name if alias else metric.key
        reading = summary.readings[metric.key]
        if isinstance(reading, Missing):
            first = named_reasons.get(reading.reason)
            yield f"{label} - ({f'as {first}' if first else reading.reason})"
            named_reasons.setdefault(reading.reason, label)
        else:
            scale, unit = (alias.scale, alias.unit) if alias else (1.0, reading.unit)
            yield f"{label} {_reading_line(reading, scale, unit)}"


def _metric(summary: Summary, name: str) -> tuple[Metric, Alias | None]:
    """Return a metric that the summary has, by key or alias."""
    return find(name, {key: every_metric()[key] for key in summary.readings})


def _reading_line(reading: Reading, scale: float, unit: str) -> str:
    interval = ""
    if reading.low is not None and reading.high is not None:
        interval = f" [{significant(reading.low * scale)}, {significant(reading.high * scale)}]"
    number = significant(reading.value * scale, 6)
    named = "" if unit == NO_UNIT else f" {unit}"
    why = f"{reading.impossible}; " if reading.impossible else ""
    return f"{number}{named}{interval}{reading.mark} ({reading.basis}; {why}{reading.note})"


# Export of tables.


def export(
    run: Run, summary: Summary, target: Path, *, form: str, force: bool = False
) -> Iterator[Path]:
    """Write a run's tables to files and yield their paths. Overwrites only if forced."""
    target.mkdir(parents=True, exist_ok=True)
    tables = export_tables(evidence_of(run))
    if form == "json":
        path = _free(target / "export.json", force=force)
        body: dict[str, Any] = {"summary": report(run, summary)}
        body |= {name: finite(_rows(table)) for name, table in tables.items()}
        path.write_text(json.dumps(body, allow_nan=False))
        yield path
        return
    for name, table in tables.items():
        path = _free(target / f"{name}.{form}", force=force)
        _write(table, path, form)
        yield path
    path = target / "summary.json"  # the same in every format
    path.write_text(json.dumps(report(run, summary), indent=1, allow_nan=False))
    yield path


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows as plain values; nanosecond times as text, which Python's datetime lacks."""
    for number, column in enumerate(table.schema):
        if pa.types.is_timestamp(column.type):
            table = table.set_column(number, column.name, table[number].cast(pa.string()))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _free(path: Path, *, force: bool) -> Path:
    if path.exists() and not force:
        raise UsageError(f"{path} exists; --force overwrites it, --out chooses another directory")
    return path


def _write(table: pa.Table, path: Path, form: str) -> None:
    if form == "csv":
        import pyarrow.csv  # noqa: PLC0415  each format loads its own code

        pyarrow.csv.write_csv(table, path)
    else:
        import pyarrow.parquet  # noqa: PLC0415

        pyarrow.parquet.write_table(table, path, compression="zstd")
