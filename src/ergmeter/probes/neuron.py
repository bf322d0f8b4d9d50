"""Reads AWS Trainium and Inferentia chips from `neuron-monitor` and the driver's sysfs.

The driver reports power only as a share of a maximum that AWS does not publish, averaged over the
last whole minute, with background power subtracted. That is neither power nor energy, so both stay
absent; each minute's shares are written as a mark. A user who knows the maximum may declare it
(`max_power_w`); the resulting estimate is stored as the sensor's average, and gives no joules.

neuron-monitor counts by NeuronCore, from 0 over all chips; here a chip is the device.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ergmeter.errors import NotMeasurable
from ergmeter.ports import DeclaredProbe, ProbeRequest
from ergmeter.probes.stream import ToolStream, json_object
from ergmeter.probes.usage import UsageWatch
from ergmeter.records import Device, Mark, Sample

ROOT = "/sys/devices/virtual/neuron_device"
TOOL = "neuron-monitor"
TOOL_FOLDER = "/opt/aws/neuron/bin"  # on PATH only where a login shell has put it there
FIRST_LINE_S = 8.0

POWER_FILE = "stats/power/utilization"
_MOVED_POWER_FILE = "**/power/utilization"  # driver 2.31 has moved files of its tree
# Fields that are never read, by the reason.
_ABSENT = {
    "the driver gives only a share of a maximum that AWS does not publish, once a minute, without"
    " background power": ["power_w", "energy_j"],
    "AWS exposes no temperature, clock or throttling": ["temperature_c", "clock_hz", "throttled"],
}


@dataclass
class _Use:
    """The use of one chip, from one report of neuron-monitor."""

    busy_frac: float = 0.0
    memory_bytes: int | None = None
    pids: set[int] = field(default_factory=set)


class NeuronProbe(DeclaredProbe):
    """Reads every Neuron chip that the measured process may use."""

    name = "neuron"
    kinds = ("gpu",)
    usual_period_s = 1.0

    def __init__(self, request: ProbeRequest) -> None:
        options = request.options
        super().__init__(request)
        self._root = Path(options.get("root", ROOT))
        if not self._root.is_dir():
            raise NotMeasurable(f"no AWS Neuron chip here: {self._root} does not exist")
        self._max_power_w = options.get("max_power_w")
        self._usage = UsageWatch(request.pid, request.environment)
        self._minutes: dict[int, str] = {}  # the last text of the power file, by chip
        self._shares: dict[int, float] = {}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(_config(self.period_s), file)
            file.flush()
            self._stream = ToolStream(TOOL, [_tool(options), "-c", file.name])
            with self.closed_on_error():
                first = json_object(self._stream.first(FIRST_LINE_S), TOOL)
                self._cores, self.devices = self._describe(first, request.environment)
        self._chips = {int(device.facts["index"]): device.id for device in self.devices}
        self._power_files = {
            chip: _power_file(self._root / f"neuron{chip}") for chip in self._chips
        }

    def read(self) -> list[Sample | Mark]:
        """Samples printed since the last read, and marks of who uses which chip."""
        samples: list[Sample | Mark] = []
        lines = self._stream.new_lines()
        t_ns = time.monotonic_ns()
        marks = list(self._power_marks(t_ns))
        used: Mapping[int, _Use] = {}
        for line in lines:
            used = uses(json_object(line, TOOL), cores_per_chip=self._cores)
            samples += [
                Sample(
                    line.t_ns or t_ns,
                    device,
                    power_average_w=self._estimate_w(chip),
                    busy_frac=used[chip].busy_frac if chip in used else 0.0,
                    memory_bytes=used[chip].memory_bytes if chip in used else None,
                )
                for chip, device in self._chips.items()
            ]
        return [*samples, *marks, *(self._use_marks(t_ns, used) if lines else ())]

    def close(self) -> None:
        """End neuron-monitor."""
        self._stream.close()

    def _describe(
        self, report: Mapping[str, Any], environment: Mapping[str, str]
    ) -> tuple[int, list[Device]]:
        hardware = report.get("neuron_hardware_info") or {}
        try:
            count = int(hardware["neuron_device_count"])
            cores = int(hardware["neuroncore_per_device_count"])
        except (KeyError, ValueError):
            count = cores = 0
        if count < 1 or cores < 1:
            reason = hardware.get("error") or "its report names no chip"
            raise NotMeasurable(f"{TOOL} sees no Neuron chip ({reason}): see `neuron-ls`")
        chosen = _visible(environment, count=count, cores=cores)
        kind = str(hardware.get("neuron_device_type", "AWS Neuron chip"))
        facts = {
            "cores": cores,
            "logical_core": hardware.get("logical_neuroncore_config"),
            "memory_total_bytes": hardware.get("neuron_device_memory_size"),
            "instance_type": (report.get("instance_info") or {}).get("instance_type"),
            "has_energy_counter": False,
            "absent": _ABSENT,
            "max_power_w": self._max_power_w,
        }
        return cores, [self._device(index, kind, facts) for index in chosen]

    def _device(self, index: int, kind: str, facts: Mapping[str, Any]) -> Device:
        serial = _text(self._root / f"neuron{index}" / "info" / "serial_number")
        whose = serial if serial and serial.strip("0x") else f"{platform.node()}:{index}"
        own = {**facts, "index": index, "serial": serial}
        return Device(f"{self.name}:{whose}", "gpu", kind, self.name, own)

    def _power_marks(self, t_ns: int) -> Iterator[Mark]:
        """Yield a mark for each chip with the power share of a new minute."""
        for chip, device in self._chips.items():
            text = _text(self._power_files[chip])
            if text is None or text == self._minutes.get(chip):
                continue
            self._minutes[chip] = text
            shares = power_shares(text)
            if shares is None:
                self._shares.pop(chip, None)
                continue
            low, high, mean = shares
            self._shares[chip] = mean
            detail = f"{device} {mean:.4f} (from {low:.4f} to {high:.4f}) over a minute"
            yield Mark(t_ns, "power_share", detail)

    def _estimate_w(self, chip: int) -> float | None:
        if self._max_power_w is None or chip not in self._shares:
            return None
        return self._shares[chip] * float(self._max_power_w)

    def _use_marks(self, t_ns: int, used: Mapping[int, _Use]) -> Iterator[Mark]:
        pids = {chip: sorted(used[chip].pids) if chip in used else [] for chip in self._chips}
        asked = [(device, lambda chip=chip: pids[chip]) for chip, device in self._chips.items()]
        on_chips, shared = self._usage.changes(asked)
        yield from (Mark(t_ns, "device_used", device) for device in on_chips)
        yield from (Mark(t_ns, "device_shared", f"{chip} {who}") for chip, who in shared.items())


def uses(report: Mapping[str, Any], *, cores_per_chip: int) -> dict[int, _Use]:
    """The use of each chip with a core in use, by chip number, from a report."""
    uses_: dict[int, _Use] = defaultdict(_Use)
    for program in report.get("neuron_runtime_data") or ():
        groups = program.get("report") or {}
        counters = groups.get("neuroncore_counters") or {}
        for core, use in (counters.get("neuroncores_in_use") or {}).items():
            chip = uses_[int(core) // cores_per_chip]
            chip.busy_frac += float(use["neuroncore_utilization"]) / 100 / cores_per_chip
            chip.pids.add(int(program["pid"]))
        memory = (groups.get("memory_used") or {}).get("neuron_runtime_used_bytes") or {}
        breakdown = memory.get("usage_breakdown") or {}
        for core, parts in (breakdown.get("neuroncore_memory_usage") or {}).items():
            chip = uses_[int(core) // cores_per_chip]
            chip.memory_bytes = (chip.memory_bytes or 0) + sum(int(size) for size in parts.values())
    return dict(uses_)


def power_shares(text: str) -> tuple[float, float, float] | None:
    """Minimum, maximum and mean share of the maximum power, 0 to 1; None if there is none.

    The driver writes STATUS,TIME,MIN,MAX,AVERAGE, in percent.
    """
    status, *rest = text.split(",")
    # A file may be read while the driver writes it.
    numbers = [share for share in rest[1:] if re.fullmatch(r"\s*\d+(\.\d+)?\s*", share)]
    if status != "POWER_STATUS_VALID" or len(rest) != 4 or len(numbers) != 3:
        return None
    low, high, mean = (float(number) / 100 for number in numbers)
    return low, high, mean


def _config(period_s: float) -> dict[str, Any]:
    """neuron-monitor's configuration, with only the groups that are read here."""
    groups = [{"type": "neuroncore_counters"}, {"type": "memory_used"}]
    return {
        "period": f"{period_s:g}s",
        "neuron_runtimes": [{"tag_filter": ".*", "metrics": groups}],
        "system_metrics": [],
    }


