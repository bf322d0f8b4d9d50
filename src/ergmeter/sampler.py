"""Reads the probes, each on its own schedule, on one thread of its own.

Two traps shaped it. A loop that sleeps for its interval drifts by the cost of each reading, so the
ticks here are multiples of the period since the start; a tick that was missed is skipped and
counted, never made up for. And a driver can hang in a call that nothing can interrupt: whoever
drains the sampler also watches it, and starts a new thread without the probe that is stuck.

A probe that fails or hangs is let go of as well: it may own a tool that would run on for ever. That
may hang in its turn, so nothing waits for it but the end, and that not for long.

Nothing here writes to disk. What was read waits, bounded, until it is drained: a stuck disk does
not stop the readings, and a stuck driver does not stop the hand-over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ergmeter import registry
from ergmeter.errors import ErgmeterError
from ergmeter.hardware import calibration
from ergmeter.records import Mark, Sample
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ergmeter.ports import Probe, ProbeRequest

DEFAULT_PROBES = ("nvml", "amd", "neuron", "apple", "grace", "rapl", "process", "node")
# NVML's slowest call seen takes 16 ms, a busy disk a second or two. What takes longer is not slow.
HANG_S = 5.0
# Per probe: an hour and a half of 10 Hz over two samples a reading, if nobody drains.
MAX_WAITING = 100_000
# An energy counter shows what was drawn up to its last refresh, up to 100 ms ago.
SETTLE_S = 0.25
_SHORT_S = 0.1
# How long the end waits for a failed probe to let go: a tool that heeds no signal has a second.
_LET_GO_S = 2.0


@dataclass
class Opened:
    """The probes that work here, and for the others the reason why not."""

    probes: list[Probe] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)


def open_probes(
    request: ProbeRequest, names: Iterable[str] = DEFAULT_PROBES, *, wait_s: float = 2 * HANG_S
) -> Opened:
    """Construct the probes. One that can't work, or hangs, is left out with its reason."""
    opened = Opened()
    for name in names:
        result = _opened_in_time(request, name, wait_s=wait_s)
        if isinstance(result, str):
            opened.unavailable[name] = result
        else:
            calibration.attach(result.devices)
            opened.probes.append(result)
    return opened


def _opened_in_time(request: ProbeRequest, name: str, *, wait_s: float) -> Probe | str:
    """A probe, or why there is none. One that comes when nobody waits any more is let go of."""
    found: list[Probe | str] = []
    one_at_a_time = threading.Lock()
    is_over = False

    def construct() -> None:
        result = _constructed(request, name)
        with one_at_a_time:
            found.append(result)
            is_late = is_over
        if is_late and not isinstance(result, str):
            _let_go(result)

    thread = threading.Thread(target=construct, name=f"ergmeter-open-{name}", daemon=True)
    thread.start()
    thread.join(wait_s)
    with one_at_a_time:
        is_over = True
        return found[0] if found else f"the driver did not answer within {wait_s:g} s"


def _constructed(request: ProbeRequest, name: str) -> Probe | str:
    try:
        probe: Probe = registry.load("probes", name)(request)
    except ErgmeterError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  a plugin may raise anything; training goes on
        return f"{type(error).__name__}: {error}"
    return probe


def _let_go(probe: Probe) -> None:
    with contextlib.suppress(Exception):  # a plugin may raise anything; nobody reads it any more
        probe.close()


class _Entry:
    """A probe, when it is due next, and what it has read."""

    def __init__(self, probe: Probe, now_ns: int) -> None:
        self.probe = probe
        self.period_ns = max(1, round(probe.period_s * NS_PER_S))
        self.due_ns = now_ns
        self.missed = 0
        self.waiting: deque[Sample] = deque()
        self.dropped = 0  # so far; counted by the thread that reads
        self.told = 0  # of those, marked; counted by the thread that drains

    def advance(self, now_ns: int) -> None:
        """Move on to the next tick that lies ahead."""
        ticks = (now_ns - self.due_ns) // self.period_ns + 1
        self.missed += max(0, ticks - 1)
        self.due_ns += max(1, ticks) * self.period_ns

    def keep(self, samples: list[Sample]) -> None:
        self.waiting.extend(samples)
        for _ in range(len(self.waiting) - MAX_WAITING):
            with contextlib.suppress(IndexError):  # drained meanwhile, and so not dropped
                self.waiting.popleft()
                self.dropped += 1


