"""Reports what each probe can measure on this machine, and what is needed for the rest.

A virtual machine may have an energy counter that never moves, so every probe is read twice and a
counter that stood still is reported. Both reads include counters that are too costly for every
sample (`read_last`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ergmeter import registry
from ergmeter.ports import Probe, ProbeRequest
from ergmeter.records import COLUMN_KINDS, Device, Sample
from ergmeter.sampler import open_probes

# Twice the refresh period of the slowest sensors.
APART_S = 0.5
_READS = {
    "power_w": "power",
    "energy_j": "energy",
    "memory_bytes": "memory",
    "busy_frac": "load",
    "sm_frac": "activity",
    "clock_hz": "clock",
    "temperature_c": "temperature",
    "throttled": "throttling",
    "cpu_s": "CPU time",
    "iowait_frac": "I/O wait",
    "disk_read_bytes": "disk traffic",
    "net_received_bytes": "network traffic",
    "disk_free_bytes": "free disk",
}
_WITH_ENERGY = ("gpu", "cpu", "dram", "module")
_EXCLUSIVE = {"exclusive_process", "exclusive_thread", "prohibited"}


@dataclass
class ProbeFinding:
    """One probe: whether it works here, what it reads, and warnings."""

    probe: str
    works: bool
    reason: str = ""
    devices: list[Device] = field(default_factory=list)
    reads: dict[str, list[str]] = field(default_factory=dict)  # by device
    warnings: list[str] = field(default_factory=list)


def examine(names: list[str] | None = None) -> list[ProbeFinding]:
    """Open every probe (or those named), read it twice, and return what was found."""
    request = ProbeRequest(os.getpid(), str(Path.cwd()), dict(os.environ))
    opened = open_probes(request, _examined() if names is None else names)
    findings = [
        ProbeFinding(name, works=False, reason=why) for name, why in opened.unavailable.items()
    ]
    first = {probe.name: _read(probe) for probe in opened.probes}
    time.sleep(APART_S)
    for probe in opened.probes:
        findings.append(_finding(probe, first[probe.name], _read(probe)))
        probe.close()
    return sorted(findings, key=lambda finding: (not finding.works, finding.probe))


def _examined() -> list[str]:
    """The names of all probes except those that need a recording or run inside a program."""
    others = ("inside", "recording")
    left_out = {name for what in others for name in registry.declaring("probes", reads=what)}
    return [name for name in registry.names("probes") if name not in left_out]


def document(findings: list[ProbeFinding]) -> dict[str, Any]:
    """The findings as a JSON document."""
    return {
        "probes": {
            finding.probe: {
                "works": finding.works,
                "reason": finding.reason,
                "warnings": finding.warnings,
                "devices": [
                    {
                        "id": device.id,
                        "kind": device.kind,
                        "name": device.name,
                        "reads": finding.reads.get(device.id, []),
                        "facts": device.facts,
                    }
                    for device in finding.devices
                ],
            }
            for finding in findings
        },
        "energy": any("energy" in r or "power" in r for f in findings for r in f.reads.values()),
    }


def _read(probe: Probe) -> list[Sample]:
    try:
        read = getattr(probe, "read_last", probe.read)
        return [record for record in read() if isinstance(record, Sample)]
    except Exception:  # noqa: BLE001  a plugin may raise anything; the second reading says it
        return []


def _finding(probe: Probe, first: list[Sample], second: list[Sample]) -> ProbeFinding:
    finding = ProbeFinding(probe.name, works=True, devices=list(probe.devices))
    for device in probe.devices:
        before, after = (_values(samples, device.id) for samples in (first, second))
        finding.reads[device.id] = [word for column, word in _READS.items() if column in after]
        finding.warnings += _warnings(device, before, after)
        if device.kind in _WITH_ENERGY and before.get("energy_j") == after.get("energy_j"):
            finding.reads[device.id] = [r for r in finding.reads[device.id] if r != "energy"]
    if not any(finding.reads.values()):
        finding.works, finding.reason = False, "it opened, but gave no reading"
    return finding


def _values(samples: list[Sample], device: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for sample in samples:
        if sample.device == device:
            pairs = ((name, getattr(sample, name)) for name in COLUMN_KINDS["samples"])
            values.update({name: value for name, value in pairs if value is not None})
    return values


def _warnings(device: Device, before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    label = f"{device.name} [{device.id}]"
    yield from (f"{label}: {reason}" for reason in device.facts.get("absent") or ())
    if device.facts.get("compute_mode") in _EXCLUSIVE:
        yield (
            f"{label} is in compute mode {device.facts['compute_mode']}: a second program that uses"
            " it fails; `nvidia-smi -c DEFAULT` (root) shares it. Measuring is not affected"
        )
    if device.kind in _WITH_ENERGY:
        if "energy_j" not in after and "power_w" in after:
            yield f"{label} has no energy counter: energy is integrated from power"
        elif "energy_j" not in after:
            yield f"{label} gives neither energy nor power"
        elif before.get("energy_j") == after["energy_j"]:
            yield f"{label}: its energy counter stood still for {APART_S} s: not usable"
        if device.facts.get("power_field") == "draw":
            yield f"{label} has no instant power field: the one it has may be a one-second average"
