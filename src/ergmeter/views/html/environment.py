"""What a run ran on, and under what it was declared: from its own headers, and just from those.

The trap: the machine that makes the report taken for the one that ran. Nothing is looked up here.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from ergmeter.units import number_of
from ergmeter.views.charts.chart import Table
from ergmeter.views.html.page import table, text

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Device

_LONG = 300  # characters of a value
_DEVICES = 16


def environment(evidence: Evidence) -> str:
    """Command, host, versions, settings and devices."""
    run = evidence.run
    first = run.writers[0].header if run.writers else {}
    facts = [
        ("command", shlex.join(str(word) for word in run.header.get("command") or [])),
        ("directory", run.header.get("directory")),
        ("run", run.header.get("id")),
        ("hosts", ", ".join(dict.fromkeys(str(w.header.get("host")) for w in run.writers))),
        ("python", first.get("python")),
        ("platform", first.get("platform")),
        ("ergmeter", run.header.get("ergmeter")),
        *(_mapping("version", first.get("versions"))),
        *(_mapping("setting", evidence.settings.as_json())),
        *(_mapping("workload", run.workload)),
    ]
    told = Table(("what", "value"), tuple((name, _short(said)) for name, said in facts if said))
    by_reason: dict[str, list[str]] = {}
    for name, why in run.unavailable.items():
        by_reason.setdefault(why, []).append(name)
    rows = tuple((", ".join(names), why) for why, names in by_reason.items())
    silent = table(Table(("probe", "what it said"), rows), caption="probes") if rows else ""
    is_open = "" if evidence.devices("gpu") else " open"
    unread = (
        f"<details{is_open}><summary>probes that had nothing to read</summary>{silent}</details>"
    )
    return (
        table(told, caption="environment")
        + _devices(evidence)
        + (f'<div id="probes">{unread}</div>' if silent else "")
        + "".join(f"<p>Damaged, left out: {text(line)}</p>" for line in run.damage)
    )


def _devices(evidence: Evidence) -> str:
    found = [one for one in evidence.run.devices.values() if one.kind != "self"]
    rows = tuple(
        (
            *(one.name, one.kind, one.probe, one.id),
            "; ".join(_facts({**_use(evidence, one), **one.facts})),
        )
        for one in found[:_DEVICES]
    )
    if not rows:
        return ""
    more = f"<p>and {len(found) - _DEVICES} more</p>" if len(found) > _DEVICES else ""
    shown = table(Table(("device", "kind", "probe", "id", "facts"), rows), caption="devices")
    many = number_of(len(found), "device")
    return f"<details><summary>{many}</summary>{shown}{more}</details>"


def _use(evidence: Evidence, device: Device) -> dict[str, str]:
    """Whether the run used a GPU, where that was looked at."""
    use = evidence.gpu_use.get(device.id)
    return {"use": use.state} if use is not None and use.state else {}


def _facts(facts: dict[str, Any]) -> list[str]:
    return [f"{name} {_short(said)}" for name, said in facts.items() if said is not None]


def _mapping(what: str, said: object) -> list[tuple[str, object]]:
    return [(f"{what} {name}", one) for name, one in said.items()] if isinstance(said, dict) else []


def _short(said: object) -> str:
    words = said if isinstance(said, str) else json.dumps(said, default=str)
    return words if len(words) <= _LONG else f"{words[:_LONG]}..."
