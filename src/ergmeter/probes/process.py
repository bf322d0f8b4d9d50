"""Reads memory and CPU time of the measured program and all its descendants.

While a child runs, its CPU time is its own; once its parent has waited for it, the kernel adds it
to the parent's "children" times. Summing own times forgets ended children, and adding the
children's times counts them twice. `CpuLedger` credits each second once: the growth of own times,
and the growth of the children's times, minus the time credited to the child while it ran. That
includes a child that lived and ended between two reads. (The cgroup's counter would include other
programs.)

Memory is the sum of resident sizes, so pages shared between processes count once in each. PSS would
be more exact, but makes the kernel walk every page table: milliseconds for each large process. A
peak between two reads is not in the sum. The kernel keeps a high-water mark for each process, of
which the largest is read with each sample. Marks can't be added: processes need not peak together.
"""

from __future__ import annotations

import platform
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ergmeter.errors import NotMeasurable
from ergmeter.ports import DeclaredProbe, ProbeRequest
from ergmeter.records import Device, Sample

# Finding descendants means reading the parent of every process on the machine: 15 µs each, and a
# large node has thousands. The interval is a little under the probe's period, so that an early read
# still looks. It is longer where looking would cost more than TREE_COST_FRAC of the time: a new
# child's memory is missing until then, its CPU time is credited later.
TREE_PERIOD_S = 1.9
TREE_COST_FRAC = 0.0003
_HIGH_WATER = re.compile(rb"^VmHWM:\s*(\d+) kB", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Usage:
    """One process's CPU times by the kernel: its own, and that of children it has waited for."""

    parent: int
    started_s: float  # identifies the process together with the pid, since pids are reused
    own_s: float
    waited_s: float


class CpuLedger:
    """Sums the CPU time of a changing set of processes: each second once, never decreasing."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._last: Mapping[int, Usage] = {}
        self._owed_s: dict[int, float] = {}

    def enter(self, now: Mapping[int, Usage]) -> float:
        """Add the processes of one read; returns the total so far."""
        died_s = self._credited_to_the_dead(now)
        owed_s: dict[int, float] = {}
        for pid, usage in now.items():
            last = self._last.get(pid)
            if last is None or last.started_s != usage.started_s:
                last = Usage(usage.parent, usage.started_s, own_s=0.0, waited_s=0.0)
            arrived_s = usage.waited_s - last.waited_s
            credited_s = self._owed_s.get(pid, 0.0) + died_s.get(pid, 0.0)
            self.total_s += max(0.0, usage.own_s - last.own_s) + max(0.0, arrived_s - credited_s)
            # A parent is read before its child. If it waits for the child in between, the child's
            # time arrives with the next read; if not then, never (SIGCHLD ignored).
            owed_s[pid] = min(max(0.0, credited_s - arrived_s), died_s.get(pid, 0.0))
        self._last, self._owed_s = now, owed_s
        return self.total_s

    def _credited_to_the_dead(self, now: Mapping[int, Usage]) -> dict[int, float]:
        """CPU time that was credited to processes now gone, by their nearest living ancestor."""
        died_s: defaultdict[int, float] = defaultdict(float)
        for pid, usage in self._last.items():
            if pid in now and now[pid].started_s == usage.started_s:
                continue
            heir = usage.parent
            while heir not in now and heir in self._last:
                heir = self._last[heir].parent
            died_s[heir] += usage.own_s + usage.waited_s
        return died_s


class ProcessProbe(DeclaredProbe):
    """Reads the measured process and its descendants, as one device.

    The option `peak_bytes` is a function, called after the program's end, that returns the peak
    memory that the kernel reports.
    """

    name = "process"
    kinds = ("process",)
    reads = "program"
    usual_period_s = 2.0

    def __init__(self, request: ProbeRequest) -> None:
        super().__init__(request)
        try:
            self._root = psutil.Process(request.pid)
            program = self._root.name()
        except psutil.Error as error:
            reason = f"process {request.pid} cannot be watched ({error})"
            raise NotMeasurable(f"{reason}: give the pid of a running one") from None
        device_id = f"process:{platform.node()}:{request.pid}"
        device = Device(device_id, "process", program, self.name, {"pid": request.pid})
        self.devices: Sequence[Device] = (device,)
        self._members = [self._root]
        self._look_again_s = 0.0
        self._ledger = CpuLedger()
        self._final_peak: Callable[[], int | None] | None = request.options.get("peak_bytes")

    def read(self) -> list[Sample]:
        """Memory and CPU time summed over the process tree; nothing once the process is gone."""
        self._find_members()
        t_ns = time.monotonic_ns()
        usages: dict[int, Usage] = {}
        resident_bytes = 0
        marks_bytes: list[int] = []
        for process in self._members:
            if (reading := _reading(process)) is not None:
                usages[process.pid] = reading[0]
                resident_bytes += reading[1]
                marks_bytes.append(high_water_bytes(process.pid) or 0)
        if self._root.pid not in usages:
            return []
        sample = Sample(
            t_ns,
            self.devices[0].id,
            # An exited process that was not waited for yet has CPU times, and no memory to read.
            memory_bytes=resident_bytes or None,
            memory_peak_bytes=max(marks_bytes) or None,
            cpu_s=self._ledger.enter(usages),
        )
        return [sample]

    def read_last(self) -> list[Sample]:
        """Read once more, and add the peak memory of a program that has ended."""
        samples = self.read()
        peak_bytes = self._final_peak() if self._final_peak else None
        if peak_bytes is not None:
            t_ns = time.monotonic_ns()
            samples.append(Sample(t_ns, self.devices[0].id, memory_peak_bytes=peak_bytes))
        return samples

    def _find_members(self) -> None:
        """Look for new descendants, rarely enough to cost at most TREE_COST_FRAC of the time."""
        began_s = time.monotonic()
        if began_s < self._look_again_s:
            return
        try:
            descendants = self._root.children(recursive=True)
        except psutil.Error:  # the measured process is gone: the read will say so
            return
        members = [self._root, *descendants]  # parents before their children: see CpuLedger
        # One whose parent died belongs to init now, and is still the program's.
        orphans = [process for process in self._members if process not in members]
        self._members = [*members, *(process for process in orphans if process.is_running())]
        cost_s = time.monotonic() - began_s
        self._look_again_s = began_s + max(TREE_PERIOD_S, cost_s / TREE_COST_FRAC)


def _reading(process: psutil.Process) -> tuple[Usage, int] | None:
    """A process's CPU times and resident bytes; None when it is gone."""
    try:
        with process.oneshot():
            cpu = process.cpu_times()
            usage = Usage(
                parent=process.ppid(),
                started_s=process.create_time(),
                own_s=cpu.user + cpu.system,
                waited_s=cpu.children_user + cpu.children_system,
            )
            return usage, process.memory_info().rss
    except psutil.Error:
        return None


def high_water_bytes(pid: int | str) -> int | None:
    """The peak resident bytes of a process; None where the kernel does not report it."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:  # gone, or no Linux
        return None
    match = _HIGH_WATER.search(status)
    return int(match[1]) * 1024 if match else None
