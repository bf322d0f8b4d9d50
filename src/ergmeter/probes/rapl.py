"""Reads the energy of CPU packages and their DRAM from Linux's powercap counters.

Not every `energy_uj` file may be added up: a package contains its core and uncore zones, psys
contains the packages, and a package may be listed twice (MSR and MMIO). So each package and each
package's DRAM is one device; what was left out is in the facts with its reason. AMD's counters have
the same intel-rapl names.

The counters wrap after some minutes under load. They are unwrapped, assuming at most one wrap
between two reads (262 kJ at 500 W last 8 minutes). A fall that would need more watts than any
package draws is a reset: the counter is lost.

A package whose counter stays at 0 beside others that count remains a device without readings. The
sum over packages is then absent, rather than that of one socket.
"""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ergmeter.errors import NotMeasurable
from ergmeter.hardware.cpu import cpu_model
from ergmeter.ports import DeclaredProbe, ProbeRequest
from ergmeter.records import Device, Mark, Sample
from ergmeter.units import J_PER_UJ

ROOT = "/sys/class/powercap"
MOST_W = 5000.0  # no package or its memory draws more
_LEAST_APART_S = 0.1  # two reads may follow each other at once

_ZONE = re.compile(r"(?P<package>intel-rapl(-mmio)?:\d+)(?P<sub>:\d+)?")


@dataclass
class _Zone:
    """A powercap zone that is a device, and its counter so far."""

    folder: Path
    label: str  # "package-0" or "package-0:dram"
    kind: Literal["cpu", "dram"]
    device: str = ""
    range_uj: int = 0
    last_uj: int = 0
    last_s: float = 0.0
    total_uj: int = 0

    def start(self) -> None:
        """Read the counter's range and its first value."""
        self.range_uj = int((self.folder / "max_energy_range_uj").read_text())
        self.last_uj = self.total_uj = int((self.folder / "energy_uj").read_text())
        self.last_s = time.monotonic()

    def energy_j(self) -> float:
        """Joules so far: reads the counter and adds its growth.

        ValueError if the counter fell, and a wrap does not explain the fall.
        """
        now_uj, now_s = int((self.folder / "energy_uj").read_text()), time.monotonic()
        grown_uj = now_uj - self.last_uj
        if grown_uj < 0:
            grown_uj += self.range_uj
            apart_s = max(now_s - self.last_s, _LEAST_APART_S)
            if not 0 <= grown_uj * J_PER_UJ <= MOST_W * apart_s:
                raise ValueError(f"its counter was reset, from {self.last_uj} to {now_uj} uJ")
        self.total_uj += grown_uj
        self.last_uj, self.last_s = now_uj, now_s
        return self.total_uj * J_PER_UJ


class RaplProbe(DeclaredProbe):
    """Reads the energy counter of every CPU package and of its DRAM."""

    name = "rapl"
    kinds = ("cpu", "dram")
    has_interval = True
    usual_period_s = 0.1

    def __init__(self, request: ProbeRequest) -> None:
        root = Path(request.options.get("root", ROOT))
        super().__init__(request)
        if not root.is_dir():
            raise NotMeasurable(absence(root))
        skipped: dict[str, str] = {}
        zones = list(_zones(root, skipped))
        self._zones = [zone for zone in zones if _counts(zone, skipped)]
        if not any(zone.kind == "cpu" for zone in self._zones):
            raise NotMeasurable(_no_package(root, skipped))
        host, model = platform.node(), cpu_model()
        devices: list[Device] = []
        for zone in zones:
            if zone not in self._zones and zone.kind != "cpu":
                continue
            zone.device = f"{self.name}:{host}:{zone.label}"
            facts = {
                "zone": str(zone.folder),
                "max_energy_range_j": zone.range_uj * J_PER_UJ,
                "skipped_zones": dict(skipped),
            }
            title = f"{model} {zone.label}"
            devices.append(Device(zone.device, zone.kind, title, self.name, facts))
        self.devices: Sequence[Device] = devices

    def read(self) -> list[Sample | Mark]:
        """Read every counter. One that can no longer be read is marked lost, once."""
        records: list[Sample | Mark] = []
        for zone in tuple(self._zones):
            t_ns = time.monotonic_ns()
            try:
                records.append(Sample(t_ns, zone.device, energy_j=zone.energy_j()))
            except (OSError, ValueError) as error:
                self._zones.remove(zone)
                records.append(Mark(t_ns, "device_lost", f"{zone.device}: {error}"))
        return records


def absence(root: Path, system: str = sys.platform) -> str:
    """The reason why there is no powercap directory, and what would help."""
    if system != "linux":
        return f"RAPL counters are read through Linux's powercap, and this is {system}"
    return (
        f"{root} does not exist: a virtual machine, or a kernel without RAPL; "
        "measure on the host itself, or try `sudo modprobe intel_rapl_msr`"
    )


def _zones(root: Path, skipped: dict[str, str]) -> Iterator[_Zone]:
    """Yield the zones that become devices; add the others to `skipped`, with the reason."""
    domains: dict[str, str] = {}
    # "intel-rapl:" sorts after "intel-rapl-mmio:", and the MSR zones are the ones to prefer.
    for folder in sorted(root.iterdir(), key=lambda folder: ("mmio" in folder.name, folder.name)):
        match = _ZONE.fullmatch(folder.name)
        if match is None:
            continue
        try:
            name = (folder / "name").read_text().strip()
            inside = (root / match["package"] / "name").read_text().strip()
        except OSError as error:
            skipped[folder.name] = f"no readable name: {error.strerror}"
            continue
        label = f"{inside}:{name}" if match["sub"] else name
        reason = _not_a_device(name, inside, is_part=match["sub"] is not None)
        if reason is None and label in domains:
            reason = f"the same {label} as {domains[label]}"
        if reason is not None:
            skipped[folder.name] = reason
            continue
        domains[label] = folder.name
        yield _Zone(folder, label, "dram" if match["sub"] else "cpu")


def _not_a_device(name: str, inside: str, *, is_part: bool) -> str | None:
    if name.startswith("psys"):
        return f"{name} contains the packages"
    if is_part and name != "dram":
        return f"{name} is contained in {inside}"
    if not is_part and not name.startswith("package"):
        return f"{name} is neither a package nor its memory"
    return None


def _counts(zone: _Zone, skipped: dict[str, str]) -> bool:
    """Start the zone's counter. False, with the reason in `skipped`, if it does not count."""
    file = zone.folder / "energy_uj"
    try:
        zone.start()
    except PermissionError:
        # The class directory lists every zone, sub-zones too, as a link: a glob through the links
        # reaches all the files, where `chmod -R` would not follow them.
        raise NotMeasurable(
            f"no permission to read {file}: run `sudo chmod a+r {zone.folder.parent}/intel-rapl*/"
            "energy_uj`, which until the next boot lets every local user watch the CPU's power "
            "(closely enough to leak secrets: CVE-2020-8694)"
        ) from None
    except (OSError, ValueError) as error:
        skipped[zone.folder.name] = f"{zone.label} cannot be read: {error}"
        return False
    if zone.last_uj == 0:  # as some virtual machines and some desktop DRAM zones read, for ever
        skipped[zone.folder.name] = f"{zone.label} reads 0: this counter does not count"
        return False
    return True


def _no_package(root: Path, skipped: dict[str, str]) -> str:
    reasons = "; ".join(f"{zone}: {reason}" for zone, reason in skipped.items())
    return (
        f"no CPU package to read under {root} ({reasons or 'no intel-rapl zone'}): a virtual"
        " machine, a container that hides them, or a kernel without RAPL; measure on the host"
        " itself"
    )
