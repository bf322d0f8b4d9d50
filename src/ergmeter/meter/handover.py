"""Writes steps, samples and marks to disk twice a second, on two threads of our own.

Everything slow happens here or in the sampler, never on the training thread. One thread collects:
it takes new records from the program, merges steps where there are too many (`pending_steps`) and
watches the sampler, which may be stuck in a driver. The other writes. A disk that hangs stops only
the second, so no step is lost.

A failure here costs part of the record, and the record says so; it never fails the training. At the
end the program waits for the disk for a limited time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ergmeter.meter.clock import Timeline, catch_up
from ergmeter.meter.pending_steps import CHUNK_ROWS, PendingSteps
from ergmeter.records import COLUMN_KINDS, Mark, Reported, Sample, StepValues
from ergmeter.runlog.format import DroppedSteps
from ergmeter.runlog.process_group import (
    framework_layout,
    launched_size,
    launcher_rank,
    own_rank,
    world_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ergmeter.runlog.writer import Writer
    from ergmeter.sampler import Opened, Sampler

    class Duty(Protocol):
        """A device that this process begins to read when the process that reads it ends."""

        is_silent: bool  # taking over is not marked: no process read the device before

        def taken(self) -> Opened | None:
            """The device's probe if this process is to read it now, else None."""


HAND_OVER_S = 0.5
# Samples are written at every other hand-over: a batch of any size costs about the same.
SAMPLES_EVERY = 2
OWN_COST_EVERY_S = 4.0
# Rows of steps in one write.
WRITE_ROWS = 4 * CHUNK_ROWS
# If the disk hangs, so many marks wait, and as many reported values; then the oldest are dropped.
MAX_WAITING = 100_000
# How long a fork waits for a hand-over that is under way.
PAUSE_S = 5.0
# How long the end of a program waits for a disk that does not answer, and for one that is slow.
STOP_S = 10.0
LONGEST_STOP_S = 60.0

# How long the end of a program waits for the work that is queued on its device.
DEVICE_S = 5.0


@dataclass(slots=True)
class FirstFailure:
    """Calls ergmeter's own functions. Their first exception becomes a mark; none is raised."""

    mark: Callable[[Mark], None]
    name: str
    about: str = ""  # the start of the mark's text
    is_marked: bool = False

    def __call__(self, work: Callable[..., object], *args: Any, **options: Any) -> None:  # noqa: ANN401
        """Call `work`; an exception becomes a mark, the first time."""
        try:
            work(*args, **options)
        except Exception as error:  # noqa: BLE001  our failure is a mark, not the training's end
            if not self.is_marked:
                self.is_marked = True
                message = f"{self.about}{type(error).__name__}: {error}"[:1000]
                self.mark(Mark(time.monotonic_ns(), self.name, message))


class QueueThread:
    """A daemon thread that works through a bounded queue; a full queue drops its oldest item."""

    def __init__(self, name: str, most: int) -> None:
        self._waiting: deque[Any] = deque()
        self._most = most
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def end(self) -> None:
        """End the thread once it has worked through the queue."""
        self._ending.set()
        self._wake.set()

    def _queue(self, item: object) -> bool:
        """Queue an item. True if the oldest was dropped for it."""
        is_full = len(self._waiting) >= self._most
        if is_full:
            self._waiting.popleft()
        self._waiting.append(item)
        self._wake.set()
        return is_full

    def _turns(self) -> Iterator[None]:
        """Yield once for each waiting item; stop when the queue is empty and `end` was called."""
        while self._waiting or not self._ending.is_set():
            if self._waiting:
                yield
            else:
                self._wake.wait()
                self._wake.clear()

    def _run(self) -> None:
        """Work through the queue; subclasses implement it."""
        raise NotImplementedError


