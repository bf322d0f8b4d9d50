"""A summary as JSON and as plain lines, for programs and for pipes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ergmeter.metrics.catalog import find
from ergmeter.metrics.evidence.gpu_use import gpu_use
from ergmeter.metrics.summarize import settings_of
from ergmeter.records import Missing
from ergmeter.runlog.format import training_of
from ergmeter.units import NO_UNIT, significant
from ergmeter.views.labels import label_document

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.records import Result, Summary
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings


def result(found: Result) -> dict[str, Any]:
    """A reading, or the reason why there is none."""
    if isinstance(found, Missing):
        return {"missing": found.reason}
    if not math.isfinite(found.value):
        return {"missing": f"the value is not finite ({found.value})"}
    return {
        "value": found.value,
        "unit": found.unit,
        "basis": found.basis,
        "low": finite(found.low),
        "high": finite(found.high),
        "note": found.note,
        "impossible": found.impossible or None,
    }


def finite(value: Any) -> Any:  # noqa: ANN401  whatever JSON can hold
    """The same with null for every NaN and infinity in it: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def metrics(summary: Summary, names: Iterable[str]) -> dict[str, Any]:
    """Just these metrics, by key or alias, each under its key and in the catalogue's unit."""
    keys = [find(name)[0].key for name in names]
    return {"readings": {key: result(summary.readings[key]) for key in keys}}


def _training(run: Run, number: int) -> dict[str, Any]:
    """One of several trainings in a run, by the number that `erg report --training` takes."""
    writers = [w for w in run.writers if training_of(w) == run.trainings[number - 1]]
    facts = writers[0].header["training"]
    return {"number": number, "ranks": len(writers), "model": facts.get("model")}


def report(run: Run, summary: Summary, overrides: Settings | None = None) -> dict[str, Any]:
    """Everything a summary holds, and the settings it was made under.

    `readings` is keyed by the catalogue.
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
        "readings": {key: result(found) for key, found in summary.readings.items()},
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


def metric_lines(summary: Summary, names: Iterable[str]) -> list[str]:
    """A line for each metric, by key or alias; a reason that several share is given once."""
    told: dict[str, str] = {}
    lines = []
    for name in names:
        found = summary.readings[find(name)[0].key]
        if isinstance(found, Missing) and found.reason in told:
            lines.append(f"{_label(name)} - (as {told[found.reason]})")
            continue
        if isinstance(found, Missing):
            told[found.reason] = _label(name)
        lines.append(_metric_line(summary, name))
    return lines


def _label(name: str) -> str:
    metric, alias = find(name)
    return alias.name if alias else metric.key


def _metric_line(summary: Summary, name: str) -> str:
    """In the unit that name says: `AEC 341.2 W (measured; ...)`."""
    metric, alias = find(name)
    found = summary.readings[metric.key]
    label = _label(name)
    if isinstance(found, Missing):
        return f"{label} - ({found.reason})"
    scale, unit = (alias.scale, alias.unit) if alias else (1.0, found.unit)
    interval = ""
    if found.low is not None and found.high is not None:
        interval = f" [{significant(found.low * scale)}, {significant(found.high * scale)}]"
    number = significant(found.value * scale, 6)
    named = "" if unit == NO_UNIT else f" {unit}"
    why = f"{found.impossible}; " if found.impossible else ""
    return f"{label} {number}{named}{interval}{found.mark} ({found.basis}; {why}{found.note})"
