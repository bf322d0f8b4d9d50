"""Reads the probes, each at its own period, on one background thread.

Ticks are multiples of the period since the start: a loop that sleeps for its interval would drift
by the cost of each reading. A missed tick is skipped and counted. A driver can hang in a call that
can't be interrupted, so the thread that drains the sampler also watches the reading thread. If a
probe hangs, it starts a new reading thread without that probe.

A probe that fails or hangs is also closed, because it may own a subprocess. Closing may hang too,
so only `stop` waits for it, and only briefly.

Nothing here writes to disk. Samples wait in a bounded queue until they are drained: a stuck disk
does not stop the readings, and a stuck driver does not stop the writing of samples.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ergmeter import registry
from ergmeter.errors import ErgmeterError
from ergmeter.hardware import calibration
from ergmeter.ports import Probe, ProbeRequest
from ergmeter.records import Mark, Sample
from ergmeter.units import NS_PER_S

# NVML's slowest call took 16 ms, a busy disk a second or two. A longer call counts as hung.
HANG_S = 5.0
# Samples in a probe's queue: an hour and a half at 10 Hz with two samples a reading.
MAX_WAITING = 100_000
# An energy counter refreshes every 100 ms or less often.
SETTLE_S = 0.25
_SHORT_S = 0.1
# How long `stop` waits for a failed probe to close; a tool that ignores signals takes a second.
_CLOSE_WAIT_S = 2.0


@dataclass
class Opened:
    """The probes that work on this machine, and for the others the reason why not."""

    probes: list[Probe] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)


def default_probes() -> tuple[str, ...]:
    """The names of the probes that are read if the user names none."""
    return registry.declaring("probes", is_default=True)


def open_probes(
    request: ProbeRequest,
    names: Iterable[str],
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    wait_s: float = 2 * HANG_S,
) -> Opened:
    """Construct the named probes. A probe that fails or hangs is left out, with the reason.

    `options`: by probe name, that probe's options; without it, all get those of the request.
    """
    opened = Opened()
    for name in names:
        if options is not None:
            request = replace(request, options=dict(options.get(name, {})))
        result = _open_in_time(request, name, wait_s=wait_s)
        if isinstance(result, str):
            opened.unavailable[name] = result
        else:
            calibration.attach(result.devices)
            opened.probes.append(result)
    return opened


def _open_in_time(request: ProbeRequest, name: str, *, wait_s: float) -> Probe | str:
    """Open a probe within `wait_s`; else return the reason. A probe that opens later is closed."""
    results: list[Probe | str] = []
    lock = threading.Lock()
    is_over = False

    def construct() -> None:
        result: Probe | str
        try:
            result = registry.load("probes", name)(request)
        except ErgmeterError as error:
            result = str(error)
        except Exception as error:  # noqa: BLE001  a plugin may raise anything; training goes on
            result = f"{type(error).__name__}: {error}"
        with lock:
            results.append(result)
            is_late = is_over
        if is_late and not isinstance(result, str):
            _close(result)

    thread = threading.Thread(target=construct, name=f"ergmeter-open-{name}", daemon=True)
    thread.start()
    thread.join(wait_s)
    with lock:
        is_over = True
        return results[0] if results else f"the driver did not answer within {wait_s:g} s"


def _close(probe: Probe) -> None:
    with contextlib.suppress(Exception):  # a plugin may raise anything; it is not read any more
        probe.close()


class _Entry:
    """A probe, its next tick, and its samples that are not drained yet."""

    def __init__(self, probe: Probe, now_ns: int) -> None:
        self.probe = probe
        self.period_ns = max(1, round(probe.period_s * NS_PER_S))
        self.due_ns = now_ns
        self.missed = 0
        self.waiting: deque[Sample] = deque()
        self.dropped = 0  # so far; counted by the reading thread
        self.marked = 0  # of those, how many have a mark; counted by the draining thread

    def advance(self, now_ns: int) -> None:
        """Move to the next tick in the future."""
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
    """Owns the probes and the thread that reads them. Call `drain` and `watch` regularly.

    `on_failed` is called with the name of a probe that failed or hung.
    """

    def __init__(
        self, probes: Iterable[Probe], *, on_failed: Callable[[str], None] | None = None
    ) -> None:
        now_ns = time.monotonic_ns()
        self._entries = [_Entry(probe, now_ns) for probe in probes]
        self._all = list(self._entries)
        self._marks: deque[Mark] = deque()
        self._stopping = threading.Event()
        self._wake = threading.Event()  # a new probe, or the end
        self._first = threading.Event()
        self._generation = 0
        self._reading: tuple[_Entry, int] | None = None
        self._thread: threading.Thread | None = None
        self._cpu_s: dict[int, float] = {}
        self._on_failed = on_failed
        self._closing: list[threading.Thread] = []  # threads that close failed probes

    def add(self, probe: Probe) -> None:
        """Read another probe from now on. After `stop` the probe is only closed."""
        if self._stopping.is_set():
            _close(probe)
            return
        entry = _Entry(probe, time.monotonic_ns())
        self._all = [*self._all, entry]
        self._entries = [*self._entries, entry]
        self._wake.set()
        if self._thread is None or not self._thread.is_alive():
            self._spawn()

    def start(self) -> None:
        """Start reading and wait for the first round, so that readings precede the first step."""
        if self._entries:
            self._spawn()
            self._first.wait(HANG_S)

    def stop(self) -> None:
        """Read once more after the energy counters have refreshed, then close the probes."""
        if self._thread is None:
            return
        self._stopping.set()
        self._wake.set()
        self._thread.join(SETTLE_S + HANG_S)
        if self._thread.is_alive():
            self.watch(hang_s=0)
            self._generation += 1  # ends the stuck thread if it returns
        for entry in self._entries:
            _close(entry.probe)
        for thread in self._closing:
            thread.join(_CLOSE_WAIT_S)

    def drain(self) -> tuple[Mapping[str, list[Sample]], list[Mark]]:
        """Return the samples since the last call, by probe, and the marks."""
        samples = {}
        for entry in self._all:
            taken: list[Sample] = []
            with contextlib.suppress(IndexError):  # the oldest may be dropped meanwhile
                taken += (entry.waiting.popleft() for _ in range(len(entry.waiting)))
            if taken:
                samples[entry.probe.name] = taken
            dropped = entry.dropped - entry.marked
            if dropped:
                entry.marked += dropped
                detail = f"{entry.probe.name}: {dropped} samples dropped, as the disk was too slow"
                self._marks.append(Mark(time.monotonic_ns(), "samples_dropped", detail))
        return samples, [self._marks.popleft() for _ in range(len(self._marks))]

    def watch(self, *, hang_s: float = HANG_S) -> None:
        """Drop a probe that has not returned for `hang_s`; read the others on a new thread."""
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
        """CPU seconds of the reading threads so far."""
        return sum(self._cpu_s.values())

    @property
    def missed(self) -> dict[str, int]:
        """Skipped ticks by probe."""
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
        """The time of the last read: after the energy counters have refreshed."""
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
        """Read one probe. Returns False if this thread was replaced while the probe was stuck."""
        self._reading = (entry, time.monotonic_ns())
        try:
            read = getattr(entry.probe, "read_last", entry.probe.read)
            records = read() if is_last else entry.probe.read()
            failure = ""
        except Exception as error:  # noqa: BLE001  one probe's failure is a mark, not the run's end
            records, failure = [], f"{type(error).__name__}: {error}"
        if all(entry is not other for other in self._entries):
            # It hung and was dropped. Closed only now: closing a driver during a call may crash.
            _close(entry.probe)
            return generation == self._generation
        if generation != self._generation:
            return False
        if failure:
            self._fail(entry, failure)
            self._close_aside(entry.probe)
            return True
        self._reading = None
        entry.keep([record for record in records if isinstance(record, Sample)])
        self._marks.extend(record for record in records if isinstance(record, Mark))
        entry.advance(time.monotonic_ns())
        return True

    def _fail(self, entry: _Entry, why: str) -> None:
        self._reading = None
        self._entries = [other for other in self._entries if other is not entry]
        detail = f"{entry.probe.name}: {why}"
        self._marks.append(Mark(time.monotonic_ns(), "probe_failed", detail))
        if self._on_failed is not None:
            self._on_failed(entry.probe.name)

    def _close_aside(self, probe: Probe) -> None:
        """Close a probe on a thread of its own."""
        thread = threading.Thread(
            target=_close, args=(probe,), name=f"ergmeter-close-{probe.name}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down
            _close(probe)
        else:
            self._closing.append(thread)
