"""Reads the whole machine: CPU shares, disk wait, memory, disk and network traffic.

The kernel lists a disk, its partitions and its volumes side by side, and a network card beside the
bonds, bridges and tunnels on it. Their sum counts traffic several times, so only devices backed by
hardware count. A container sees no hardware card: there, every interface but the loopback counts.
The facts name what was counted. Traffic that bypasses the kernel (RDMA, NVLink) is not included.

CPU shares are differences between two reads, so the first read has none. Waiting for a disk is idle
time. Time stolen by a hypervisor counts as busy, because there was work to do.
"""

from __future__ import annotations

import platform
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from ergmeter.errors import NotMeasurable
from ergmeter.hardware.cpu import cpu_model, cpu_peak_of
from ergmeter.ports import DeclaredProbe, ProbeRequest
from ergmeter.records import Device, Sample


class ByteCounters(NamedTuple):
    """Bytes in and out since boot."""

    in_bytes: int
    out_bytes: int


class NodeProbe(DeclaredProbe):
    """Reads the machine as one device."""

    name = "node"
    kinds = ("node",)
    usual_period_s = 3.0

    def __init__(self, request: ProbeRequest) -> None:
        super().__init__(request)
        self._path = request.path
        system = Path(request.options.get("sysfs", "/sys"))
        try:
            memory_total_bytes = psutil.virtual_memory().total
            self._disks = physical_disks(_disk_counters(), system / "block")
            self._cards = network_cards(_card_counters(), system / "class" / "net")
        except (OSError, psutil.Error) as error:
            raise NotMeasurable(
                f"the machine's counters cannot be read ({error}): mount /proc where this runs"
            ) from None
        host = platform.node()
        facts = {
            "host": host,
            "cpu_model": cpu_model(),
            "cores": psutil.cpu_count(),
            "cores_physical": psutil.cpu_count(logical=False),
            "memory_total_bytes": memory_total_bytes,
            **_cpu_peak(),
            "os": _operating_system(),
            "kernel": platform.release(),
            "disk_path": self._path,
            "disk_total_bytes": _disk_bytes(self._path)[0],
            "disks": sorted(self._disks),
            "network_interfaces": sorted(self._cards),
        }
        self.devices: Sequence[Device] = (Device(f"node:{host}", "node", host, self.name, facts),)
        self._cpu: Mapping[str, float] | None = None

    def read(self) -> list[Sample]:
        """Read every counter of the machine."""
        t_ns = time.monotonic_ns()
        cpu = psutil.cpu_times()._asdict()
        busy_frac, iowait_frac = (None, None) if self._cpu is None else cpu_shares(self._cpu, cpu)
        self._cpu = cpu
        memory = psutil.virtual_memory()
        disks = total(_disk_counters(), self._disks)
        network = total(_card_counters(), self._cards)
        return [
            Sample(
                t_ns,
                self.devices[0].id,
                busy_frac=busy_frac,
                iowait_frac=iowait_frac,
                memory_bytes=memory.total - memory.available,
                disk_read_bytes=disks and disks.in_bytes,
                disk_written_bytes=disks and disks.out_bytes,
                disk_free_bytes=_disk_bytes(self._path)[1],
                net_received_bytes=network and network.in_bytes,
                net_sent_bytes=network and network.out_bytes,
            )
        ]


def cpu_shares(
    before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[float | None, float | None]:
    """Shares of time busy and waiting for a disk, between two readings of CPU times."""
    elapsed = {state: after[state] - before[state] for state in after}
    # Linux counts guest time in user time as well.
    total_s = sum(elapsed.values()) - elapsed.get("guest", 0.0) - elapsed.get("guest_nice", 0.0)
    iowait_s = elapsed.get("iowait")
    busy_s = total_s - elapsed["idle"] - (iowait_s or 0.0)
    # The kernel documents that iowait may run backwards; a tick has not passed in under 10 ms.
    if total_s <= 0 or busy_s < 0 or (iowait_s or 0.0) < 0:
        return None, None
    return busy_s / total_s, None if iowait_s is None else iowait_s / total_s


def physical_disks(names: Iterable[str], block: Path) -> frozenset[str]:
    """The disks backed by hardware: no partition, LVM, RAID, loop or zram."""
    if not block.is_dir():  # not Linux: the list has whole disks only
        return frozenset(names)
    return frozenset(name for name in names if _is_physical_disk(block / name))


def _is_physical_disk(folder: Path) -> bool:
    """True for a hardware device that is not one of several paths to an NVMe disk."""
    try:
        hidden = (folder / "hidden").read_text().strip() == "1"
    except OSError:
        hidden = False
    return (folder / "device").exists() and not hidden


def network_cards(names: Iterable[str], net: Path) -> frozenset[str]:
    """The interfaces backed by hardware, or else all but the loopback."""
    outward = frozenset(name for name in names if not re.fullmatch(r"lo\d*", name))
    return frozenset(name for name in outward if (net / name / "device").exists()) or outward


def total(counters: Mapping[str, ByteCounters], names: frozenset[str]) -> ByteCounters | None:
    """The sum of the named counters; None if one is missing, since the sum would fall."""
    if not names or not names <= counters.keys():
        return None
    return ByteCounters(
        sum(counters[name].in_bytes for name in names),
        sum(counters[name].out_bytes for name in names),
    )


def _disk_counters() -> dict[str, ByteCounters]:
    try:
        disks = psutil.disk_io_counters(perdisk=True) or {}
    except NotImplementedError:  # neither /proc/diskstats nor /sys/block, as in some containers
        disks = {}
    return {name: ByteCounters(disk.read_bytes, disk.write_bytes) for name, disk in disks.items()}


def _card_counters() -> dict[str, ByteCounters]:
    cards = psutil.net_io_counters(pernic=True) or {}
    return {name: ByteCounters(card.bytes_recv, card.bytes_sent) for name, card in cards.items()}


def _disk_bytes(path: str) -> tuple[int | None, int | None]:
    """Total and free bytes of the path's file system."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None, None
    return usage.total, usage.free


def _cpu_peak() -> dict[str, object]:
    """Facts of the CPU's theoretical peak, with its assumptions; or why it is unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
        spec = cpu_peak_of(text, clock_hz=_highest_clock_hz())
    except (OSError, NotMeasurable) as error:
        return {"no_cpu_peak": str(error)}
    return {
        "cpu_peak_flops_per_s": dict(spec.peak_flops_per_s),
        "cpu_peak_source": f"{spec.source}; {spec.note}",
    }


def _highest_clock_hz() -> float | None:
    try:
        clock = psutil.cpu_freq()
    except (OSError, NotImplementedError, RuntimeError):
        return None
    return clock.max * 1e6 or None  # 0 where it is not known


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()
