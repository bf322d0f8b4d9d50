"""A summary as JSON and as plain lines, for programs and for pipes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ergmeter.metrics.catalog import find
from ergmeter.records import Missing
from ergmeter.units import significant

if TYPE_CHECKING:
    from ergmeter.records import Result, Summary
    from ergmeter.runlog.reader import Run


def result(found: Result) -> dict[str, Any]:
    """A reading, or the reason why there is none."""
    if isinstance(found, Missing):
        return {"missing": found.reason}
    return {
        "value": _finite(found.value),
        "unit": found.unit,
        "basis": found.basis,
        "low": _finite(found.low),
        "high": _finite(found.high),
        "note": found.note,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def report(run: Run, summary: Summary) -> dict[str, Any]:
    """Everything a summary holds. `readings` is keyed by the catalogue."""
    return {
        "run": run.name,
        "path": str(run.path),
        "status": summary.status,
        "created": run.header.get("created"),
        "command": run.header.get("command"),
        "settings": run.settings,
        "readings": {key: result(found) for key, found in summary.readings.items()},
        "devices": {
            device.id: {
                "kind": device.kind,
                "name": device.name,
                "probe": device.probe,
                "facts": device.facts,
                "readings": {k: result(f) for k, f in summary.devices.get(device.id, {}).items()},
            }
            for device in run.devices.values()
        },
        "unavailable": run.unavailable,
        "notes": list(summary.notes),
        "torn_files": run.torn,
        "damaged_files": run.damage,
    }


def metric_line(summary: Summary, name: str) -> str:
    """One metric by key or alias, in the unit that name says: `AEC 341.2 W (measured; ...)`."""
    metric, alias = find(name)
    found = summary.readings[metric.key]
    label = alias.name if alias else metric.key
    if isinstance(found, Missing):
        return f"{label} - ({found.reason})"
    scale, unit = (alias.scale, alias.unit) if alias else (1.0, found.unit)
    interval = ""
    if found.low is not None and found.high is not None:
        interval = f" [{significant(found.low * scale)}, {significant(found.high * scale)}]"
    number = significant(found.value * scale, 6)
    return f"{label} {number} {unit}{interval} ({found.basis}; {found.note})"