class HandOver:
    """Owns the writer and the sampler of one process. `steps` and `marks` may be appended to by
    any thread."""

    def __init__(
        self,
        writer: Writer,
        sampler: Sampler,
        *,
        stream: str,
        rank: int | None,
        cost_s: Callable[[], float] | None = None,
    ) -> None:
        # Unbounded, so that an append drops no step; they are collected twice a second.
        self.steps: deque[StepValues] = deque()
        self.marks: deque[Mark] = deque()
        self.reported: deque[Reported] = deque()
        self.pending = PendingSteps(self.marks.append)
        self._timeline = Timeline(self.marks.append)
        self._guarded = FirstFailure(self.marks.append, "handover_failed")
        self._header_facts: deque[dict[str, Any]] = deque()
        self._writer = writer
        self._sampler = sampler
        self._stream = stream
        self._rank = rank
        self._collecting = threading.Lock()
        self._lock = threading.Lock()  # of the files; its holder may wait for the disk
        self._stopping = threading.Event()
        self._due = threading.Event()  # there is something to write
        self._collector = threading.Thread(
            target=self._collect_loop, name="ergmeter-collect", daemon=True
        )
        self._thread = threading.Thread(target=self._write_loop, name="ergmeter-write", daemon=True)
        self._cost_s = cost_s or self._cost_of_threads_s
        self._cpu_s: dict[str, float] = {}  # by thread
        self._own_due_s = 0.0
        self._given_rank: int | None = None
        self._ending: Mark | None = None
        self._finished = False
        self._paused: list[threading.Lock] = []
        self._moved_s = time.monotonic()  # when rows were last collected or written
        self._at_disk = False
        # Called before steps are collected: they append steps whose tokens are known by now. At the
        # end, with wait=True, they wait for the others.
        self.sources: list[Callable[..., None]] = []
        self.duties: list[Duty] = []  # devices to read once the process that reads them ends
        self.on_end: list[Callable[[], None]] = []
        self.costs: list[Callable[[], float]] = []  # CPU seconds of other threads of ours
        self._where: dict[str, Any] = {}  # number of ranks and layout, as last asked

    @property
    def run(self) -> Path:
        """The run directory that this process writes to."""
        return self._writer.directory.parent

    @property
    def writer_id(self) -> str:
        """The id of the writer."""
        return self._writer.id

    def start(self) -> None:
        """Start the sampler, and the threads that collect and write."""
        # Not on our thread: an import holds the GIL, and the first steps would stall.
        self._guarded(self._writer.prepare)
        self._ask_rank()
        self._sampler.start()
        self._thread.start()
        self._collector.start()

    def add(self, opened: Opened) -> None:
        """Read these probes too, from now on."""
        devices = [device for probe in opened.probes for device in probe.devices]
        self.describe(devices=devices, unavailable=opened.unavailable)
        for probe in opened.probes:
            self._sampler.add(probe)

    def describe(self, **facts: Any) -> None:  # noqa: ANN401  parts of the writer's header
        """Add to the writer's header at the next hand-over: no caller waits for the disk."""
        self._header_facts.append(facts)

    @property
    def rank(self) -> int:
        """This process's rank, as far as it is known now."""
        self._ask_rank()
        return self._rank_now()

    @property
    def has_others(self) -> bool:
        """True if this process is known by now to be one of several ranks."""
        return bool(self._where)

    def stop(self, ending: Mark | None, *, last: Callable[[], None] | None = None) -> None:
        """Take the last readings, call `last`, write everything, and close the files.

        If it was interrupted, a second call finishes the work.
        """
        self._ending = self._ending or ending
        if not self._stopping.is_set():
            self._guarded(self._ask_where)
            # Work that the device still does belongs to a step, and draws power.
            self._guarded(catch_up, DEVICE_S)
            self._guarded(self._stand_in)
            self._guarded(self._sampler.stop)
            self.duties.clear()  # else a device released now would be taken again
            for end in self.on_end:
                self._guarded(end)
            if last is not None:
                self._guarded(last)
        self._stopping.set()
        self._due.set()
        if self._thread.is_alive():
            self._wait_for_end()
        else:
            self._finish()

    def _wait_for_end(self) -> None:
        """Wait until all is written, while the disk answers; print it if rows are lost."""
        began_s = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(STOP_S / 10)
            now_s = time.monotonic()
            stuck_s = now_s - max(self._moved_s, self._writer.answered_s)
            is_stuck = min(stuck_s, now_s - began_s) > STOP_S
            is_over = is_stuck or now_s - began_s > LONGEST_STOP_S
            if self._thread.is_alive() and is_over:
                if not is_stuck:
                    why = f"the disk was too slow: not done after {LONGEST_STOP_S:g} s"
                elif self._at_disk:
                    why = f"the disk has not answered for {stuck_s:.0f} s"
                else:
                    why = f"the last steps were not complete after {stuck_s:.0f} s"
                rows = len(self.pending) + len(self.steps)
                message = f"{why}; the end of the run is missing, with {rows} rows of steps"
                sys.stderr.write(f"ergmeter: {message} ({self._writer.directory})\n")
                return

    def pause(self) -> None:
        """Block hand-overs during a fork: a child could wait for ever for a lock that they hold."""
        until_s = time.monotonic() + PAUSE_S
        for lock in (self._collecting, self._lock):
            if lock.acquire(timeout=max(0.0, until_s - time.monotonic())):
                self._paused.append(lock)

    def resume(self) -> None:
        """Go on after a fork."""
        while self._paused:
            self._paused.pop().release()

    def flush(self) -> None:
        """Write all records made so far. Waits for the disk."""
        self.collect()
        with self._lock:
            if not self._finished:
                self._write(samples=True)

    def collect(self, *, wait: bool = False) -> None:
        """Collect the program's records so far; with `wait`, also steps unfinished on a device."""
        with self._collecting:
            for source in self.sources:
                self._guarded(source, wait=wait)
            backlog = len(self.steps)
            waiting = backlog + len(self.pending)
            for first in range(0, max(1, backlog), CHUNK_ROWS):
                rows = [self.steps.popleft() for _ in range(min(CHUNK_ROWS, backlog - first))]
                self._guarded(self._add, self._timeline.passed(rows), waiting)
                self._moved_s = time.monotonic()
            if wait:
                self._guarded(self._add, self._timeline.give_up(), waiting)
            self._ask_rank()
            self._guarded(self._trim, self.marks, "marks")
            self._guarded(self._trim, self.reported, "reported figures")

    def _add(self, rows: list[StepValues], waiting: int) -> None:
        try:
            self.pending.add(rows, waiting=waiting)
        except Exception as error:  # whatever it was, the steps are counted as dropped
            self.pending.drop(rows, f"{type(error).__name__}: {error}"[:200])
            raise

    def _trim(self, queue: deque[Any], what: str) -> None:
        """Drops the oldest of too many, with a mark."""
        excess = len(queue) - MAX_WAITING
        if excess > 0:
            for _ in range(excess):
                queue.popleft()
            message = f"{excess} {what}: the disk took them too slowly"
            self.marks.append(Mark(time.monotonic_ns(), "rows_dropped", message))

    def _write(self, *, samples: bool) -> None:
        self._at_disk = True
        try:
            while self._header_facts:
                self._guarded(self._writer.extend_header, **self._header_facts.popleft())
            # The samples first: a process killed in between then has no steps without samples.
            if samples:
                self._guarded(self._write_samples)
            self._write_steps()
            reported = [self.reported.popleft() for _ in range(len(self.reported))]
            self._guarded(self._writer.write, "reported", reported)
            self._write_marks()
        finally:
            self._at_disk = False

    def _finish(self) -> None:
        self.collect(wait=True)
        with self._lock:
            if self._finished:
                return
            for probe, ticks in self._sampler.missed.items():
                self.marks.append(Mark(time.monotonic_ns(), "ticks_missed", f"{probe}: {ticks}"))
            self._write(samples=True)
            self._at_disk = True
            self._guarded(self._write_own_cost)
            if self.pending.merged:
                self.marks.append(Mark(time.monotonic_ns(), "steps_merged", self.pending.merged))
            if self._ending is not None:
                self.marks.append(self._ending)
            self._write_marks()  # what went wrong just now
            self._writer.mark(Mark(time.monotonic_ns(), "closed"))
            self._finished = True
            self._guarded(self._writer.close)
            self._at_disk = False

    def _write_marks(self) -> None:
        for _ in range(len(self.marks)):
            self._guarded(self._writer.mark, self.marks.popleft())

    def _write_samples(self) -> None:
        samples, marks = self._sampler.drain()
        self.marks.extendleft(reversed(marks))
        for probe, rows in samples.items():
            self._guarded(self._writer.write, "samples", rows, stream=probe)
        if time.monotonic() >= self._own_due_s:
            self._own_due_s = time.monotonic() + OWN_COST_EVERY_S
            self._write_own_cost()

    def _write_own_cost(self) -> None:
        own = Sample(time.monotonic_ns(), own_id(self._writer.id), cpu_s=self._cost_s())
        self._writer.write("samples", [own], stream="self")

    def _cost_of_threads_s(self) -> float:
        if threading.current_thread() is self._thread:
            self._cpu_s["write"] = time.thread_time()
        threads_s = self._sampler.cpu_s + sum(self._cpu_s.values())
        return threads_s + sum(cost_s() for cost_s in self.costs)

    def _collect_loop(self) -> None:
        while not self._stopping.wait(HAND_OVER_S):
            self._guarded(self.collect)
            self._due.set()
            self._guarded(self._sampler.watch)
            self._guarded(self._stand_in)
            self._guarded(self._ask_where)
            self._cpu_s["collect"] = time.thread_time()

    def _write_loop(self) -> None:
        rounds = 0
        while not self._stopping.is_set():
            self._due.wait()
            self._due.clear()
            rounds += 1
            with self._lock:
                self._write(samples=rounds % SAMPLES_EVERY == 0)
            self._cpu_s["write"] = time.thread_time()
        self._finish()

    def _stand_in(self) -> None:
        """Take over the devices whose reading process has ended."""
        for duty in tuple(self.duties):
            opened = duty.taken()
            if opened is None:
                continue
            if duty not in self.duties:  # the end came in between
                for probe in opened.probes:
                    self._guarded(probe.close)
            else:
                self.duties.remove(duty)
                self.add(opened)
                names = ", ".join(probe.name for probe in opened.probes) or "nothing"
                if not duty.is_silent:
                    self.marks.append(Mark(time.monotonic_ns(), "took_over", names))

    def _ask_where(self) -> None:
        """Add the number of ranks and their layout to the header, once they are known.

        Asked during the run: at the end of a program its process group is gone.
        """
        world = launched_size() if own_rank() is None else world_size()
        answer = {} if world < 2 else {"world": world, "layout": framework_layout()}
        if answer and answer != self._where:
            self._where = answer
            self.describe(**answer)

    def _write_steps(self) -> None:
        while columns := self.pending.take(WRITE_ROWS):
            columns["rank"] = (self._rank_now(),) * len(columns["start_ns"])
            self._guarded(self._write_columns, columns)
            self._moved_s = time.monotonic()
        dropped = self.pending.take_dropped()
        if dropped is not None:
            self._guarded(self._writer.drop_steps, dropped)

    def _write_columns(self, columns: dict[str, Any]) -> None:
        write = partial(self._writer.write_columns, "steps", stream=self._stream)
        try:
            try:
                write(columns)
            except OverflowError:  # nothing was written; which one it was is looked for only now
                for name, kind in COLUMN_KINDS["steps"].items():
                    if kind == "count":
                        columns[name] = [self.pending.count(value) for value in columns[name]]
                write(columns)
        except Exception as error:  # whatever it was, the steps are counted as dropped
            why = f"{type(error).__name__}: {error}"[:200]
            self._writer.drop_steps(DroppedSteps.of(columns, why))
            raise

    def _ask_rank(self) -> None:
        """Ask the framework for the rank during the run: at the end its process group is gone."""
        if self._rank is None:
            rank = own_rank()
            self._given_rank = self._given_rank if rank is None else rank

    def _rank_now(self) -> int:
        """This process's rank: as declared, else as the framework said, else as the launcher said.

        The environment comes last: several launchers set it late or not at all, and then two ranks
        would both call themselves 0.
        """
        ranks = (self._rank, self._given_rank, launcher_rank())
        return next((rank for rank in ranks if rank is not None), 0)


def own_id(writer: str) -> str:
    """The id of the device under which a writer stores ergmeter's own cost."""
    return f"ergmeter:{writer}"