def _tool(options: Mapping[str, Any]) -> str:
    tool = options.get("tool") or shutil.which(TOOL) or shutil.which(TOOL, path=TOOL_FOLDER)
    if tool is None:
        raise NotMeasurable(
            f"{TOOL} is neither on PATH nor in {TOOL_FOLDER}: install aws-neuronx-tools"
        )
    return str(tool)


def _visible(environment: Mapping[str, str], *, count: int, cores: int) -> list[int]:
    """The chips with a core that the process may use."""
    value = environment.get("NEURON_RT_VISIBLE_CORES")
    if not value:
        return list(range(count))
    chosen: set[int] = set()
    for entry in value.split(","):
        first, _, last = entry.strip().partition("-")
        try:
            chosen.update(range(int(first) // cores, int(last or first) // cores + 1))
        except ValueError:
            raise NotMeasurable(
                f'NEURON_RT_VISIBLE_CORES="{value}" is no list of cores such as 0-3,8'
            ) from None
    inside = sorted(chip for chip in chosen if chip < count)
    if not inside:
        raise NotMeasurable(f'NEURON_RT_VISIBLE_CORES="{value}" names no core of the {count} chips')
    return inside


def _power_file(folder: Path) -> Path:
    usual = folder / POWER_FILE
    return usual if usual.exists() else next(folder.glob(_MOVED_POWER_FILE), usual)


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None
