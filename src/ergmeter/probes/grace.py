"""Reads the power of NVIDIA Grace CPUs and of the modules they share with a GPU, from ACPI meters.

"Module Power" of a GH200 or GB200 includes the GPU, the CPU, the memory of both, and regulator
losses. It is a device of its own kind, which no sum includes. "Grace Power" is the whole CPU
socket; the CPU and SysIO rails are parts of it, and are left out for that reason.

A meter has no energy counter, only the mean power of its last interval, 50 ms or 1 s as configured.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ergmeter.errors import NotMeasurable
from ergmeter.ports import DeclaredProbe, ProbeRequest
from ergmeter.records import Device, Mark, Sample

ROOT = "/sys/class/hwmon"
_W_PER_UW = 1e-6  # hwmon reports microwatts
# An average over longer than this is not "instant" power.
INSTANT_MS = 100

# As the firmware names its meters, https://docs.nvidia.com/grace-perf-tuning-guide/power-thermals.html
_LABEL = re.compile(r"(?P<scope>Module|Grace|CPU|SysIO) Power Socket (?P<socket>\d+)")
_NAMES = {
    "Module": "NVIDIA module {socket}, GPU and CPU",
    "Grace": "NVIDIA Grace socket {socket}",
    "CPU": "NVIDIA Grace socket {socket}, CPU rails alone",
}


@dataclass(frozen=True)
class _Meter:
    """One power meter."""

    file: Path  # power1_average, in microwatts
    scope: str
    socket: str
    interval_ms: int | None

    @property
    def label(self) -> str:
        return f"{self.scope} Power Socket {self.socket}"

    def power_w(self) -> float:
        return int(self.file.read_text()) * _W_PER_UW


class GraceProbe(DeclaredProbe):
    """Reads the power meter of every Grace socket, and of the module around it."""

    name = "grace"
    kinds = ("cpu", "module")
    has_interval = True
    usual_period_s = 0.1

    def __init__(self, request: ProbeRequest) -> None:
        super().__init__(request)
        if "root" not in request.options and platform.machine() != "aarch64":
            raise NotMeasurable(f"no NVIDIA Grace CPU here: this machine is {platform.machine()}")
        root = Path(request.options.get("root", ROOT))
        meters_ = list(_meters(root))
        if not meters_:
            raise NotMeasurable(
                f"no power meter of a Grace CPU under {root}: if this is one, load the kernel"
                " module acpi_power_meter (`sudo modprobe acpi_power_meter`)"
            )
        meters = [meter for meter in meters_ if _part_of(meter, meters_) is None]
        left_out = {m.label: f"part of {_part_of(m, meters_)}" for m in meters_ if m not in meters}
        host = platform.node()
        self._meters = {f"{self.name}:{host}:{meter.label}": meter for meter in meters}
        self.devices: Sequence[Device] = [
            Device(
                id_,
                "module" if meter.scope == "Module" else "cpu",
                _NAMES[meter.scope].format(socket=meter.socket),
                self.name,
                {**_facts(meter), "left_out": left_out},
            )
            for id_, meter in self._meters.items()
        ]

    def read(self) -> list[Sample | Mark]:
        """Read every meter. One that can no longer be read is marked lost, once."""
        records: list[Sample | Mark] = []
        for device, meter in tuple(self._meters.items()):
            t_ns = time.monotonic_ns()
            try:
                records.append(Sample(t_ns, device, power_w=meter.power_w()))
            except (OSError, ValueError) as error:
                del self._meters[device]
                records.append(Mark(t_ns, "device_lost", f"{device}: {error}"))
        return records


def _meters(root: Path) -> Iterator[_Meter]:
    """Yield the power meters under `root`, found by their labels."""
    # Depending on the kernel, the files are with the ACPI device or in the class directory.
    for pattern in ("hwmon*/device/power*_oem_info", "hwmon*/power*_oem_info"):
        for file in sorted(root.glob(pattern)):
            try:
                match = _LABEL.fullmatch(file.read_text().strip())
            except OSError:
                continue
            if match is not None:
                average = file.with_name(file.name.replace("oem_info", "average"))
                yield _Meter(average, match["scope"], match["socket"], _interval_ms(average))


def _interval_ms(average: Path) -> int | None:
    try:
        return int(average.with_name(f"{average.name}_interval").read_text())
    except (OSError, ValueError):
        return None


def _part_of(meter: _Meter, meters: Sequence[_Meter]) -> str | None:
    """The label of the meter that includes this one's power, or None."""
    socket = f"Grace Power Socket {meter.socket}"
    if meter.scope == "SysIO" or (meter.scope == "CPU" and socket in {m.label for m in meters}):
        return socket
    return None


def _facts(meter: _Meter) -> dict[str, object]:
    averaged = meter.interval_ms is None or meter.interval_ms > INSTANT_MS
    return {
        "meter": str(meter.file),
        "scope": meter.scope.lower(),
        "averaging_s": None if meter.interval_ms is None else meter.interval_ms / 1000,
        "power_field": "draw" if averaged else "instant",
        "has_energy_counter": False,
    }