class Sampler:
    """Owns the probes and the thread that reads them. `drain` and `watch` are the way out.

    `on_failed` hears the name of a probe that is read no more.
    """

    def __init__(
        self, probes: Iterable[Probe], *, on_failed: Callable[[str], None] | None = None
    ) -> None:
        now_ns = time.monotonic_ns()
        self._entries = [_Entry(probe, now_ns) for probe in probes]
        self._all = list(self._entries)
        self._marks: deque[Mark] = deque()
        self._stopping = threading.Event()
        self._wake = threading.Event()  # something has come up: a new probe, or the end
        self._first = threading.Event()
        self._generation = 0
        self._reading: tuple[_Entry, int] | None = None
        self._thread: threading.Thread | None = None
        self._cpu_s: dict[int, float] = {}
        self._on_failed = on_failed
        self._leaving: list[threading.Thread] = []  # that let go of probes that have failed

    def add(self, probe: Probe) -> None:
        """Read this one too, from now on. After the end it is only let go of."""
        if self._stopping.is_set():
            _let_go(probe)
            return
        entry = _Entry(probe, time.monotonic_ns())
        self._all = [*self._all, entry]
        self._entries = [*self._entries, entry]
        self._wake.set()
        if self._thread is None or not self._thread.is_alive():
            self._spawn()

    def start(self) -> None:
        """Begin, and wait for the first round, so that the first step has readings before it."""
        if self._entries:
            self._spawn()
            self._first.wait(HANG_S)

    def stop(self) -> None:
        """Read until the counters have caught up, then let the probes go."""
        if self._thread is None:
            return
        self._stopping.set()
        self._wake.set()
        self._thread.join(SETTLE_S + HANG_S)
        if self._thread.is_alive():
            self.watch(hang_s=0)
            self._generation += 1  # should it come back, it ends
        for entry in self._entries:
            _let_go(entry.probe)
        for leaving in self._leaving:
            leaving.join(_LET_GO_S)

    def drain(self) -> tuple[Mapping[str, list[Sample]], list[Mark]]:
        """Take what was read since the last time, by probe, and the marks."""
        samples = {}
        for entry in self._all:
            taken: list[Sample] = []
            with contextlib.suppress(IndexError):  # the oldest may be dropped meanwhile
                taken += (entry.waiting.popleft() for _ in range(len(entry.waiting)))
            if taken:
                samples[entry.probe.name] = taken
            dropped = entry.dropped - entry.told
            if dropped:
                entry.told += dropped
                said = f"{entry.probe.name}: {dropped} samples, the disk took them too slowly"
                self._marks.append(Mark(time.monotonic_ns(), "samples_dropped", said))
        marks = [self._marks.popleft() for _ in range(len(self._marks))]
        return samples, marks

    def watch(self, *, hang_s: float = HANG_S) -> None:
        """Drop a probe that has not come back for so long; the others go on, on a new thread."""
        reading = self._reading
        if reading is None:
            return
        entry, since_ns = reading
        stuck_s = (time.monotonic_ns() - since_ns) / NS_PER_S
        if stuck_s > hang_s:
            self._fail(entry, f"has not answered for {stuck_s:.1f} s")
            if not self._stopping.is_set():
                self._spawn()

    @property
    def cpu_s(self) -> float:
        """What reading has cost so far, in CPU seconds of its threads."""
        return sum(self._cpu_s.values())

    @property
    def missed(self) -> dict[str, int]:
        """Ticks that came too late to be kept, by probe."""
        return {entry.probe.name: entry.missed for entry in self._all if entry.missed}

    def _spawn(self) -> None:
        self._generation += 1
        self._reading = None
        self._thread = threading.Thread(
            target=self._loop, args=(self._generation,), name="ergmeter-read", daemon=True
        )
        self._thread.start()

    def _loop(self, generation: int) -> None:
        stop_ns: int | None = None
        while self._entries and generation == self._generation:
            now_ns = time.monotonic_ns()
            is_last = stop_ns is not None and now_ns >= stop_ns
            for entry in [e for e in self._entries if is_last or e.due_ns <= now_ns]:
                if not self._read(entry, generation, is_last=is_last):
                    return
            self._first.set()
            self._cpu_s[generation] = time.thread_time()
            if is_last:
                return
            if stop_ns is None and self._stopping.is_set():
                stop_ns = self._last_round_ns()
            due_ns = min((entry.due_ns for entry in self._entries), default=now_ns)
            due_ns = due_ns if stop_ns is None else min(due_ns, stop_ns)
            self._sleep((due_ns - time.monotonic_ns()) / NS_PER_S)
        self._first.set()

    def _last_round_ns(self) -> int:
        """When to read for the last time: once the energy counters have had time to refresh."""
        with_counters = {"gpu", "cpu", "dram"}
        kinds = {device.kind for entry in self._entries for device in entry.probe.devices}
        settle_s = SETTLE_S if kinds & with_counters else 0.0
        return time.monotonic_ns() + round(settle_s * NS_PER_S)

    def _sleep(self, seconds: float) -> None:
        if seconds <= 0:
            return
        if seconds <= _SHORT_S or self._stopping.is_set():
            time.sleep(seconds)  # half the price of waiting for the event, ten times a second
        else:
            self._wake.wait(seconds)
            self._wake.clear()

    def _read(self, entry: _Entry, generation: int, *, is_last: bool) -> bool:
        """Read one probe. False if this thread was replaced while the probe was stuck."""
        self._reading = (entry, time.monotonic_ns())
        try:
            read = getattr(entry.probe, "read_last", entry.probe.read)
            records = read() if is_last else entry.probe.read()
            failure = ""
        except Exception as error:  # noqa: BLE001  one probe's failure is a mark, not the run's end
            records, failure = [], f"{type(error).__name__}: {error}"
        if all(entry is not other for other in self._entries):
            # It hung and was given up. Only now: closing a driver under a call of it may crash.
            _let_go(entry.probe)
            return generation == self._generation
        if generation != self._generation:
            return False
        if failure:
            self._fail(entry, failure)
            self._leave(entry.probe)
            return True
        self._reading = None
        entry.keep([record for record in records if isinstance(record, Sample)])
        self._marks.extend(record for record in records if isinstance(record, Mark))
        entry.advance(time.monotonic_ns())
        return True

    def _fail(self, entry: _Entry, why: str) -> None:
        self._reading = None
        self._entries = [other for other in self._entries if other is not entry]
        said = f"{entry.probe.name}: {why}"
        self._marks.append(Mark(time.monotonic_ns(), "probe_failed", said))
        if self._on_failed is not None:
            self._on_failed(entry.probe.name)

    def _leave(self, probe: Probe) -> None:
        """Let go of a probe, on a thread of its own."""
        leaving = threading.Thread(
            target=_let_go, args=(probe,), name=f"ergmeter-close-{probe.name}", daemon=True
        )
        try:
            leaving.start()
        except RuntimeError:  # the interpreter is ending and starts none
            _let_go(probe)
        else:
            self._leaving.append(leaving)
