"""What the node probe promises: on a scripted kernel to the byte, and on this machine."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.ports import Probe, ProbeRequest
from ergmeter.probes.node import NodeProbe, cpu_shares
from ergmeter.records import Sample

SECTOR = 512  # the unit of /proc/diskstats, whatever the disk's own sector is

DISKS = """\
   8 0 sda 10 0 1000 5 20 0 2000 5 0 5 5
   8 1 sda1 10 0 900 5 20 0 1900 5 0 5 5
 253 0 dm-0 10 0 1000 5 20 0 2000 5 0 5 5
 259 0 nvme0n1 10 0 30 5 20 0 70 5 0 5 5
 259 1 nvme0c0n1 10 0 30 5 20 0 70 5 0 5 5
   7 0 loop0 10 0 4000 5 20 0 4000 5 0 5 5
"""
NETWORK = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo
    lo:    9000 1 0 0 0 0 0 0 9000 1 0 0 0 0 0 0
  eth0:    5000 1 0 0 0 0 0 0 700 1 0 0 0 0 0 0
 bond0:    5000 1 0 0 0 0 0 0 700 1 0 0 0 0 0 0
"""


class Kernel:
    """A scripted /proc and /sys."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.sys = folder / "sys"
        (self.proc / "net").mkdir(parents=True)
        for file in ("cpuinfo", "meminfo"):
            shutil.copy(f"/proc/{file}", self.proc / file)
        self.cpu(user=100, idle=100, iowait=0)
        self.disks(DISKS)
        self.network(NETWORK)
        for name in ("sda", "nvme0n1", "nvme0c0n1"):
            (self.sys / "block" / name / "device").mkdir(parents=True)
        for name in ("dm-0", "loop0"):
            (self.sys / "block" / name).mkdir(parents=True)
        (self.sys / "block" / "nvme0c0n1" / "hidden").write_text("1\n")
        (self.sys / "class" / "net" / "eth0" / "device").mkdir(parents=True)

    def cpu(self, *, user: int, idle: int, iowait: int) -> None:
        (self.proc / "stat").write_text(f"cpu  {user} 0 0 {idle} {iowait} 0 0 0 0 0\nbtime 1\n")

    def disks(self, text: str) -> None:
        (self.proc / "diskstats").write_text(text)

    def network(self, text: str) -> None:
        (self.proc / "net" / "dev").write_text(text)

    def probe(self, path: Path = Path("/")) -> NodeProbe:
        options = {"sysfs": str(self.sys)}
        return NodeProbe(ProbeRequest(pid=1, path=str(path), options=options))


def forget_counters() -> None:
    """Make psutil forget the last values, or it takes another kernel's smaller ones for a wrap."""
    psutil.disk_io_counters.cache_clear()  # type: ignore[attr-defined]  # the stubs leave it out
    psutil.net_io_counters.cache_clear()  # type: ignore[attr-defined]


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    forget_counters()
    real, psutil.PROCFS_PATH = psutil.PROCFS_PATH, str(kernel.proc)
    yield kernel
    psutil.PROCFS_PATH = real
    forget_counters()


def only(probe: NodeProbe) -> Sample:
    (sample,) = probe.read()
    return sample


def test_disk_traffic_counts_each_physical_disk_once(kernel: Kernel) -> None:
    probe = kernel.probe()
    sample = only(probe)
    assert probe.devices[0].facts["disks"] == ["nvme0n1", "sda"]
    assert sample.disk_read_bytes == (1000 + 30) * SECTOR
    assert sample.disk_written_bytes == (2000 + 70) * SECTOR


def test_network_traffic_counts_cards_and_not_what_is_built_on_them(kernel: Kernel) -> None:
    probe = kernel.probe()
    sample = only(probe)
    assert probe.devices[0].facts["network_interfaces"] == ["eth0"]
    assert (sample.net_received_bytes, sample.net_sent_bytes) == (5000, 700)


def test_in_a_container_every_interface_but_the_loopback_counts(kernel: Kernel) -> None:
    (kernel.sys / "class" / "net" / "eth0" / "device").rmdir()
    kernel.network(NETWORK.replace("bond0:    5000", "  ib0:    1000"))
    sample = only(kernel.probe())
    assert (sample.net_received_bytes, sample.net_sent_bytes) == (6000, 1400)


