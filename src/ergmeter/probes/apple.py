"""Reads the power of an Apple chip's CPU, GPU and memory from `macmon pipe`, without root.

macOS measures rails of the chip: the GPU's exclude its memory, and none include the power supply.
Where the Mac has a sensor for the whole machine, that is a device of its own kind, so that no sum
adds it to its parts. The Neural Engine is left out: its power is an estimate by macOS, and PyTorch
and MLX do not use it.

`powermetrics` reads the same counters and needs root. macOS has no public interface to them.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ergmeter.errors import NotMeasurable
from ergmeter.ports import DeclaredProbe, ProbeRequest
from ergmeter.probes.stream import ToolStream, json_object
from ergmeter.records import Device, Sample
from ergmeter.units import HZ_PER_MHZ

TOOL = "macmon"
FIRST_LINE_S = 5.0


class AppleProbe(DeclaredProbe):
    """Reads what macmon prints: the mean power of each part over its last interval."""

    name = "apple"
    kinds = ("gpu", "cpu", "dram", "module")
    has_interval = True
    usual_period_s = 0.5

    def __init__(self, request: ProbeRequest) -> None:
        super().__init__(request)
        tool = request.options.get("tool") or _tool()
        interval_ms = str(round(self.period_s * 1000))
        self._stream = ToolStream(TOOL, [tool, "pipe", "--soc-info", "-i", interval_ms])
        with self.closed_on_error():
            first = json_object(self._stream.first(FIRST_LINE_S), TOOL)
            self._parts, self.devices = self._describe(first)

    def _describe(self, first: Mapping[str, Any]) -> tuple[dict[str, str], Sequence[Device]]:
        chip = str((first.get("soc") or {}).get("chip_name", "Apple chip"))
        host = platform.node()
        facts = {
            "host": host,
            "power_field": "draw",  # a mean over the interval
            "averaging_s": self.period_s,
            "has_energy_counter": False,
        }
        parts = {part: f"{self.name}:{host}:{part}" for part in _present(first)}
        devices = []
        for part, device in parts.items():
            kind, name, scope = _PARTS[part]
            own = {**facts, "scope": scope, "absent": _ABSENT.get(part, {})}
            devices.append(Device(device, kind, f"{chip}{name}", self.name, own))
        return parts, devices

    def read(self) -> list[Sample]:
        """Samples printed since the last read, dated to the middle of each interval."""
        samples = []
        for line in self._stream.new_lines():
            report = json_object(line, TOOL)
            t_ns = (line.t_ns or 0) - round(self.period_s * 5e8)
            samples += [_sample(t_ns, device, part, report) for part, device in self._parts.items()]
        return samples

    def close(self) -> None:
        """End macmon."""
        self._stream.close()


# For each part: the device's kind, the suffix to the chip's name, and the scope. The GPU has no
# suffix, since its peak is found under the chip's name.
_PARTS: dict[str, tuple[Any, str, str]] = {
    "gpu": ("gpu", "", "the GPU's rails, without memory"),
    "cpu": ("cpu", " CPU", "the CPU's rails, without memory"),
    "ram": ("dram", " memory", "the memory"),
    "sys": ("module", ", the whole machine", "the whole machine"),
}
# Fields that are never read, by the reason.
_ABSENT = {"gpu": {"an Apple GPU has no memory of its own": ["memory_bytes"]}}


def _tool(system: str = sys.platform) -> str:
    if system != "darwin" or platform.machine() != "arm64":
        raise NotMeasurable(f"no Apple chip here: this is {system} on {platform.machine()}")
    path = shutil.which(TOOL)
    if path is None:
        raise NotMeasurable(
            "the power of an Apple chip is read through macmon, which needs no root and is not"
            " installed: `brew install macmon`"
        )
    return path


def _present(report: Mapping[str, Any]) -> list[str]:
    """The parts that this Mac reports power for. 0 W for memory or machine means no sensor."""
    parts = [part for part in ("gpu", "cpu") if _number(report.get(f"{part}_power")) is not None]
    return parts + [part for part in ("ram", "sys") if _number(report.get(f"{part}_power"))]


def _sample(t_ns: int, device: str, part: str, report: Mapping[str, Any]) -> Sample:
    clock_mhz = _number(report.get(f"{part}_freq_mhz"))
    return Sample(
        t_ns,
        device,
        power_w=_number(report.get(f"{part}_power")),
        busy_frac=_number(report.get(f"{part}_active_ratio")),
        clock_hz=None if clock_mhz is None else clock_mhz * HZ_PER_MHZ,
        temperature_c=_number((report.get("temp") or {}).get(f"{part}_temp_avg")),
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