def test_a_machine_without_disk_counters_has_no_traffic_rather_than_none_at_all(
    kernel: Kernel,
) -> None:
    kernel.disks("")
    sample = only(kernel.probe())
    assert (sample.disk_read_bytes, sample.disk_written_bytes) == (None, None)
    assert sample.net_received_bytes == 5000


def test_a_disk_that_disappears_leaves_no_figure_rather_than_a_smaller_one(
    kernel: Kernel,
) -> None:
    probe = kernel.probe()
    assert only(probe).disk_read_bytes is not None
    kernel.disks("".join(line for line in DISKS.splitlines(keepends=True) if "sda " not in line))
    assert only(probe).disk_read_bytes is None


def test_cpu_shares_are_of_the_time_since_the_last_read(kernel: Kernel) -> None:
    probe = kernel.probe()
    first = only(probe)
    assert (first.busy_frac, first.iowait_frac) == (None, None)
    kernel.cpu(user=100 + 30, idle=100 + 50, iowait=20)
    second = only(probe)
    assert second.busy_frac == pytest.approx(0.3)
    assert second.iowait_frac == pytest.approx(0.2)
    kernel.cpu(user=130 + 10, idle=150 + 30, iowait=20)
    assert only(probe).busy_frac == pytest.approx(0.25)


def test_no_tick_between_two_reads_leaves_no_share_rather_than_zero(kernel: Kernel) -> None:
    probe = kernel.probe()
    only(probe)
    assert only(probe).busy_frac is None


def test_a_guests_time_is_not_counted_twice() -> None:
    before = {"user": 0.0, "idle": 0.0, "iowait": 0.0, "guest": 0.0}
    after = {"user": 6.0, "idle": 4.0, "iowait": 0.0, "guest": 5.0}
    assert cpu_shares(before, after) == (0.6, 0.0)


def test_iowait_that_runs_backwards_leaves_no_share() -> None:
    before = {"user": 0.0, "idle": 0.0, "iowait": 1.0}
    after = {"user": 6.0, "idle": 4.0, "iowait": 0.5}
    assert cpu_shares(before, after) == (None, None)


def test_a_system_that_does_not_tell_iowait_has_no_share_of_it() -> None:
    assert cpu_shares({"user": 0.0, "idle": 0.0}, {"user": 1.0, "idle": 3.0}) == (0.25, None)


def test_memory_in_use_is_what_is_not_available(kernel: Kernel) -> None:
    (kernel.proc / "meminfo").write_text(
        "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 700 kB\nBuffers: 0 kB\nCached: 500 kB\n"
        "Active: 1 kB\nInactive: 1 kB\nShmem: 0 kB\nSlab: 0 kB\nSReclaimable: 0 kB\n"
    )
    probe = kernel.probe()
    assert only(probe).memory_bytes == 300 * 1024
    assert probe.devices[0].facts["memory_total_bytes"] == 1000 * 1024


def test_a_path_that_is_gone_has_no_free_space_rather_than_zero(tmp_path: Path) -> None:
    probe = NodeProbe(ProbeRequest(pid=1, path=str(tmp_path / "absent")))
    assert only(probe).disk_free_bytes is None
    assert probe.devices[0].facts["disk_total_bytes"] is None


def test_without_the_kernels_counters_it_is_refused(kernel: Kernel) -> None:
    (kernel.proc / "meminfo").unlink()
    with pytest.raises(NotMeasurable, match="counters cannot be read"):
        kernel.probe()


def test_this_machine_is_described_and_its_work_seen(tmp_path: Path) -> None:
    probe: Probe = NodeProbe(ProbeRequest(pid=1, path=str(tmp_path)))
    (device,) = probe.devices
    assert (device.id, device.kind) == (f"node:{platform.node()}", "node")
    assert device.facts["cores"] == os.cpu_count()
    assert device.facts["kernel"] == os.uname().release
    disk = os.statvfs(tmp_path)
    assert device.facts["disk_total_bytes"] == disk.f_frsize * disk.f_blocks
    assert device.facts["cpu_model"]
    assert probe.period_s == 3.0

    probe.read()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    (sample,) = probe.read()
    assert isinstance(sample, Sample)
    assert sample.busy_frac is not None
    assert 0.4 / device.facts["cores"] < sample.busy_frac <= 1  # less where a host takes cores away
    assert sample.disk_free_bytes == pytest.approx(disk.f_frsize * disk.f_bavail, rel=0.5)
